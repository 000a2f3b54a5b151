import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.trace.clocks import BILLION, Bracket, Fit, Sample, as_source, find_pulses, fit

UNIX = 1_795_991_560_651_143_261
times = st.integers(0, 2 * UNIX)
offsets = st.integers(-2 * UNIX, 2 * UNIX)
drifts = st.integers(-200_000, 200_000)  # 200 ppm
delays = st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=1, max_size=8)
spans = st.integers(1_000_000, 600 * BILLION)


def true_time(source: int, origin: int, offset: int, drift: int) -> int:
    return source + offset + (source - origin) * drift // BILLION


def taken(at: int, delays: list[tuple[int, int]], origin: int, offset: int, drift: int) -> list[Bracket]:
    """Brackets around one source time, wide by the delays before and after."""
    now = true_time(at, origin, offset, drift)
    return [Bracket(at, now - before, now + after) for before, after in delays]


@given(times, offsets, drifts, spans, delays, delays, st.floats(0, 1))
def test_every_time_between_the_ends_is_placed_within_the_residual(
    origin: int,
    offset: int,
    drift: int,
    span: int,
    begin: list[tuple[int, int]],
    end: list[tuple[int, int]],
    share: float,
) -> None:
    line = (origin, offset, drift)
    found = fit(taken(origin, begin, *line), taken(origin + span, end, *line))
    moment = origin + int(span * share)
    # A nanosecond for the drift's own rounding in each minute.
    slack = 2 + span // (2 * BILLION)
    assert abs(found.place(moment) - true_time(moment, *line)) <= found.residual_ns + slack
    widths = [min(before for before, _ in delays) + min(after for _, after in delays) for delays in (begin, end)]
    assert found.residual_ns <= max(widths) // 2 + 2 + slack


@given(times, offsets, delays)
def test_one_end_gives_the_offset_and_half_the_intersection(
    at: int, offset: int, delays: list[tuple[int, int]]
) -> None:
    found = fit(taken(at, delays, at, offset, 0))
    width = min(before for before, _ in delays) + min(after for _, after in delays)
    assert found.drift_ppb == 0
    assert abs(found.offset_ns - offset) <= found.residual_ns == (width + 1) // 2


def test_many_readings_are_better_than_the_best_of_them() -> None:
    early, late = Bracket(0, 100, 140), Bracket(0, 80, 110)
    assert fit([early, late]) == Fit(0, 105, 0, 5)


def test_brackets_that_contradict_each_other_show_in_the_residual() -> None:
    found = fit([Bracket(0, 0, 10), Bracket(0, 50, 60)])
    assert (found.offset_ns, found.residual_ns) == (30, 20)


def test_both_ends_at_one_moment_cannot_be_a_line() -> None:
    found = fit([Bracket(5, 100, 100)], [Bracket(5, 400, 400)])
    assert found.drift_ppb == 0
    assert found.residual_ns >= 300


@given(times, offsets, drifts, st.lists(st.integers(-3600 * BILLION, 3600 * BILLION), min_size=1, max_size=20))
def test_arrays_are_placed_as_single_times_are(origin: int, offset: int, drift: int, since: list[int]) -> None:
    found = Fit(origin, offset, drift)
    sources = [origin + one for one in since]
    assert found.place_all(np.array(sources, np.int64)).tolist() == [found.place(one) for one in sources]


@given(times, offsets, drifts, offsets, drifts, st.integers(-60 * BILLION, 60 * BILLION))
def test_fits_follow_one_another(
    origin: int, offset: int, drift: int, next_offset: int, next_drift: int, since: int
) -> None:
    first, second = Fit(origin, offset, drift, 3), Fit(origin + offset, next_offset, next_drift, 4)
    both = first.then(second)
    assert both.residual_ns == 8
    assert abs(both.place(origin + since) - second.place(first.place(origin + since))) <= 2 + abs(since) // BILLION


@given(times, offsets, drifts, st.integers(-60 * BILLION, 60 * BILLION))
def test_the_inverse_leads_back(origin: int, offset: int, drift: int, since: int) -> None:
    found = Fit(origin, offset, drift, 3)
    assert abs(found.inverse().place(found.place(origin + since)) - (origin + since)) <= 2 + abs(since) // BILLION


def test_times_of_this_century_keep_their_nanoseconds() -> None:
    found = fit([Bracket(UNIX, 1_000, 1_000)], [Bracket(UNIX + BILLION, BILLION + 1_001, BILLION + 1_001)])
    assert [found.place(UNIX + one) for one in range(3)] == [1_000, 1_001, 1_002]
    assert as_source("pm", found).origin_ns == UNIX


def test_nothing_is_placed_without_brackets() -> None:
    with pytest.raises(InputError, match="no bracket at the beginning"):
        fit([])
    with pytest.raises(InputError, match="ends 5 ns before it begins"):
        fit([Bracket(0, 10, 5)])


def sampled(pulses: list[tuple[int, int]], first: int, period: int, last: int, noise: float = 0.0) -> list[Sample]:
    rng = random.Random(1)  # noqa: S311
    edges = list(range(first, last, period))
    found = []
    for start, end in pairwise(edges):
        covered = sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in pulses)
        share = covered / period
        found.append(Sample(start, end, max(0.0, share * (1 + rng.uniform(-noise, noise)))))
    return found


@settings(deadline=None)
@given(st.integers(-400_000, 400_000), st.integers(0, 9_999), st.sampled_from([2_000, 10_000]))
def test_pulses_place_a_sampler_s_clock_to_a_part_of_its_period(skew: int, phase: int, period: int) -> None:
    pulses = [(1_000_000, 1_200_000), (1_600_000, 1_900_000), (2_300_000, 2_700_000)]
    seen = [(start + skew, end + skew) for start, end in pulses]
    found = find_pulses(sampled(seen, 200_000 + phase, period, 4_000_000), pulses, search_ns=450_000)
    assert len(found) == 3
    line = fit([bracket for pair in found for bracket in pair])
    assert abs(line.offset_ns + skew) <= line.residual_ns
    assert line.residual_ns <= period // 5


def test_pulses_are_found_among_other_work_and_noise() -> None:
    pulses = [(1_000_000, 1_200_000), (1_600_000, 1_900_000)]
    work = [(2_200_000, 5_000_000), (100_000, 130_000)]
    samples = sampled([*pulses, *work], 3, 10_000, 6_000_000, noise=0.02)
    found = find_pulses(samples, pulses, search_ns=450_000)
    line = fit([bracket for pair in found for bracket in pair])
    assert abs(line.offset_ns) <= line.residual_ns + 1 <= 2_000


def test_no_pulse_is_made_up() -> None:
    pulses = [(1_000_000, 1_200_000)]
    assert find_pulses([], pulses, search_ns=450_000) == []
    assert find_pulses(sampled([(3_000_000, 3_200_000)], 0, 10_000, 5_000_000), pulses, search_ns=450_000) == []
    assert find_pulses(sampled([(900_000, 1_700_000)], 0, 10_000, 5_000_000), pulses, search_ns=450_000) == []

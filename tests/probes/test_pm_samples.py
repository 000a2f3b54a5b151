"""Cleaning, gaps, clocks and bins of samples, for any samples at all."""

from itertools import pairwise

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.probes.counter_sets import CYCLES, SETS, counter_set, normalise, plan
from workbench.probes.pm_samples import FAR_NS, RawSamples, Samples, activity, clean, moved, place, to_table
from workbench.trace.clocks import Fit
from workbench.trace.rows import conform

INTERVAL = 10_000
BEGIN = 5_000_000_000
UNIX = 1_700_000_000_000_000_000


def _raw(starts: list[int], interval: int = INTERVAL) -> RawSamples:
    times = np.array([[start, start + interval] for start in starts], np.int64).reshape(-1, 2)
    return RawSamples(times, np.ones((len(times), 2)))


@settings(deadline=None)  # other work on the machine must not fail it
@given(
    offset=st.integers(-(10**15), 10**15),
    drift=st.integers(-50_000, 50_000),
    length=st.integers(10**6, 10**11),
    widths=st.lists(st.integers(0, 5_000), min_size=3, max_size=3),
)
def test_the_true_time_of_a_sample_lies_within_the_residual(
    offset: int, drift: int, length: int, widths: list[int]
) -> None:
    def source(own: int) -> int:
        return UNIX + offset + own + (own - BEGIN) * drift // 1_000_000_000

    moments = [BEGIN, BEGIN + length // 2, BEGIN + length]
    anchors = [
        {"unix": [[source(own), own - width // 3, own + width]]} for own, width in zip(moments, widths, strict=True)
    ]
    own = [BEGIN + length * part // 7 for part in range(1, 7)]
    fit, name = place(_raw([source(moment) for moment in own]), anchors)
    assert name == "unix"
    placed = fit.place_all(np.array([source(moment) for moment in own], np.int64))
    assert np.abs(placed - np.array(own)).max() <= fit.residual_ns + 2


def test_a_clock_that_puts_samples_elsewhere_is_not_taken() -> None:
    anchors = [{"unix": [[UNIX + t, t, t + 100]], "cupti": [[t // 2, t, t + 100]]} for t in (BEGIN, BEGIN + 10**9)]
    raw = _raw([(BEGIN + 10**8 + index * INTERVAL) // 2 for index in range(50)], INTERVAL // 2)
    assert place(raw, anchors)[1] == "cupti"
    with pytest.raises(InputError, match=r"outside the capture by every clock known \(unix, cupti\)"):
        place(_raw([7, 8, 9]), anchors)
    with pytest.raises(InputError, match="none"):
        place(raw, [])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=0, max_size=30),
    st.lists(st.integers(0, 400), min_size=0, max_size=40, unique=True),
)
def test_whatever_the_times_rows_are_in_order_inside_the_window_and_nothing_vanishes_unsaid(
    garbage: list[tuple[int, int]], slots: list[int]
) -> None:
    good = [(BEGIN + slot * INTERVAL, BEGIN + (slot + 1) * INTERVAL) for slot in slots]
    times = np.array([(1, 2), *garbage, *good], np.int64).reshape(-1, 2)
    window = BEGIN, BEGIN + 401 * INTERVAL
    samples = clean(RawSamples(times, np.ones((len(times), 1))), Fit(), "unix", window, INTERVAL)
    assert (samples.end_ns > samples.start_ns).all()
    assert (np.diff(samples.start_ns) > 0).all()
    assert len(samples.start_ns) == 0 or samples.end_ns[0] > window[0]
    dropped = sum(loss["count"] for loss in samples.losses if loss["kind"] in {"damaged-samples", "stale-samples"})
    after = sum(window[1] <= start < end <= window[1] + FAR_NS for start, end in garbage)  # while it was stopping
    assert len(samples.start_ns) + dropped + after + 1 == len(times)
    if not garbage:
        holes = [(second - first - 1) for first, second in pairwise(sorted(slots)) if second - first > 1]
        missed = sum(loss["count"] for loss in samples.losses if loss["kind"] == "counter-gap")
        assert missed == sum(holes)


def test_many_gaps_are_listed_and_then_summed() -> None:
    samples = clean(
        _raw([BEGIN + index * 3 * INTERVAL for index in range(101)]),
        Fit(),
        "",
        (BEGIN, BEGIN + 302 * INTERVAL),
        INTERVAL,
    )
    assert len(samples.losses) == 21
    assert sum(loss["count"] for loss in samples.losses) == 99 * 2
    assert samples.losses[-1]["detail"] == "79 more gaps between counter samples"


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60), st.sampled_from([0, 1, 25_000, 10**9]))
def test_bins_keep_the_sum_of_bytes_and_the_mean_of_shares(values: list[float], bin_ns: int) -> None:
    count = len(values)
    start = np.arange(count, dtype=np.int64) * INTERVAL + BEGIN
    cycles, shares = np.full(count, 1000.0), np.linspace(0, 1000, count)
    columns = np.column_stack([cycles, np.array(values), shares])
    samples = Samples(start, start + INTERVAL, columns, Fit(), "", [])
    metrics = {"sm_cycles": "sm__cycles_elapsed.avg", "dram_read_bytes": "dram__bytes_read.sum"}
    metrics |= {"sm_active": "sm__cycles_active.avg"}
    table = to_table(samples, counter_set("traffic"), metrics, 64, device=0, bin_ns=bin_ns)
    assert conform("counters", table)
    read = table.filter(pc.equal(table.column("name"), "dram_read_bytes"))
    assert pc.sum(read.column("value")).as_py() == pytest.approx(sum(values))
    active = activity(table)
    lengths = [sample.end_ns - sample.start_ns for sample in active]
    assert sum(lengths) == count * INTERVAL
    mean = sum(sample.active * length for sample, length in zip(active, lengths, strict=True)) / sum(lengths)
    assert mean == pytest.approx(float(shares.mean()) / 1000)
    later = moved(table, Fit(0, 7, 0, 0))
    assert pc.min(later.column("start_ns")).as_py() == BEGIN + 7


def test_a_rate_of_nothing_has_no_row() -> None:
    nothing = {"sm_cycles": np.array([0.0, 1000.0]), "ctas_per_sm": np.array([0.0, 3000.0])}
    metrics = {"sm_cycles": "sm__cycles_elapsed.avg", "ctas_per_sm": "sm__ctas_active.avg"}
    ((_, values),) = normalise(counter_set("traffic"), metrics, nothing, 64)
    assert np.isnan(values[0])
    assert values[1] == 3.0
    start = np.array([BEGIN, BEGIN + INTERVAL])
    samples = Samples(start, start + INTERVAL, np.column_stack(list(nothing.values())), Fit(), "", [])
    assert to_table(samples, counter_set("traffic"), metrics, 64, device=0).num_rows == 1
    # Without the cycles, what adds up over them means nothing.
    del metrics["sm_cycles"], nothing["sm_cycles"]
    assert not list(normalise(counter_set("traffic"), metrics, nothing, 64))


def test_sets_begin_with_the_cycles_and_name_each_reading_once() -> None:
    for chosen in SETS.values():
        names = [reading.name for reading in chosen.readings]
        assert names[0] == CYCLES
        assert len(set(names)) == len(names)
        assert all(".pct" not in metric.name for reading in chosen.readings for metric in reading.metrics)
        assert [one["name"] for one in plan(chosen, 1)["readings"]] == names[:-1]


def test_a_sector_is_32_bytes_and_a_tpc_has_two_sms() -> None:
    raw = {"sm_cycles": np.array([1000.0]), "dram_read_bytes": np.array([10.0]), "ctas_per_sm": np.array([4000.0])}
    metrics = {"sm_cycles": "sm__cycles_elapsed.avg", "dram_read_bytes": "dramc__sectors_op_read.sum"}
    metrics |= {"ctas_per_sm": "tpc__ctas_active_realtime.avg"}
    found = {reading.name: values[0] for reading, values in normalise(counter_set("traffic"), metrics, raw, 64)}
    assert found == {"dram_read_bytes": 320.0, "ctas_per_sm": 2.0}

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose.distribution import quantile_curve, step_times, timeline
from workbench.diagnose.steps import Steps

Walls = st.lists(st.integers(1, 10**10), min_size=1, max_size=300)


def steps_of(walls: Sequence[int]) -> Steps:
    wall = np.array(walls, dtype=np.int64)
    end = np.cumsum(wall)
    start = end - wall
    ones = np.ones_like(wall)
    return Steps(np.arange(len(wall)), ones, start, start, end, end, ones, ones, ones, ones, ones)


def test_what_is_said_of_known_step_times() -> None:
    times = step_times(steps_of([1_000_000] * 9 + [91_000_000]))
    assert times.mean.value == pytest.approx(10)
    assert times.p50.value == pytest.approx(1)
    assert times.longest.value == pytest.approx(91)
    assert times.slowest_tenth.value == pytest.approx(0.91)
    assert times.uneven


def test_equal_steps_are_even() -> None:
    times = step_times(steps_of([5] * 40))
    assert times.slowest_tenth.value == pytest.approx(0.1)
    assert not times.uneven


@given(Walls)
def test_the_curve_never_falls_and_holds_only_times_that_happened(walls: list[int]) -> None:
    times, shares = quantile_curve(steps_of(walls))
    assert times == sorted(times)
    assert (shares[0], shares[-1]) == (0, 1)
    assert (times[0], times[-1]) == (min(walls) / 1e6, max(walls) / 1e6)
    assert set(times) <= {wall / 1e6 for wall in walls}


@given(Walls, st.integers(1, 50))
def test_the_timeline_keeps_the_extremes_and_the_order(walls: list[int], bins: int) -> None:
    starts, times = timeline(steps_of(walls), bins)
    assert len(starts) == len(times) <= 2 * bins
    assert starts == sorted(starts)
    assert (min(times), max(times)) == (min(walls) / 1e6, max(walls) / 1e6)

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose.intervals import merge, union_within

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)
WINDOWS = st.lists(st.integers(0, 50), max_size=10, unique=True).map(sorted)


def columns(intervals: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([start for start, _ in intervals], dtype=np.int64)
    return starts, starts + np.array([length for _, length in intervals], dtype=np.int64)


@given(intervals=INTERVALS, edges=WINDOWS)
def test_the_union_within_windows_counts_every_moment_once(intervals: list[tuple[int, int]], edges: list[int]) -> None:
    starts, ends = columns(intervals)
    windows = list(zip(edges[::2], edges[1::2], strict=False))
    covered = {moment for start, length in intervals for moment in range(start, start + length)}
    expected = [sum(moment in covered for moment in range(first, last)) for first, last in windows]
    first, last = (np.array([window[side] for window in windows], dtype=np.int64) for side in (0, 1))
    got = union_within(starts, ends, first, last)
    assert got.dtype == np.int64
    assert got.tolist() == expected


@given(intervals=INTERVALS)
def test_merged_intervals_are_sorted_apart_and_cover_the_same(intervals: list[tuple[int, int]]) -> None:
    starts, ends = merge(*columns(intervals))
    assert (ends > starts).all()
    assert (starts[1:] > ends[:-1]).all()  # those that touch are one
    covered = {moment for start, length in intervals for moment in range(start, start + length)}
    assert {moment for start, end in zip(starts, ends, strict=True) for moment in range(start, end)} == covered


def test_sums_of_nanoseconds_since_1970_are_exact() -> None:
    epoch = 1_795_983_307_035_781_151
    starts = epoch + np.arange(0, 3_000, 3, dtype=np.int64)
    got = union_within(starts, starts + 1, np.array([epoch]), np.array([epoch + 3_000]))
    assert got.tolist() == [1_000]

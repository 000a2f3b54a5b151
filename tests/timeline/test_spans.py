from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.timeline.spans import Spans

Pairs = list[tuple[int, int]]

spans = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)), max_size=300)
windows = st.tuples(st.integers(-100, 5500), st.integers(1, 6000), st.integers(1, 40))


def _made(rows: Pairs) -> Spans:
    pairs = sorted((start, start + length) for start, length in rows)
    start, end = np.array([one for one, _ in pairs], np.int64), np.array([one for _, one in pairs], np.int64)
    return Spans(start, end, marks=start % 2)


def _edges(window: tuple[int, int, int]) -> np.ndarray:
    begin, length, bins = window
    return np.unique(np.linspace(begin, begin + max(length, bins), bins + 1).astype(np.int64))


def _gaps(rows: Pairs) -> Pairs:
    """All gaps, the slow way."""
    pairs = sorted((start, start + length) for start, length in rows)
    found, reach = [], pairs[0][0] if pairs else 0
    for start, end in pairs:
        if start > reach:
            found.append((reach, start))
        reach = max(reach, end)
    return found


@given(spans, windows)
def test_bins_are_what_counting_by_hand_gives(rows: Pairs, window: tuple[int, int, int]) -> None:
    edges = _edges(window)
    made = _made(rows).bins(edges)
    pairs = [(start, start + length) for start, length in rows]
    for index, (begin, stop) in enumerate(pairwise(edges)):
        covered = np.zeros(stop - begin, bool)
        for start, end in pairs:
            covered[max(start - begin, 0) : max(end - begin, 0)] = True
        touching = [end - start for start, end in pairs if start < stop and end > begin]
        gaps = [end - start for start, end in _gaps(rows) if start < stop and end > begin]
        assert made.busy_ns[index] == covered.sum()
        assert made.longest_ns[index] == max(touching, default=0)
        assert made.gap_ns[index] == max(gaps, default=0)
        assert made.started[index] == sum(begin <= start < stop for start, _ in pairs)
        assert made.marked[index] == sum(begin <= start < stop and start % 2 == 1 for start, _ in pairs)


@given(spans, st.integers(1, 2000))
def test_every_gap_survives_at_its_full_length_however_wide_a_bin_is(rows: Pairs, bins: int) -> None:
    edges = _edges((-10, 6000, bins))
    made = _made(rows).bins(edges)
    for start, end in _gaps(rows):
        touched = (edges[:-1] < end) & (edges[1:] > start)
        assert (made.gap_ns[touched] >= end - start).all()


def test_a_gap_of_20_us_survives_in_a_run_of_ten_minutes() -> None:
    start = np.arange(0, 600_000_000_000, 600_000, dtype=np.int64)
    end = start + 600_000
    end[777_777] -= 20_000
    made = Spans(start, end).bins(np.linspace(0, 600_000_000_000, 801).astype(np.int64))
    assert made.gap_ns.max() == 20_000
    assert (made.gap_ns > 0).sum() == 1


@given(spans, windows)
def test_rows_and_gaps_of_a_window(rows: Pairs, window: tuple[int, int, int]) -> None:
    begin, length, _ = window
    stop = begin + length
    made = _made(rows)
    found = [(int(made.start[row]), int(made.end[row])) for row in made.rows(begin, stop)]
    pairs = sorted((start, start + length) for start, length in rows)
    assert found == [(start, end) for start, end in pairs if start < stop and end > begin]
    gaps = made.gaps(begin, stop, 10_000)
    assert gaps is not None
    shown = list(zip(gaps[0].tolist(), gaps[1].tolist(), strict=True))
    assert shown == [(start, end) for start, end in _gaps(rows) if start < stop and end > begin]


def test_unsorted_rows_are_sorted_with_what_goes_with_them() -> None:
    made = Spans(np.array([5, 1]), np.array([6, 2]), ids=np.array([50, 10]), codes=np.array([1, 0]))
    assert made.ids.tolist() == [10, 50]
    assert made.codes.tolist() == [0, 1]

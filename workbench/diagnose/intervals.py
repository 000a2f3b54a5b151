"""Interval arithmetic: how much of a window is covered, never counting anything twice."""

from collections.abc import Callable

import numpy as np

from workbench.diagnose.steps import Ints


def union_within(starts: Ints, ends: Ints, windows_start: Ints, windows_end: Ints) -> Ints:
    """Return, for each window, the length of the union of all [start, end) within it.

    Windows must be sorted and must not overlap; intervals may, in any order. Integers throughout, so sums are exact.
    """
    until = coverage(starts, ends)
    return until(windows_end) - until(windows_start)


def coverage(starts: Ints, ends: Ints) -> Callable[[Ints], Ints]:
    """Return the function that says how much of the union of all [start, end) lies before each of some moments."""
    starts, ends = merge(starts, ends)
    covered = np.concatenate(([0], np.cumsum(ends - starts)))

    def until(moment: Ints) -> Ints:
        if not len(starts):
            return np.zeros(len(moment), dtype=np.int64)
        index = np.searchsorted(starts, moment, side="right")
        partial = np.where(index > 0, np.minimum(moment, ends[index - 1]) - starts[index - 1], 0)
        return covered[np.maximum(index - 1, 0)] + partial

    return until


def merge(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return the union of intervals as sorted, disjoint intervals; empty ones vanish."""
    keep = ends > starts
    order = np.argsort(starts[keep], kind="stable")
    starts, reach = starts[keep][order], np.maximum.accumulate(ends[keep][order]) if keep.any() else ends[keep]
    if not len(starts):
        return starts, reach
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], reach[last]

"""Samples of a counter, and the least and greatest of them in a window."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.timeline.pyramid import Ints, Pyramid

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SampleBins:
    """Least and greatest sample that touches each bin; NaN where none does. ``count``: samples that touch it."""

    low: Floats
    high: Floats
    count: Ints


class Samples:
    """Samples [start, end) in ns with a value, sorted by start here; an instant reading has end equal to start.

    Samples of one counter do not overlap, so at most one that began earlier reaches into a window.
    """

    def __init__(self, start: Ints, end: Ints, value: Any, ids: Ints | None = None) -> None:
        if len(start) > 1 and (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            start, end, value = start[order], end[order], value[order]
            ids = None if ids is None else ids[order]
        self.start, self.end = start, end
        self.value: Floats = np.asarray(value, np.float64)
        self.ids = ids
        self._low = Pyramid(self.value, "min")
        self._high = Pyramid(self.value, "max")

    def __len__(self) -> int:
        return len(self.start)

    def rows(self, start_ns: int, end_ns: int) -> Ints:
        """Return the rows that touch [start_ns, end_ns)."""
        first, last = self._range(np.array([start_ns]), np.array([end_ns]))
        return np.arange(first[0], last[0])

    def bins(self, edges: Ints) -> SampleBins:
        """Return what each bin [edges[i], edges[i+1]) shows. Edges increase."""
        begin, stop = edges[:-1], edges[1:]
        if not len(self.start):
            empty = np.full(len(begin), np.nan)
            return SampleBins(empty, empty, np.zeros(len(begin), np.int64))
        first, last = self._range(begin, stop)
        count = last - first
        low, high = self._low.over(first, last), self._high.over(first, last)
        return SampleBins(np.where(count > 0, low, np.nan), np.where(count > 0, high, np.nan), count)

    def _range(self, begin: Ints, stop: Ints) -> tuple[Ints, Ints]:
        if not len(self.start):
            nothing = np.zeros(len(begin), np.int64)
            return nothing, nothing
        first = np.searchsorted(self.start, begin, side="left")
        earlier = np.maximum(first - 1, 0)
        first = np.where((first > 0) & (self.end[earlier] > begin), earlier, first)
        last = np.searchsorted(self.start, stop, side="left")
        return first, np.maximum(first, last)

"""Spans on one track, and what a window of them shows: how busy, the longest span, the longest gap."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.timeline.pyramid import Ints, Pyramid

Codes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SpanBins:
    """Spans by bin, one array entry each, in ns.

    ``started``: spans that begin in the bin. ``busy_ns``: part of the bin covered by at least one span. ``longest_ns``:
    the whole length of the longest span that touches it, ``gap_ns`` that of the longest gap that touches it, however
    much longer or shorter than the bin they are. ``marked``: spans with the mark that begin in the bin.
    """

    started: Ints
    busy_ns: Ints
    longest_ns: Ints
    gap_ns: Ints
    marked: Ints


class Spans:
    """Spans [start, end) in ns, sorted by start here; ``ids`` and ``codes`` go with them.

    ``marks``: a truth value for each span. A gap is a time, after the first span and before the last start, that no
    span covers. ``pieces``: what a span is part of, by number, -1 for nothing; only between two spans of one piece is
    there a gap, so that a pause between two recordings is none.
    """

    def __init__(
        self,
        start: Ints,
        end: Ints,
        ids: Ints | None = None,
        codes: Codes | None = None,
        marks: Ints | None = None,
        pieces: Ints | None = None,
    ) -> None:
        if len(start) > 1 and (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            start, end = start[order], end[order]
            ids, marks, pieces = (one if one is None else one[order] for one in (ids, marks, pieces))
            codes = codes if codes is None else codes[order]
        self.start, self.end = start, end
        self.ids = np.arange(len(start), dtype=np.int64) if ids is None else ids
        self.codes = np.zeros(len(start), dtype=np.int32) if codes is None else codes
        self.reach = np.maximum.accumulate(end) if len(end) else end
        before = np.concatenate((start[:1], self.reach[:-1]))
        self._joined = _joined(pieces)
        gap = np.maximum(start - before, 0)
        self._gap = Pyramid(gap if self._joined is None else np.where(self._joined, gap, 0), "max")
        self._longest = Pyramid(end - start, "max")
        self._covered = np.concatenate(([0], np.cumsum(np.maximum(end - np.maximum(before, start), 0))))
        self._marked = None if marks is None else np.concatenate(([0], np.cumsum(marks != 0)))

    def __len__(self) -> int:
        return len(self.start)

    def rows(self, start_ns: int, end_ns: int) -> Ints:
        """Return the rows that touch [start_ns, end_ns), in order of start."""
        first, last = self.range(start_ns, end_ns)
        rows = np.arange(first, last)
        return rows[self.end[first:last] > start_ns]

    def touch(self, start_ns: int, end_ns: int) -> bool:
        """Return whether a span touches [start_ns, end_ns), or a gap holds all of it."""
        first, last = self.range(start_ns, end_ns)
        if bool((self.end[first:last] > start_ns).any()):
            return True
        return 0 < first < len(self) and (self._joined is None or bool(self._joined[first]))

    def range(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Return first and one past the last row that can touch the window; ``rows`` keeps those that do."""
        first = int(np.searchsorted(self.reach, start_ns, side="right"))
        last = int(np.searchsorted(self.start, end_ns, side="left"))
        return first, max(first, last)

    def gaps(self, start_ns: int, end_ns: int, most: int) -> tuple[Ints, Ints] | None:
        """Return start and end of every gap that touches the window; None where there are more than ``most`` rows."""
        first, last = self._gap_rows(np.array([start_ns]), np.array([end_ns]))
        if last[0] - first[0] > most:
            return None
        rows = np.arange(first[0], last[0])
        begin, stop = self.reach[rows - 1], self.start[rows]
        open_ = stop > begin if self._joined is None else (stop > begin) & self._joined[rows]
        return begin[open_], stop[open_]

    def bins(self, edges: Ints) -> SpanBins:
        """Return what each bin [edges[i], edges[i+1]) shows. Edges increase."""
        begin, stop = edges[:-1], edges[1:]
        if not len(self.start):
            nothing = np.zeros(len(begin), dtype=np.int64)
            return SpanBins(nothing, nothing, nothing, nothing, nothing)
        starts = np.searchsorted(self.start, edges, side="left")
        touching = np.searchsorted(self.reach, begin, side="right")
        first, last = self._gap_rows(begin, stop)
        covered = self._until(edges, starts)
        marked = np.zeros(len(edges), np.int64) if self._marked is None else self._marked[starts]
        return SpanBins(
            started=np.diff(starts),
            busy_ns=np.diff(covered),
            # A row between the first that touches the bin and the last may end before it: it is shorter than the first.
            longest_ns=np.maximum(self._longest.over(touching, np.maximum(starts[1:], touching)), 0),
            gap_ns=np.maximum(self._gap.over(first, np.maximum(first, last)), 0),
            marked=np.diff(marked),
        )

    def _gap_rows(self, begin: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Return the rows whose gap before them, [reach of the row before, start), can touch [begin, stop)."""
        first = np.maximum(np.searchsorted(self.start, begin, side="right"), 1)
        last = np.minimum(np.searchsorted(self.reach, stop, side="left") + 1, len(self.start))
        return np.minimum(first, len(self.start)), np.maximum(last, np.minimum(first, len(self.start)))

    def _until(self, moments: Ints, starts: Ints) -> Ints:
        """Return the time covered by spans before each moment; ``starts`` counts the spans that began before it."""
        reach = np.where(starts > 0, self.reach[np.maximum(starts - 1, 0)], moments)
        until: Ints = self._covered[starts] - np.maximum(reach - moments, 0)
        return until


def _joined(pieces: Ints | None) -> npt.NDArray[np.bool_] | None:
    """Return for each span whether the one before is part of the same piece; None where all are."""
    if pieces is None:
        return None
    joined = np.zeros(len(pieces), bool)
    joined[1:] = (pieces[1:] == pieces[:-1]) & (pieces[1:] >= 0)
    return joined

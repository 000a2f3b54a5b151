"""What the CTAs of a persistent kernel do at a time: how many compute, do other work of a task, wait."""

from dataclasses import dataclass

import numpy as np

from workbench.timeline.pyramid import Ints
from workbench.timeline.samples import Floats


@dataclass(frozen=True, slots=True)
class LaneBins:
    """Shares of the CTAs by bin, 0 to 1; what is left to 1 ran no task. ``there``: a span touches the bin."""

    computing: Floats
    other: Floats
    waiting: Floats
    there: Ints


class Lanes:
    """Spans of ``ctas`` CTAs, by what they do, kept so that a window needs no scan of them.

    ``tasks`` hold their computing; a trace may have ``computing`` alone. Each is start and end in ns.
    """

    def __init__(
        self, tasks: tuple[Ints, Ints], computing: tuple[Ints, Ints], waiting: tuple[Ints, Ints], ctas: int
    ) -> None:
        self.ctas = ctas
        parts = (tasks, computing, waiting)
        self.start_ns = min((int(start.min()) for start, _ in parts if len(start)), default=0)
        self.end_ns = max((int(end.max()) for _, end in parts if len(end)), default=0)
        self._tasks, self._computing, self._waiting = (_Open(*part, self.start_ns) for part in parts)

    def __len__(self) -> int:
        return len(self._tasks) + len(self._computing) + len(self._waiting)

    def bins(self, edges: Ints) -> LaneBins:
        """Return what the CTAs do in each bin [edges[i], edges[i+1]). Edges increase."""
        task, computing, waiting = (
            part.mean(edges) / max(self.ctas, 1) for part in (self._tasks, self._computing, self._waiting)
        )
        computing = np.minimum(computing, 1)
        other = np.clip(task - computing, 0, 1 - computing)
        waiting = np.clip(waiting, 0, 1 - computing - other)
        there = (computing + other + waiting > 0).astype(np.int64)
        return LaneBins(computing, other, waiting, there)


class _Open:
    """How many spans are open, on average over a bin."""

    def __init__(self, start: Ints, end: Ints, zero: int) -> None:
        # From a zero near by: sums of clock readings would not fit 64 bits.
        self._zero = zero
        self._edges = tuple(np.sort(part - zero) for part in (start, end))
        self._sums = tuple(np.concatenate(([0], np.cumsum(part))) for part in self._edges)

    def __len__(self) -> int:
        return len(self._edges[0])

    def mean(self, edges: Ints) -> Floats:
        """Return the mean number of open spans in each bin between ``edges`` (ns)."""
        moments = edges - self._zero
        begun, ended = (np.searchsorted(part, moments, side="right") for part in self._edges)
        # The time that all spans have run by a moment: of those begun, less what they have still to run.
        ran = (begun - ended) * moments - (self._sums[0][begun] - self._sums[1][ended])
        mean: Floats = np.diff(ran) / np.diff(edges)
        return mean

"""The traced steps of one device as pieces that do not overlap: a kernel, or nothing.

Where kernels overlap, a moment belongs to the one that began first; so pieces add up to the steps exactly, which
durations do not.
"""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns
from workbench.diagnose.steps import Ints, Steps

PHASES = ("draft", "forward", "verify")


@dataclass(frozen=True, slots=True)
class Timeline:
    """Pieces [start, end) in order; together they are the steps. ``kernels``: the rows of the device, by start.

    ``row``: the kernel that ran, -1 for none. ``before`` and ``after``: of a gap, the rows that it lies between (-1:
    the trace holds none). ``gap_start``, ``gap_end``: the whole gap, of which the piece may be the part in one phase.
    ``step`` indexes ``steps``, ``phase`` PHASES.
    """

    device: int
    kernels: Columns
    steps: Steps
    start: Ints
    end: Ints
    row: Ints
    before: Ints
    after: Ints
    gap_start: Ints
    gap_end: Ints
    step: Ints
    phase: Ints

    @property
    def ns(self) -> Ints:
        """Length of each piece."""
        return self.end - self.start

    def __len__(self) -> int:
        return len(self.start)


def build_timeline(kernels: Columns, traced: Steps) -> Timeline | None:
    """Return the pieces of ``traced`` on the device that ran most in them; None where no kernel ran in any."""
    if not len(kernels) or not len(traced):
        return None
    steps = _disjoint(traced)
    bounds = [steps.start, steps.draft_end, steps.forward_end, steps.end]
    lower = np.stack(bounds[:3], axis=1).ravel()
    upper = np.stack(bounds[1:], axis=1).ravel()
    device, start, end = kernels.ints("device"), kernels.ints("start_ns"), kernels.ints("end_ns")
    window = np.searchsorted(steps.start, end, side="right") - 1
    inside = (window >= 0) & (end > start) & (start < steps.end[np.maximum(window, 0)])
    if not inside.any():
        return None
    ordinals, counts = np.unique(device[inside], return_counts=True)
    chosen = int(ordinals[counts.argmax()])
    own = kernels.where((device == chosen) & (end > start))
    start, end = own.ints("start_ns"), own.ints("end_ns")
    reach = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))
    begin = np.maximum(start, reach)
    alive = np.flatnonzero(end > begin)
    begin, stop = begin[alive], end[alive]
    filled = upper > lower
    numbers, lower, upper = np.flatnonzero(filled), lower[filled], upper[filled]
    cuts = np.unique(np.concatenate([begin, stop, lower, upper]))
    left, right = cuts[:-1], cuts[1:]
    place = np.searchsorted(lower, left, side="right") - 1
    keep = (place >= 0) & (left < upper[np.maximum(place, 0)])
    left, right, place = left[keep], right[keep], place[keep]
    at = np.searchsorted(begin, left, side="right") - 1
    runs = (at >= 0) & (stop[np.maximum(at, 0)] > left)
    previous, following = np.where(at >= 0, alive[np.maximum(at, 0)], -1), np.minimum(at + 1, len(alive) - 1)
    has_next = at + 1 < len(alive)
    return Timeline(
        device=chosen,
        kernels=own,
        steps=steps,
        start=left,
        end=right,
        row=np.where(runs, previous, -1),
        before=np.where(runs, -1, previous),
        after=np.where(runs | ~has_next, -1, alive[following]),
        gap_start=np.where(at >= 0, stop[np.maximum(at, 0)], left),
        gap_end=np.where(has_next, begin[following], right),
        step=numbers[place] // 3,
        phase=numbers[place] % 3,
    )


def _disjoint(steps: Steps) -> Steps:
    """Return the steps that do not begin inside an earlier one."""
    if not len(steps):
        return steps
    apart = np.concatenate(([True], steps.start[1:] >= np.maximum.accumulate(steps.end)[:-1]))
    return Steps(*(getattr(steps, name)[apart] for name in Steps.__dataclass_fields__))

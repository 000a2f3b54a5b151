"""Where a series of runs changed its level: binary segmentation with Welch's t, kept honest by Holm and a floor.

Every split of a stretch that leaves MIN_SIDE runs on each side is tested with Welch's unequal-variances t on log
values. The p of a stretch's best split is multiplied by the number of splits tried, those of all stretches of a round
are held against Holm's step-down at LEVEL, and a change smaller than MIN_CHANGE is not one. Accepted splits are
searched again on both sides.

This is for a history page: it says where to look. It is no gate: runs of one machine are correlated, and a drift looks
like steps. ``workbench gate`` compares interleaved launches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, variance

from scipy.special import stdtr

MIN_SIDE = 3
LEVEL = 0.01
MIN_CHANGE = 0.02
MAX_CHANGES = 20


@dataclass(frozen=True, slots=True)
class Change:
    """The level changes before ``index``. ``p``: corrected.

    ``ratio``: geometric mean from here to the next change, over that since the change before.
    """

    index: int
    ratio: float
    p: float


def changes(values: Sequence[float]) -> tuple[Change, ...]:
    """Return where positive ``values``, in order of time, change their level, first to last."""
    logs = [math.log(value) for value in values]
    stretches = [(0, len(logs))]
    accepted: list[Change] = []
    while stretches and len(accepted) < MAX_CHANGES:
        tried = sorted((found for one in stretches if (found := _best(logs, *one))), key=lambda found: found[0].p)
        kept = []
        for rank, (change, stretch) in enumerate(tried):
            corrected = min(1.0, change.p * (len(tried) - rank))
            if corrected > LEVEL:
                break
            if abs(math.log(change.ratio)) >= math.log1p(MIN_CHANGE):
                kept.append((Change(change.index, change.ratio, corrected), stretch))
        accepted += [change for change, _ in kept]
        stretches = [
            part
            for change, (first, last) in kept
            for part in ((first, change.index), (change.index, last))
            if part[1] - part[0] >= 2 * MIN_SIDE
        ]
    accepted.sort(key=lambda change: change.index)
    borders = [0, *(change.index for change in accepted), len(logs)]
    levels = [fmean(logs[first:last]) for first, last in pairwise(borders)] if logs else []
    ratios = [math.exp(after - before) for before, after in pairwise(levels)]
    return tuple(replace(change, ratio=ratio) for change, ratio in zip(accepted, ratios, strict=True))


def _best(logs: Sequence[float], first: int, last: int) -> tuple[Change, tuple[int, int]] | None:
    """Return the most telling split of [first, last), its p corrected for the splits tried."""
    splits = range(first + MIN_SIDE, last - MIN_SIDE + 1)
    best: Change | None = None
    for index in splits:
        before, after = logs[first:index], logs[index:last]
        p = min(1.0, _welch(before, after) * len(splits))
        if best is None or p < best.p:
            best = Change(index, math.exp(fmean(after) - fmean(before)), p)
    return (best, (first, last)) if best else None


def _welch(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the two-sided p of Welch's t; equal values without spread give 1, different ones 0."""
    difference = fmean(right) - fmean(left)
    parts = variance(left) / len(left), variance(right) / len(right)
    error = sum(parts)
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    degrees = error**2 / (parts[0] ** 2 / (len(left) - 1) + parts[1] ** 2 / (len(right) - 1))
    return float(2 * stdtr(degrees, -abs(difference) / math.sqrt(error)))

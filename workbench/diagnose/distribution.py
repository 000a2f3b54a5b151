"""How step times are spread, and how they ran over the run."""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.steps import Steps
from workbench.quantity import Quantity

UNEVEN = 0.2
"""Share of the time in the slowest tenth of the steps from which the order of the steps is worth a look: twice what
equal steps would give."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times of one variant in ms, clean pass. ``slowest_tenth`` is the share of all step time that the slowest
    tenth of the steps took; 10 % if all were equal."""

    steps: int
    mean: Quantity
    p50: Quantity
    p90: Quantity
    p99: Quantity
    longest: Quantity
    slowest_tenth: Quantity

    @property
    def uneven(self) -> bool:
        """Whether a few slow steps carry so much of the time that the mean says little about a typical step."""
        return self.slowest_tenth.value > UNEVEN


def step_times(steps: Steps) -> StepTimes:
    """Describe the step times of ``steps``, of which there must be one at least."""
    wall = steps.wall
    p50, p90, p99 = np.percentile(wall, [50, 90, 99]) / 1e6
    tenth = np.sort(wall)[-max(1, round(len(steps) / 10)) :]
    share = float(tenth.sum() / wall.sum()) if wall.any() else 0.0
    return StepTimes(
        steps=len(steps),
        mean=Quantity(float(wall.mean()) / 1e6, "ms", "measured", note="wall time over steps"),
        p50=Quantity(float(p50), "ms", "measured"),
        p90=Quantity(float(p90), "ms", "measured"),
        p99=Quantity(float(p99), "ms", "measured"),
        longest=Quantity(float(wall.max()) / 1e6, "ms", "measured"),
        slowest_tenth=Quantity(share, "of the step time", "measured", note=f"the {len(tenth)} slowest steps"),
    )


def quantile_curve(steps: Steps, points: int = 201) -> tuple[list[float], list[float]]:
    """Return step times in ms and the share of steps (0 to 1) at or below each, at ``points`` even shares.

    Ends are the shortest and the longest step. Every value is a step that happened.
    """
    shares = np.linspace(0, 1, points)
    times = np.quantile(steps.wall, shares, method="inverted_cdf") / 1e6
    return times.tolist(), shares.tolist()


def timeline(steps: Steps, bins: int = 400) -> tuple[list[float], list[float]]:
    """Return start (s since the first step) and duration (ms) of steps in order, thinned to two a bin.

    Bins hold equal numbers of steps; each keeps its shortest and its longest, so that no outlier is lost.
    """
    keep = []
    for chunk in np.array_split(np.arange(len(steps)), max(1, min(bins, len(steps)))):
        if len(chunk):
            wall = steps.wall[chunk]
            keep += sorted({int(chunk[wall.argmin()]), int(chunk[wall.argmax()])})
    starts = (steps.start[keep] - steps.start[0]) / 1e9 if keep else np.zeros(0)
    return starts.tolist(), (steps.wall[keep] / 1e6).tolist()

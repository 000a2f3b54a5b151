"""95 % intervals with the prompt as the unit: steps of one prompt are alike, and repetitions of it all the more."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, stdtrit

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval; ``low`` and ``high`` are None where there is too little to say."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None


def share(hits: Floats, trials: Floats) -> Interval:
    """Return Σhits/Σtrials, one entry a prompt, with an interval no narrower than that of independent trials.

    Student's t over prompts, and Clopper-Pearson over trials: the wider end of the two on either side. So a share of
    0 or 1 has an interval as well. Without trials the value is 0 and the interval [0, 1].
    """
    total, found = float(trials.sum()), float(hits.sum())
    if not total:
        return Interval(0.0, 0.0, 1.0)
    value = found / total
    low = float(betaincinv(found, total - found + 1, 0.025)) if found else 0.0
    high = float(betaincinv(found + 1, total - found, 0.975)) if found < total else 1.0
    tried = trials > 0
    prompts = int(tried.sum())
    if prompts > 1:
        residual = hits[tried] - value * trials[tried]
        error = float(np.sqrt((residual**2).sum() * prompts / (prompts - 1))) / total
        half = float(stdtrit(prompts - 1, 0.975)) * error
        low, high = min(low, max(0.0, value - half)), max(high, min(1.0, value + half))
    return Interval(value, low, high)


def positive(statistic: Callable[[Flags], float], prompts: int) -> Interval:
    """Return a positive ``statistic`` of all prompts with a jackknife interval on its logarithm.

    ``statistic`` takes a mask of the prompts to use, [prompts]. No interval with fewer than two prompts, or where
    leaving one out leaves nothing to compute from (``statistic`` gives 0, an infinity or not a number).
    """
    everyone = np.ones(prompts, bool)
    value = statistic(everyone)
    if prompts < 2 or not (np.isfinite(value) and value > 0):
        return Interval(value)
    left_out = np.empty(prompts)
    for index in range(prompts):
        mask = everyone.copy()
        mask[index] = False
        left_out[index] = statistic(mask)
    if not (np.isfinite(left_out).all() and (left_out > 0).all()):
        return Interval(value)
    logs = np.log(left_out)
    error = np.sqrt((prompts - 1) / prompts * ((logs - logs.mean()) ** 2).sum())
    half = float(stdtrit(prompts - 1, 0.975) * error)
    return Interval(value, float(value * np.exp(-half)), float(value * np.exp(half)))

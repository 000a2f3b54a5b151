"""What one more draft token costs: step time against draft depth, and the accept length at which it pays.

    step(k) = plain + fixed·[k > 0] + per_token·k        in ms, k draft tokens, verify width T = k + 1

``fixed`` is what drafting at all costs, ``per_token`` what every token adds in drafting and verifying together. The
form is that of vllm#47277, where MiMo-V2.6-Flash with DFlash took 37.7 + 35 + 26 k ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from workbench.diagnose.prompt_jackknife import Interval
from workbench.errors import UnfitError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step time seen at one depth: ``ms`` (a median, or one step), ``prompt`` the unit it belongs to."""

    depth: int
    ms: float
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The fitted step time. Intervals are 95 %, clustered by prompt.

    ``separate``: whether ``fixed`` could be told from ``per_token``; if not it is 0 and its time is in ``per_token``.
    ``depths``: depths that were seen; ``at`` beyond the largest extrapolates.
    """

    plain: Interval
    fixed: Interval
    per_token: Interval
    separate: bool
    depths: tuple[int, ...]

    def at(self, depth: int) -> float:
        """Return the step time at ``depth`` draft tokens, in ms."""
        return self.plain.value + (self.fixed.value if depth else 0.0) + self.per_token.value * depth

    def break_even(self, depth: int) -> float:
        """Return the accept length, bonus token included, from which a step of ``depth`` drafts beats plain decoding.

        More than ``depth`` + 1 cannot be reached: that depth never pays.
        """
        return self.at(depth) / self.plain.value

    def marginal_tok_s(self, depth: int, shorter: float, longer: float) -> float:
        """Return the tok/s that draft token number ``depth`` adds, given the accept lengths without and with it."""
        return 1e3 * (longer / self.at(depth) - shorter / self.at(depth - 1))


def fit_step_cost(points: Sequence[StepPoint], *, fixed_ms: float | None = None) -> StepCost:
    """Fit ``points`` by least squares. ``fixed_ms``: the fixed part, where it is known apart, such as a block drafter's
    own pass.

    Raises UnfitError where there are fewer than two depths.
    """
    depth = np.array([point.depth for point in points], np.float64)
    ms = np.array([point.ms for point in points])
    depths = tuple(sorted({point.depth for point in points}))
    if len(depths) < 2:
        seen = ", ".join(map(str, depths)) or "none"
        raise UnfitError(
            f"draft depths seen: {seen}; a cost per token needs two", hint="add a variant of another depth"
        )
    drafting = (depth > 0).astype(np.float64)
    columns = [np.ones(len(points)), depth]
    separate = fixed_ms is not None
    if fixed_ms is not None:
        ms = ms - fixed_ms * drafting
    elif depths[0] == 0 and len(depths) > 2:
        columns.insert(1, drafting)
        separate = True
    estimate = _least_squares(np.stack(columns, 1), ms, [point.prompt for point in points])
    fixed = Interval(fixed_ms or 0.0) if len(columns) == 2 else estimate[1]
    return StepCost(estimate[0], fixed, estimate[-1], separate, depths)


def break_even_from_bytes(plain_ms: float, plain_bytes: float, wide_bytes: float, bytes_per_s: float) -> Interval:
    """Return the break-even accept length that the byte model alone foretells for a wide verify step.

    ``low``: the wide step runs at the roof. ``value`` and ``high``: it also keeps the time that plain decoding
    (``plain_ms``, measured) spends beyond its own bytes. Modelled. sglang#29244 is the case in point: 6.1 GB a token
    but 39.8 GB for sixteen, so an accept length of 2 lost a third of the tok/s.
    """
    floor_ms = 1e3 * wide_bytes / bytes_per_s
    beyond_ms = max(0.0, plain_ms - 1e3 * plain_bytes / bytes_per_s)
    high = (floor_ms + beyond_ms) / plain_ms
    return Interval(high, floor_ms / plain_ms, high)


def _least_squares(columns: Floats, values: Floats, clusters: list[str]) -> list[Interval]:
    """Return each coefficient; the interval from a covariance clustered by prompt (CR1), none below two prompts."""
    inverse = np.linalg.inv(columns.T @ columns)
    solution = inverse @ columns.T @ values
    residual = values - columns @ solution
    names, index = np.unique(np.array(clusters), return_inverse=True)
    if len(names) < 2 or len(values) <= columns.shape[1]:
        return [Interval(float(value)) for value in solution]
    scores = np.zeros((len(names), columns.shape[1]))
    np.add.at(scores, index, columns * residual[:, None])
    correction = len(names) / (len(names) - 1) * (len(values) - 1) / (len(values) - columns.shape[1])
    covariance = correction * inverse @ (scores.T @ scores) @ inverse
    half = float(stdtrit(len(names) - 1, 0.975)) * np.sqrt(np.diag(covariance))
    return [
        Interval(float(value), float(value - by), float(value + by)) for value, by in zip(solution, half, strict=True)
    ]

"""The decision: looks at paired log ratios, three verdicts, and what could have been seen.

A ratio is ln(head / base) of a speed, one a pair of launches; below 0 is slower. The interval is Student's t over
pairs, because windows of one launch are not independent: treating them as such gave 39 % false alarms in a simulation
with launches that differ by 1 % (``python -m workbench.gate.simulate`` prints this rule's own rates).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from statistics import fmean, stdev

from scipy.special import stdtr, stdtrit

LOOKS = (4, 6, 8, 12, 16)
"""Pairs after which the gate looks, and stops where it can decide."""
LEVEL = 0.015
"""One-sided level of each look. At a true change equal to the floor about 6 % of gates fail, over all looks."""
NO_CHANGE_LEVEL = 0.0035
"""One-sided level of each look against "no change at all", asked for beside LEVEL before anything fails.

Where launches are so noisy that the floor hardly matters, LEVEL alone fails 4 % of gates on unchanged code; with this
it is 1.2 %. On calm machines the floor is the harder test and this changes nothing."""
DELTA = 0.02
"""Practical floor: a slowdown up to this share is accepted."""
POWER = 0.8
MAX_PAIRS_ADVISED = 400


class Verdict(StrEnum):
    """PASS: slower than the floor is ruled out. FAIL: it is shown. UNFIT: the launches cannot be compared."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    UNFIT = "unfit"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of ln(head / base) over ``pairs`` pairs, with bounds of one-sided level ``level`` each.

    ``sd`` is that of one pair. ``p_slower`` is the p-value against "not slower than the floor", or, where that is more,
    against "no change" times LEVEL / NO_CHANGE_LEVEL. With one pair there are no bounds (infinite) and it is 1.
    """

    pairs: int
    mean: float
    sd: float
    low: float
    high: float
    p_slower: float

    @property
    def change(self) -> float:
        """The change as a share: -0.15 is 15 % slower."""
        return math.expm1(self.mean)


def estimate(log_ratios: Sequence[float], *, delta: float = DELTA, level: float = LEVEL) -> Estimate:
    """Estimate the change from one log ratio a pair. Raises ValueError without pairs or for values not finite."""
    if not log_ratios or not all(map(math.isfinite, log_ratios)):
        raise ValueError("log ratios must be finite, one a pair")
    pairs, mean = len(log_ratios), fmean(log_ratios)
    if pairs == 1:
        return Estimate(1, mean, math.nan, -math.inf, math.inf, 1.0)
    sd = stdev(log_ratios)
    half = t_critical(level, pairs - 1) * sd / math.sqrt(pairs)
    no_change = _p_below(0.0, mean, sd, pairs) * LEVEL / NO_CHANGE_LEVEL
    p_slower = min(1.0, max(_p_below(floor_log(delta), mean, sd, pairs), no_change))
    return Estimate(pairs, mean, sd, mean - half, mean + half, p_slower)


def _p_below(limit: float, mean: float, sd: float, pairs: int) -> float:
    """Return the p-value against a true mean of ``limit`` or more."""
    if not sd:  # pairs that agree to the last bit: made by hand, or by a clock that stands still
        return float(mean >= limit)
    return float(stdtr(pairs - 1, (mean - limit) * math.sqrt(pairs) / sd))


def floor_log(delta: float) -> float:
    """Return the floor on the log scale: ln(1 - delta)."""
    return math.log1p(-delta)


@cache
def t_critical(level: float, degrees: int) -> float:
    """Return the value that Student's t exceeds with probability ``level``."""
    return -float(stdtrit(degrees, level))


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Return which hypotheses Holm's step-down rejects: the chance of any false rejection stays at ``level``."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def looks_up_to(pairs: int) -> tuple[int, ...]:
    """Return the looks of a gate that may use ``pairs`` pairs, at least 1; the last pair is always looked at."""
    looks = tuple(look for look in LOOKS if look <= pairs)
    return looks if pairs in looks else (*looks, pairs)


class Family:
    """The verdicts of all variants that are judged together: Holm over them on the failing side.

    A decided variant keeps its verdict, and its p-value keeps counting in the family.
    """

    def __init__(self, names: Iterable[str], *, delta: float = DELTA, level: float = LEVEL) -> None:
        self.delta = delta
        self.level = level
        self.verdicts = dict.fromkeys(names, Verdict.INCONCLUSIVE)
        self.estimates: dict[str, Estimate] = {}
        self._given_up: set[str] = set()

    @property
    def undecided(self) -> tuple[str, ...]:
        """Variants for which another pair can still make a difference."""
        waiting = (name for name, verdict in self.verdicts.items() if verdict is Verdict.INCONCLUSIVE)
        return tuple(name for name in waiting if name not in self._given_up)

    def give_up(self, name: str, verdict: Verdict) -> None:
        """Stop judging ``name``: its launches cannot be compared, or its time is over."""
        self.verdicts[name] = verdict
        self._given_up.add(name)

    def look(self, ratios: Mapping[str, Sequence[float]]) -> None:
        """Judge every undecided variant on all its log ratios so far."""
        undecided = self.undecided
        for name in undecided:
            self.estimates[name] = estimate(ratios[name], delta=self.delta, level=self.level)
        names = list(self.verdicts)
        slower = dict(zip(names, holm([self._p_slower(name) for name in names], self.level), strict=True))
        for name in undecided:
            found = self.estimates[name]
            if found.pairs < LOOKS[0]:
                continue
            if slower[name]:
                self.verdicts[name] = Verdict.FAIL
            elif found.low > floor_log(self.delta):
                self.verdicts[name] = Verdict.PASS

    def _p_slower(self, name: str) -> float:
        found = self.estimates.get(name)
        if found is None or found.pairs < LOOKS[0] or self.verdicts[name] in (Verdict.PASS, Verdict.UNFIT):
            return 1.0
        return found.p_slower


def resolution(sd: float, pairs: int, *, level: float = LEVEL, power: float = POWER) -> float:
    """Return the log change that ``pairs`` pairs resolve when one pair has standard deviation ``sd``.

    An unchanged head passes with probability ``power`` where this is at most the floor; a head slower by the floor and
    this much more fails with that probability. Approximates the power of the t test by (t_level + t_power) sd / sqrt n.
    """
    if pairs < 2:
        return math.inf
    return (t_critical(level, pairs - 1) + t_critical(1 - power, pairs - 1)) * sd / math.sqrt(pairs)


def detectable(sd: float, pairs: int, *, delta: float = DELTA, level: float = LEVEL, power: float = POWER) -> float:
    """Return the minimum detectable effect: the slowdown, as a share, that fails with probability ``power``."""
    beyond_floor = resolution(sd, pairs, level=level, power=power) - floor_log(delta)
    beyond_nothing = resolution(sd, pairs, level=NO_CHANGE_LEVEL, power=power)
    return -math.expm1(-max(beyond_floor, beyond_nothing))


def pairs_needed(sd: float, *, delta: float = DELTA, level: float = LEVEL) -> int | None:
    """Return the pairs after which an unchanged head passes 4 times in 5; None where over 400 would not do."""
    for pairs in range(LOOKS[0], MAX_PAIRS_ADVISED + 1):
        if resolution(sd, pairs, level=level) <= -floor_log(delta):
            return pairs
    return None

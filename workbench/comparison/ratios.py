"""Ratios between two bundles with their intervals: paired by prompt where both decoded the same ones, else by steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit

from workbench.diagnose.columns import Floats
from workbench.diagnose.facts import Facts
from workbench.diagnose.prompt_jackknife import Interval

Pairing = Literal["prompts", "steps"]

FEW = 6
"""Prompts below which an interval says little: benchstat asks for as many runs."""
BLOCKS = 20


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over units (prompts, or blocks of consecutive steps), one array entry each: wall in ns, steps, tokens."""

    wall: Floats
    steps: Floats
    tokens: Floats

    def __len__(self) -> int:
        return len(self.wall)

    def log(self, what: str, mask: Any = None) -> float:
        """Return the logarithm of tok/s ("speed"), tokens a step ("length"), or steps/s ("rate")."""
        wall, steps, tokens = (
            (one if mask is None else one[mask]).sum() for one in (self.wall, self.steps, self.tokens)
        )
        above, below = {"speed": (tokens, wall), "length": (tokens, steps), "rate": (steps, wall)}[what]
        return float(np.log(above) - np.log(below))


@dataclass(frozen=True, slots=True)
class Ratio:
    """ln(head / base) with its 95 % interval; ``low`` and ``high`` None where there is too little to say."""

    log: float
    low: float | None = None
    high: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the interval excludes no change."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def change(self) -> float:
        """The change as a share: 0.05 is 5 % more."""
        return float(np.expm1(self.log))

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, as ratios."""
        bounds = (None if bound is None else float(np.exp(bound)) for bound in (self.low, self.high))
        low, high = bounds
        return {"ratio": float(np.exp(self.log)), "low": low, "high": high, "significant": self.significant}


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides' totals over the same units. ``pairing``: what a unit is; ``units``: how many each side has."""

    base: Totals
    head: Totals
    pairing: Pairing

    @property
    def units(self) -> int:
        """The smaller side's."""
        return min(len(self.base), len(self.head))

    @property
    def few(self) -> bool:
        """Whether they are too few for the interval to be worth much."""
        return self.units < FEW

    def ratio(self, what: str) -> Ratio:
        """Return head over base of "speed", "length" or "rate"."""
        log = self.head.log(what) - self.base.log(what)
        if self.units < 2:
            return Ratio(log)
        if self.pairing == "prompts":
            left = np.array(
                [_without(self.head, what, i) - _without(self.base, what, i) for i in range(len(self.base))]
            )
            return _bounded(log, [left])
        sides = [np.array([_without(side, what, i) for i in range(len(side))]) for side in (self.base, self.head)]
        return _bounded(log, sides)


def own_interval(totals: Totals, what: str) -> Interval:
    """Return one side's tok/s, tokens a step, or steps/s with a jackknife interval over its units. Times in s."""
    log = totals.log(what)
    scale = 1e9 if what in ("speed", "rate") else 1.0
    if len(totals) < 2:
        return Interval(float(np.exp(log)) * scale)
    found = _bounded(log, [np.array([_without(totals, what, i) for i in range(len(totals))])])
    if found.low is None or found.high is None:
        return Interval(float(np.exp(log)) * scale)
    low, value, high = (float(np.exp(one)) * scale for one in (found.low, log, found.high))
    return Interval(value, low, high)


def _without(totals: Totals, what: str, index: int) -> float:
    mask = np.ones(len(totals), bool)
    mask[index] = False
    return totals.log(what, mask)


def _bounded(log: float, sides: Sequence[Floats]) -> Ratio:
    """Return ``log`` with the interval of a jackknife, its squared errors added over independent ``sides``."""
    if not all(np.isfinite(side).all() for side in sides):
        return Ratio(log)
    error = float(np.sqrt(sum((len(side) - 1) / len(side) * ((side - side.mean()) ** 2).sum() for side in sides)))
    half = float(stdtrit(min(len(side) for side in sides) - 1, 0.975)) * error
    return Ratio(log, log - half, log + half)


_BY_PROMPT = """
SELECT prompt_id, sum(end_ns - start_ns)::DOUBLE AS wall, count(*)::DOUBLE AS steps, sum(committed)::DOUBLE AS tokens
FROM steps JOIN sequences USING (variant, run_pass, sequence_id)
WHERE variant = ? AND run_pass = ? AND NOT warmup AND committed > 0 GROUP BY prompt_id
"""


def pair_up(base: Facts, head: Facts) -> Sides:
    """Return both sides' totals by prompt where they share at least two, else by blocks of consecutive steps."""
    rows = [
        {row["prompt_id"]: row for row in one.bundle.query(_BY_PROMPT, [one.variant, one.time_pass]).to_pylist()}
        for one in (base, head)
    ]
    shared = sorted(rows[0].keys() & rows[1].keys())
    if len(shared) >= 2:
        sides = [
            Totals(
                *(np.array([one[prompt][key] for prompt in shared], np.float64) for key in ("wall", "steps", "tokens"))
            )
            for one in rows
        ]
        return Sides(sides[0], sides[1], "prompts")
    return Sides(_blocks(base), _blocks(head), "steps")


def _blocks(facts: Facts) -> Totals:
    steps = facts.steps
    parts = np.array_split(np.arange(len(steps)), max(1, min(BLOCKS, len(steps))))
    sums = [
        (float(steps.wall[part].sum()), float(len(part)), float(steps.committed[part].clip(min=0).sum()))
        for part in parts
        if len(part)
    ]
    return Totals(*(np.array(column) for column in zip(*sums, strict=True)))

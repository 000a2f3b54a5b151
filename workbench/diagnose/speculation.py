"""Acceptance: tokens per step, how far drafts survive, and whether speculation changed the text."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from workbench.diagnose.host_use import own_ns
from workbench.diagnose.settings import UNKNOWN, variant_settings
from workbench.diagnose.steps import Steps
from workbench.quantity import Quantity, Tag
from workbench.trace.bundle import Bundle

Floats = npt.NDArray[np.float64]

COUNTING_RULE = "committed tokens per step, bonus token included"


@dataclass(frozen=True, slots=True)
class Position:
    """One draft position, from 1. ``reached`` counts steps that drafted so far, ``accepted`` those that kept it."""

    position: int
    reached: int
    accepted: int

    @property
    def rate(self) -> float:
        """Share of drafts that survive up to and including this position."""
        return self.accepted / self.reached if self.reached else 0.0


def accept_length(steps: Steps, *, simulated: bool = False) -> Quantity:
    """Return the mean accept length with a 95 % interval.

    Steps of one prompt are alike, repetitions of it all the more, so the prompt is the unit: a ratio estimator over
    prompts with Student's t. With fewer than two prompts there is no interval.
    """
    mean = float(steps.committed.sum() / len(steps))
    tag: Tag = "modelled" if simulated else "measured"
    note = f"{COUNTING_RULE}; acceptance is simulated" if simulated else COUNTING_RULE
    prompts, index = np.unique(steps.prompt, return_inverse=True)
    if len(prompts) < 2:
        return Quantity(mean, "tokens/step", tag, note=note)
    counts = np.bincount(index)
    residual = np.bincount(index, weights=steps.committed) - mean * counts
    error = np.sqrt((residual**2).sum() * len(prompts) / (len(prompts) - 1)) / counts.sum()
    half = float(stdtrit(len(prompts) - 1, 0.975) * error)
    return Quantity(mean, "tokens/step", tag, mean - half, mean + half, note)


def by_position(steps: Steps) -> tuple[Position, ...]:
    """Return the survival of drafts by position; steps that drafted less do not count against later positions."""
    deepest = int(steps.drafted.max(initial=0))
    return tuple(
        Position(at, int((steps.drafted >= at).sum()), int(((steps.drafted >= at) & (steps.accepted >= at)).sum()))
        for at in range(1, deepest + 1)
    )


_SAME = """
SELECT count(*) AS compared, count(*) FILTER (a.output_sha256 = b.output_sha256) AS same
FROM sequences a JOIN sequences b USING (prompt_id)
WHERE a.variant = ? AND b.variant = ? AND a.run_pass = 'clean' AND b.run_pass = 'clean'
  AND a.finish <> 'aborted' AND b.finish <> 'aborted'
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """How many of ``compared`` outputs equal those of ``baseline`` (plain decoding, mostly), token for token."""

    baseline: str
    compared: int
    same: int

    @property
    def identical(self) -> bool:
        """Whether every output was the same."""
        return self.compared > 0 and self.same == self.compared


def identity_to_plain(bundle: Bundle, variant: str) -> Identity | None:
    """Compare greedy outputs of ``variant`` with those of a variant that differs only in having no drafter.

    None where the variant samples, simulates acceptance, is itself plain, or has no plain twin in the bundle.
    """
    own = variant_settings(bundle)[variant]
    if own["sampling"]["method"] != "greedy" or own["drafter"]["kind"] in ("none", "simulated", UNKNOWN):
        return None
    name = plain_twin(bundle, variant)
    if name is None:
        return None
    return compare_outputs(bundle, variant, name)


def compare_outputs(bundle: Bundle, variant: str, baseline: str) -> Identity:
    """Compare the finished clean outputs of two variants, prompt by prompt."""
    row = bundle.query(_SAME, [variant, baseline]).to_pylist()[0]
    return Identity(baseline, row["compared"], row["same"])


def plain_twin(bundle: Bundle, variant: str) -> str | None:
    """Return the variant that differs from ``variant`` only in having no drafter; None for a plain one or without."""
    settings = variant_settings(bundle)
    own = settings[variant]
    if own["drafter"]["kind"] == "none":
        return None
    same = ("model", "precision", "engine", "sampling", "prompts")
    for name, other in settings.items():
        if other["drafter"]["kind"] == "none" and all(other.get(key) == own.get(key) for key in same):
            return name
    return None


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Whether speculation pays against plain decoding, on the prompts that both decoded.

    ``needed``: the accept length at which this variant's step time gives plain's tok/s, that is the ratio of the step
    times (plain commits one token a step). ``accept_length``: what it reached on those prompts. ``speedup``: tok/s
    over plain's, their quotient.
    """

    baseline: str
    prompts: int
    needed: Quantity
    accept_length: float
    speedup: Quantity

    @property
    def verdict(self) -> Literal["pays", "costs", "unclear"]:
        """What the 95 % interval of the speed-up allows to say; unclear where it holds 1 or there is none."""
        low, high = self.speedup.low, self.speedup.high
        if low is None or high is None or low <= 1 <= high:
            return "unclear"
        return "pays" if low > 1 else "costs"


_BY_PROMPT = """
SELECT prompt_id, sum({own})::DOUBLE AS wall, count(*)::DOUBLE AS steps, sum(committed)::DOUBLE AS tokens
FROM steps JOIN sequences USING (variant, run_pass, sequence_id)
WHERE variant = ? AND run_pass = 'clean' AND NOT warmup GROUP BY prompt_id HAVING count(committed) = count(*)
"""


def break_even(bundle: Bundle, variant: str, baseline: str | None = None) -> BreakEven | None:
    """Compare ``variant`` with ``baseline``, by default its plain twin; None where it has none or they share no
    finished prompt of which every step says what it committed.

    Waits for a CPU that other work had are left out where they were recorded (``host_use``). Intervals are 95 %, a
    jackknife over the prompts on the logarithm, so a slow stretch of the machine that fell on some prompts widens them.
    No interval with fewer than two prompts.
    """
    baseline = baseline or plain_twin(bundle, variant)
    if baseline is None:
        return None
    sql = _BY_PROMPT.format(own=own_ns(bundle))
    own_rows, plain_rows = (
        {row["prompt_id"]: row for row in bundle.query(sql, [name]).to_pylist()} for name in (variant, baseline)
    )
    prompts = sorted(own_rows.keys() & plain_rows.keys())
    if not prompts:
        return None
    own, plain = (
        np.array([[rows[prompt][key] for prompt in prompts] for key in ("wall", "steps", "tokens")])
        for rows in (own_rows, plain_rows)
    )
    needed, needed_low, needed_high = _ratio(own[0], own[1], plain[2], plain[0])
    speedup, low, high = _ratio(own[2], own[0], plain[0], plain[2])
    note = f"over {len(prompts)} prompts that both decoded"
    tag: Tag = "modelled" if variant_settings(bundle)[variant]["drafter"]["kind"] == "simulated" else "measured"
    return BreakEven(
        baseline,
        len(prompts),
        Quantity(needed, "tokens/step", "measured", needed_low, needed_high, f"ratio of step times {note}"),
        float(own[2].sum() / own[1].sum()),
        Quantity(speedup, "times plain's tok/s", tag, low, high, f"ratio of tok/s {note}"),
    )


def _ratio(above: Floats, below: Floats, factor: Floats, divisor: Floats) -> tuple[float, float | None, float | None]:
    """Return Σabove/Σbelow · Σfactor/Σdivisor and its 95 % interval; one entry a prompt, all positive."""
    totals = (above, below, factor, divisor)

    def log_ratio(sums: list[Any]) -> Any:
        return np.log(sums[0]) - np.log(sums[1]) + np.log(sums[2]) - np.log(sums[3])

    whole = float(log_ratio([part.sum() for part in totals]))
    count = len(above)
    if count < 2:
        return float(np.exp(whole)), None, None
    left_out = log_ratio([part.sum() - part for part in totals])
    error = np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum())
    half = float(stdtrit(count - 1, 0.975) * error)
    return float(np.exp(whole)), float(np.exp(whole - half)), float(np.exp(whole + half))

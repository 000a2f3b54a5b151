"""Acceptance: tokens per step, how far drafts survive, and whether speculation changed the text."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from workbench.diagnose.steps import Steps
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle

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

    Steps of one prompt are alike, so the prompt is the unit: a ratio estimator over sequences with Student's t. With
    fewer than two sequences there is no interval.
    """
    mean = float(steps.committed.sum() / len(steps))
    tag, note = ("modelled", f"{COUNTING_RULE}; acceptance is simulated") if simulated else ("measured", COUNTING_RULE)
    sequences = np.unique(steps.sequence)
    if len(sequences) < 2:
        return Quantity(mean, "tokens/step", tag, note=note)  # type: ignore[arg-type]
    totals = np.array([steps.committed[steps.sequence == one].sum() for one in sequences], dtype=float)
    counts = np.array([(steps.sequence == one).sum() for one in sequences], dtype=float)
    residual = totals - mean * counts
    error = np.sqrt((residual**2).sum() * len(sequences) / (len(sequences) - 1)) / counts.sum()
    half = float(stats.t.ppf(0.975, len(sequences) - 1) * error)
    return Quantity(mean, "tokens/step", tag, mean - half, mean + half, note)  # type: ignore[arg-type]


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
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """How many of ``compared`` outputs equal plain decoding's, token for token."""

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
    settings = {record.name: record.settings for record in bundle.manifest.variants}
    own = settings[variant]
    if own["sampling"]["method"] != "greedy" or own["drafter"]["kind"] in ("none", "simulated"):
        return None
    same = ("model", "precision", "engine", "sampling", "prompts")
    for name, other in settings.items():
        if other["drafter"]["kind"] == "none" and all(other[key] == own[key] for key in same):
            row = bundle.query(_SAME, [variant, name]).to_pylist()[0]
            return Identity(name, row["compared"], row["same"])
    return None

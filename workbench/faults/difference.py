"""What a fault added: findings about a variant that its clean twin does not have, or has less of.

A clean rung has losses of its own, and all of its findings stay when a fault is planted; what the fault added is the
difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings.gain import NOISE
from workbench.diagnose.steps import RunPass, Steps
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict


@dataclass(frozen=True, slots=True)
class Added:
    """A finding that is new, or worth more than in the clean twin. ``growth``: tok/s by which; None for a doubt."""

    finding: Finding
    growth: float | None


def added(findings: Sequence[Finding], clean: Sequence[Finding], threshold: float) -> tuple[Added, ...]:
    """Return what ``findings`` has beyond ``clean``: doubts about the trace first, then by growth in tok/s.

    ``threshold``: tok/s that step times vary by; growth below it is chance, unless the finding rests on no time.
    """
    before: dict[str, float] = {}
    for one in clean:
        before[label(one)] = max(before.get(label(one), 0.0), _worth(one))
    found = []
    for one in findings:
        if one.recoverable is None:
            if label(one) not in before:
                found.append(Added(one, None))
            continue
        growth = _worth(one) - before.get(label(one), 0.0)
        timed = one.recoverable.tag == "estimated" and not one.seen
        if growth > (threshold if timed else 0.0):
            found.append(Added(one, growth))
    return tuple(sorted(found, key=lambda one: (one.finding.severity != "critical", -(one.growth or 0.0))))


def label(finding: Finding) -> str:
    """Return what a finding is called: its id, and for a doubt about the trace what the doubt is."""
    return f"{finding.id}@{finding.location}" if finding.id == "data-quality" else finding.id


def threshold(one: Facts, other: Facts) -> float:
    """Return the tok/s of ``one`` within which the two cannot be told apart: both means' half-widths.

    Halves of one variant are different repetitions, and a machine drifts from one to the next. Two variants share that
    drift, since their repetitions are interleaved.
    """
    rate = one.tok_s.value if one.tok_s else 0.0
    parts = [part for facts in (one, other) for part in (min(facts.noise, NOISE), _between_repetitions(facts))]
    return rate * hypot(*parts)


_REPETITIONS = """
SELECT prompt_id, avg(end_ns - start_ns)::DOUBLE AS mean
FROM steps JOIN (SELECT variant, run_pass, sequence_id, prompt_id FROM sequences)
     USING (variant, run_pass, sequence_id)
WHERE variant = ? AND run_pass = 'clean' AND NOT warmup GROUP BY prompt_id, sequence_id
"""

MOST = 0.1
"""Repetitions that differ by more than this make no comparison of anything; the score then says so by its misses."""


def _between_repetitions(facts: Facts) -> float:
    """Return by how much the mean step of one repetition varies, relative half-width; 0 for all of them together."""
    if not isinstance(facts, Half):
        return 0.0
    means: dict[str, list[float]] = {}
    for row in facts.bundle.query(_REPETITIONS, [facts.variant]).to_pylist():
        means.setdefault(row["prompt_id"], []).append(row["mean"])
    spreads = [np.std(own, ddof=1) / np.mean(own) for own in means.values() if len(own) > 1]
    return min(MOST, 1.96 * float(np.mean(spreads))) if spreads else 0.0


def _worth(finding: Finding) -> float:
    return finding.recoverable.value if finding.recoverable else 0.0


class Half(Facts):
    """One half of a variant's clean steps, in the order they ran, with all else that the bundle holds of it."""

    def __init__(self, bundle: Bundle, variant: str, judged: Verdict, *, second: bool) -> None:
        super().__init__(bundle, variant, judged)
        self._second = second

    def steps_of(self, run_pass: RunPass) -> Steps:
        """Return the steps of one pass; of the clean one this half."""
        steps = super().steps_of(run_pass)
        if run_pass in ("sampled", "laned", "traced") or len(steps) < 2:
            return steps
        order = np.argsort(steps.start, kind="stable")
        own = order[len(order) // 2 :] if self._second else order[: len(order) // 2]
        return Steps(*(getattr(steps, name)[own] for name in Steps.__dataclass_fields__))

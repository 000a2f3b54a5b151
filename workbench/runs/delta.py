"""Two runs against each other, variant by variant: what changed in tok/s, and through which part of the step.

ln(tok/s) = ln(accept length) - ln(step time), exactly; and the step time is the sum of its causes. One run a side has
no noise estimate, so this says what is different, not whether it would be so again: ``workbench gate`` does.
"""

from dataclasses import dataclass

from workbench.comparison.chain import CauseChange, cause_changes, log_chain
from workbench.diagnose.summary import Diagnosis, VariantSummary


@dataclass(frozen=True, slots=True)
class VariantDelta:
    """One variant that both runs have. ``causes``: the largest change first; they add up to the change of the step.

    ``log_speed`` = ``log_accept`` + ``log_step``: natural logarithms of head over base, above 0 it got faster.
    """

    base: VariantSummary
    head: VariantSummary
    log_accept: float
    log_step: float
    causes: tuple[CauseChange, ...]

    @property
    def log_speed(self) -> float:
        """ln(tok/s of head over base)."""
        return self.log_accept + self.log_step


@dataclass(frozen=True, slots=True)
class RunDelta:
    """Variants of two runs by name, and those that only one of them has."""

    variants: tuple[VariantDelta, ...]
    only_base: tuple[str, ...]
    only_head: tuple[str, ...]


def compare_runs(base: Diagnosis, head: Diagnosis) -> RunDelta:
    """Return how ``head`` differs from ``base``."""
    before = {variant.name: variant for variant in base.variants}
    after = {variant.name: variant for variant in head.variants}
    return RunDelta(
        tuple(_variant(before[name], after[name]) for name in before if name in after),
        tuple(name for name in before if name not in after),
        tuple(name for name in after if name not in before),
    )


def _variant(base: VariantSummary, head: VariantSummary) -> VariantDelta:
    return VariantDelta(base, head, *log_chain(base, head), cause_changes(base.accounting, head.accounting))

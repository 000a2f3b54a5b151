"""One bundle against a baseline, variant by variant: tok/s, and the chain of what it changed through.

ln(tok/s head / base) = ln(accept length ratio) - ln(step time ratio), exactly; the step time's part is split over its
causes by logarithmic means, exactly too (``workbench.comparison.chain``). Each side is one launch: intervals hold how
prompts or steps differ, not how launches do. ``workbench gate`` decides; this explains.
"""

from dataclasses import dataclass
from typing import Any

from workbench.comparison.chain import CauseChange, cause_changes, log_chain
from workbench.comparison.moved import Moved, moved_parts
from workbench.comparison.ratios import Ratio, Sides, pair_up
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.errors import InputError
from workbench.gate.fingerprint import Difference, differences, facts, machine_class
from workbench.trace.bundle import Bundle

CONCLUSIVE_SHARE = 0.02
"""A cause that moved less than this part of the step is not named in a sentence."""


@dataclass(frozen=True, slots=True)
class FindingChange:
    """A finding that one side has, or that both have with another gain. Gains in tok/s; None: not known or absent."""

    id: str
    title: str
    change: str
    base_gain: float | None
    head_gain: float | None


@dataclass(frozen=True, slots=True)
class VariantComparison:
    """One variant of the head against one of the baseline. ``speed`` = ``length`` + ``rate`` on the paired units.

    ``causes`` add up to ``rate_all``, that of all steps, whatever the pairing. ``moved``: kernels or operators.
    """

    base: VariantSummary
    head: VariantSummary
    sides: Sides
    speed: Ratio
    length: Ratio
    rate: Ratio
    length_all: float
    rate_all: float
    causes: tuple[CauseChange, ...]
    moved: tuple[Moved, ...]
    findings: tuple[FindingChange, ...]
    settings: tuple[Difference, ...]

    @property
    def name(self) -> str:
        """The variant's name, both where they differ."""
        return self.head.name if self.base.name == self.head.name else f"{self.head.name} against {self.base.name}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "base": self.base.name,
            "head": self.head.name,
            "tok_s": {"base": self.base.tok_s.to_json(), "head": self.head.tok_s.to_json(), **self.speed.to_json()},
            "accept_length": {
                "base": self.base.accept_length.to_json(),
                "head": self.head.accept_length.to_json(),
                **self.length.to_json(),
            },
            "steps_per_s": self.rate.to_json(),
            "paired_by": self.sides.pairing,
            "units": self.sides.units,
            "too_few": self.sides.few,
            "chain": {"accept_length": self.length_all, "step_time": self.rate_all},
            "causes": [
                {"name": one.name, "base_ns": one.base_ns, "head_ns": one.head_ns, "log": one.log, "tag": one.tag}
                for one in self.causes
            ],
            "moved": [one.to_json() for one in self.moved],
            "findings": [
                {
                    "id": one.id,
                    "title": one.title,
                    "change": one.change,
                    "base_gain": one.base_gain,
                    "head_gain": one.head_gain,
                }
                for one in self.findings
            ],
            "settings": [{"name": one.name, "base": one.base, "head": one.head} for one in self.settings],
        }


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All variants that both bundles have, the head's fastest first. ``machine``: differences of the environment."""

    base: Diagnosis
    head: Diagnosis
    variants: tuple[VariantComparison, ...]
    only_base: tuple[str, ...]
    only_head: tuple[str, ...]
    machine: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "variants": [one.to_json() for one in self.variants],
            "only_base": list(self.only_base),
            "only_head": list(self.only_head),
            "environment": [{"name": one.name, "base": one.base, "head": one.head} for one in self.machine],
        }


def compare(
    base: Bundle, head: Bundle, base_found: Diagnosis, head_found: Diagnosis, pair: tuple[str, str] | None = None
) -> RunComparison:
    """Compare ``head`` with ``base``. ``pair``: only this variant of the base with that of the head.

    Raises InputError where they have no variant in common, or not the ones that were asked for.
    """
    before = {variant.name: variant for variant in base_found.variants}
    after = {variant.name: variant for variant in head_found.variants}
    pairs = [pair] if pair else [(name, name) for name in after if name in before]
    for own, name in pairs:
        for wanted, having, bundle in ((own, before, base), (name, after, head)):
            if wanted not in having:
                raise InputError(f"{bundle.path}: no measured variant {wanted!r}", hint=f"it has {', '.join(having)}")
    if not pairs:
        raise InputError(
            f"{base.path} and {head.path}: no variant in common",
            hint=f"name two with --base-variant and --head-variant: {', '.join(before)} and {', '.join(after)}",
        )
    found = [_variant(Facts(base, own), Facts(head, name), before[own], after[name]) for own, name in pairs]
    found.sort(key=lambda one: (one.head.tok_s.tag != "measured", -one.head.tok_s.value))
    return RunComparison(
        base_found,
        head_found,
        tuple(found),
        () if pair else tuple(name for name in before if name not in after),
        () if pair else tuple(name for name in after if name not in before),
        differences(machine_class(base.manifest), machine_class(head.manifest)),
    )


def _variant(base: Facts, head: Facts, before: VariantSummary, after: VariantSummary) -> VariantComparison:
    sides = pair_up(base, head)
    known = [facts(one.bundle, one.variant, one.settings) for one in (base, head)]
    return VariantComparison(
        before,
        after,
        sides,
        sides.ratio("speed"),
        sides.ratio("length"),
        sides.ratio("rate"),
        *log_chain(before, after),
        cause_changes(before.accounting, after.accounting),
        moved_parts(base, head),
        _findings(before.findings, after.findings),
        tuple(
            one for one in differences(*known) if not one.name.startswith("machine.") and one.name != "settings.name"
        ),
    )


def _findings(base: tuple[Finding, ...], head: tuple[Finding, ...]) -> tuple[FindingChange, ...]:
    """Return what appeared, vanished or changed; one entry an id: where a side has several, the one worth most."""
    sides = [{one.id: one for one in reversed(found)} for found in (base, head)]
    changes = []
    for name in dict.fromkeys([*sides[1], *sides[0]]):
        old, new = sides[0].get(name), sides[1].get(name)
        gains = [one.recoverable.value if one and one.recoverable else None for one in (old, new)]
        word = "appeared" if old is None else "vanished" if new is None else "stayed"
        shown = new or old
        assert shown is not None  # noqa: S101 - the id is from one of the sides
        changes.append(FindingChange(name, shown.title, word, gains[0], gains[1]))
    order = {"appeared": 0, "vanished": 1, "stayed": 2}
    return tuple(sorted(changes, key=lambda one: (order[one.change], -(one.head_gain or one.base_gain or 0), one.id)))

"""The diagnosis of a bundle: per variant, how fast, how far from the roof, and where the time went."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.accounting import Accounting
from workbench.diagnose.clean_map import CleanMap
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find_in
from workbench.diagnose.floor import Floor
from workbench.diagnose.ladder import LadderStep, ladder
from workbench.diagnose.settings import variant_settings
from workbench.diagnose.speculation import Identity, Position, accept_length, by_position, identity_to_plain
from workbench.diagnose.steps import Steps, load_steps
from workbench.diagnose.wall_rate import SIGNIFICANT, WallRate, wall_rate
from workbench.errors import UnfitError
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle
from workbench.trace.validity import verdict


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """What is said of one variant.

    ``tok_s``: committed tokens over step time, batch 1, prefill and warm-up steps left out. ``roof_share``: bytes no
    step can avoid, over step time, as a share of the measured read bandwidth. ``bytes_per_step``: those bytes.
    ``findings``: losses and doubts, ranked. ``mapping``: how traced kernels and gaps were brought onto the clean step;
    None without traced kernels. ``wall``: tok/s by the wall clock, pauses between steps included; None where no two
    steps follow each other.
    """

    name: str
    device: str
    drafter: str
    steps: int
    tokens: int
    tok_s: Quantity
    accept_length: Quantity
    step_p50: Quantity
    step_p90: Quantity
    roof_share: Quantity | None
    bytes_per_step: Quantity | None
    positions: tuple[Position, ...]
    identity: Identity | None
    accounting: Accounting
    findings: tuple[Finding, ...] = ()
    mapping: CleanMap | None = None
    wall: WallRate | None = None

    @property
    def wall_tok_s(self) -> Quantity | None:
        """The rate by the wall clock where pauses make it differ from ``tok_s``; None where they do not."""
        if self.wall is None or self.wall.paused < SIGNIFICANT:
            return None
        return self.wall.quantity(self.tok_s.tag)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of one bundle. ``failed`` lists variants without a single measured step; ``ladder`` compares
    neighbouring rungs."""

    scenario: str
    variants: tuple[VariantSummary, ...]
    failed: tuple[str, ...]
    ladder: tuple[LadderStep, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, as ``--json`` prints it."""
        return {
            "scenario": self.scenario,
            "variants": {variant.name: _variant_json(variant) for variant in self.variants},
            "without_steps": list(self.failed),
            "ladder": [step.to_json() for step in self.ladder],
        }


def diagnose(bundle: Bundle) -> Diagnosis:
    """Diagnose every variant of ``bundle``.

    Raises UnfitError where not one has a measured step, or one has steps that do not say what they committed, and for
    an ingested trace: its steps ran with the profiler on; and for a server that was watched from outside.
    """
    if bundle.manifest.source == "attach":
        raise UnfitError(
            f"{bundle.path}: was watched from outside: means over a window, no steps to split",
            hint="workbench show, or its overview and findings, say what it reaches",
        )
    if bundle.manifest.source != "run":
        raise UnfitError(
            f"{bundle.path}: an ingested trace has no steps without instruments, so there is no tok/s to diagnose",
            hint="workbench show prints its busy and idle time",
        )
    summaries, failed, all_facts = [], [], []
    judged = verdict(bundle)
    for name, settings in variant_settings(bundle).items():
        steps = load_steps(bundle, name)
        if unknown := int((steps.committed < 0).sum()):
            raise UnfitError(
                f"{bundle.path}: variant {name!r}: {unknown} of {len(steps)} steps do not say how many tokens "
                "they committed, so there is no tok/s"
            )
        if len(steps):
            facts = Facts(bundle, name, judged)
            summaries.append(_summary(facts, settings, steps))
            all_facts.append(facts)
        else:
            failed.append(name)
    if not summaries:
        raise UnfitError(f"{bundle.path}: no variant has a measured step", hint="run the scenario again")
    return Diagnosis(str(bundle.manifest.scenario.get("name", "")), tuple(summaries), tuple(failed), ladder(all_facts))


def _summary(facts: Facts, settings: dict[str, Any], steps: Steps) -> VariantSummary:
    bundle, name, floor = facts.bundle, facts.variant, facts.floor
    simulated = settings["drafter"]["kind"] == "simulated"
    wall_ms = steps.wall / 1e6
    tokens = int(steps.committed.sum())
    return VariantSummary(
        name=name,
        device=facts.device,
        drafter=settings["drafter"]["kind"],
        steps=len(steps),
        tokens=tokens,
        tok_s=Quantity(
            tokens / (steps.wall.sum() / 1e9),
            "tok/s",
            "modelled" if simulated else "measured",
            note="committed tokens over step time; batch 1, prefill left out",
        ),
        accept_length=accept_length(steps, simulated=simulated),
        step_p50=Quantity(float(np.percentile(wall_ms, 50)), "ms", "measured"),
        step_p90=Quantity(float(np.percentile(wall_ms, 90)), "ms", "measured"),
        roof_share=_roof_share(floor, steps),
        bytes_per_step=_bytes(floor, steps),
        positions=by_position(steps),
        identity=identity_to_plain(bundle, name),
        accounting=facts.accounting,
        findings=find_in(facts),
        mapping=facts.split.mapping if facts.split else None,
        wall=wall_rate(bundle, name),
    )


def _source(floor: Floor) -> str:
    return f"bytes of the {floor.bytes_note}" if floor.bytes_note == "byte model" else floor.bytes_note


def _floor_ns(floor: Floor, steps: Steps) -> int:
    return int(floor.target_ns(steps).sum() + floor.draft_ns(steps).sum())


def _roof_share(floor: Floor | None, steps: Steps) -> Quantity | None:
    if floor is None:
        return None
    note = f"{_source(floor)} over step time and {floor.bytes_per_s / 1e9:.1f} GB/s measured"
    return Quantity(_floor_ns(floor, steps) / int(steps.wall.sum()), "of the roof", floor.tag, note=note)


def _bytes(floor: Floor | None, steps: Steps) -> Quantity | None:
    if floor is None:
        return None
    value = _floor_ns(floor, steps) / len(steps) * floor.bytes_per_s / 1e9
    return Quantity(value, "B", floor.tag, note="stored formats, distinct experts as recorded")


def _variant_json(variant: VariantSummary) -> dict[str, Any]:
    identity = variant.identity
    return {
        "device": variant.device,
        "drafter": variant.drafter,
        "steps": variant.steps,
        "tokens": variant.tokens,
        "tok_s": variant.tok_s.to_json(),
        "wall_tok_s": variant.wall.quantity(variant.tok_s.tag).to_json() if variant.wall else None,
        "accept_length": variant.accept_length.to_json(),
        "step_p50": variant.step_p50.to_json(),
        "step_p90": variant.step_p90.to_json(),
        "roof_share": variant.roof_share.to_json() if variant.roof_share else None,
        "bytes_per_step": variant.bytes_per_step.to_json() if variant.bytes_per_step else None,
        "acceptance_by_position": [
            {"position": at.position, "reached": at.reached, "accepted": at.accepted, "rate": at.rate}
            for at in variant.positions
        ],
        "greedy_identical_to_plain": None
        if identity is None
        else {
            "identical": identity.identical,
            "same": identity.same,
            "compared": identity.compared,
            "baseline": identity.baseline,
        },
        "wall_ns": variant.accounting.wall_ns,
        "causes": [
            {
                "name": cause.name,
                "total_ns": cause.total_ns,
                "share": variant.accounting.share(cause),
                "tag": cause.tag,
                "note": cause.note,
            }
            for cause in variant.accounting.causes
        ],
        "findings": [finding.to_json() for finding in variant.findings],
        "clean_map": variant.mapping.to_json() if variant.mapping else None,
    }

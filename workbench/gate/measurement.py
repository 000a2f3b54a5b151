"""What one launch measured for one variant: its speed, its exact counters, and whether it can be used at all."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from workbench.diagnose.accounting import account
from workbench.diagnose.floor import Floor, load_floor
from workbench.diagnose.steps import Steps, load_steps
from workbench.diagnose.wall_rate import WallRate, wall_rate
from workbench.gate.counters import Counter, is_pinned, read_counters
from workbench.gate.fingerprint import Facts, facts
from workbench.gate.parts import Part, PartName, parts_of
from workbench.quantity import Tag
from workbench.trace.bundle import Bundle

Metric = Literal["tok_s", "step_p50", "wall_tok_s"]
METRICS: dict[Metric, tuple[str, str]] = {
    "tok_s": ("tok/s", "committed tokens over step time; batch 1, prefill and warm-up steps left out"),
    "step_p50": ("ms", "median step time; warm-up steps left out"),
    "wall_tok_s": ("tok/s", "committed tokens over time, pauses between steps included; warm-up steps left out"),
}
"""Unit and meaning."""

MAX_THROTTLED = 0.01
"""Share of the samples with a throttle reason from which a launch is not comparable."""

NVML = "nvml"
SM_CLOCK, THROTTLE, FOREIGN = "sm_clock", "throttle_reasons", "foreign_processes"
"""Counters of source ``nvml`` that are read here: MHz, NVML's bit mask, and processes that are not the run's own."""
_HARMLESS_REASONS = 0x1 | 0x2
"""Idle, and clocks set by an application: what NVML lists that slows nothing down unasked."""


@dataclass(frozen=True, slots=True)
class CauseTime:
    """What one cause of the accounting takes of a step."""

    ns: float
    tag: Tag


@dataclass(frozen=True, slots=True)
class Measurement:
    """One launch's numbers for one variant, clean steps only. ``p50_ns``: median step time.

    ``causes`` sum to ``step_ns``; their floor rests on ``roof``, bytes per second, None without one. ``parts``: of the
    traced steps, empty where there were none. ``pinned``: the same code must commit the same tokens. ``clock_mhz``:
    mean SM clock while they ran; None where it was not recorded. ``unusable``: why the launch must not be compared;
    empty where it may. ``wall``: the rate with the pauses between steps; None where no two steps follow each other.
    """

    bundle: Path
    scenario: str
    variant: str
    tokens: int
    steps: int
    wall_ns: int
    p50_ns: float
    roof: int | None
    causes: Mapping[str, CauseTime]
    parts: Mapping[PartName, Part]
    tag: Tag
    pinned: bool
    counters: Mapping[str, Counter]
    facts: Facts
    created: str
    clock_mhz: float | None
    unusable: str
    wall: WallRate | None = None

    @property
    def accept_length(self) -> Fraction:
        """Committed tokens per step, the bonus token included."""
        return Fraction(self.tokens, self.steps)

    @property
    def step_ns(self) -> float:
        """Mean step time."""
        return self.wall_ns / self.steps

    @property
    def paused(self) -> float:
        """Share of the time that lies between steps, 0 to 1."""
        return self.wall.paused if self.wall else 0.0

    def speed(self, metric: Metric) -> float:
        """Return ``metric`` as a speed (more is better): tok/s, or median steps per second."""
        if metric == "step_p50":
            return 1e9 / self.p50_ns
        if metric == "wall_tok_s" and self.wall:  # single steps have no pause between them
            return self.wall.quantity(self.tag).value
        return self.tokens / (self.wall_ns / 1e9)

    def shown(self, metric: Metric) -> float:
        """Return ``metric`` in its own unit: tok/s or ms."""
        return self.p50_ns / 1e6 if metric == "step_p50" else self.speed(metric)


def measure(path: Path, variant: str, *, roof: int | None = None) -> Measurement | str:
    """Read ``variant`` from the bundle at ``path``, or return why it holds nothing that can be compared.

    ``roof``: bytes per second to use instead of what this launch measured. All launches of a gate take that of the
    first, because a roof is the machine's, and its noise would look like a change of the floor.

    Raises InputError where the bundle is damaged or missing.
    """
    with Bundle.open(path) as bundle:
        settings = {record.name: record.settings for record in bundle.manifest.variants}.get(variant)
        if settings is None:
            return f"holds no variant {variant!r}"
        if bundle.manifest.state != "sealed":
            return f"is {bundle.manifest.state}: {bundle.manifest.failure or 'cut off'}"
        steps = load_steps(bundle, variant)
        tokens, wall_ns = int(steps.committed.sum()), int(steps.wall.sum())
        if not tokens or not wall_ns or not (p50_ns := float(np.median(steps.wall))):
            return "has no measured step"
        floor = _floor(bundle, variant, settings, roof)
        accounting = account(bundle, variant, steps, floor)
        clock_mhz, unusable = _health(bundle, steps)
        return Measurement(
            bundle=path,
            scenario=str(bundle.manifest.scenario.get("name", "")),
            variant=variant,
            tokens=tokens,
            steps=len(steps),
            wall_ns=wall_ns,
            p50_ns=p50_ns,
            roof=floor.bytes_per_s if floor else None,
            causes={one.name: CauseTime(one.total_ns / len(steps), one.tag) for one in accounting.causes},
            parts=parts_of(bundle, variant),
            tag="modelled" if settings.get("drafter", {}).get("kind") == "simulated" else "measured",
            pinned=is_pinned(settings),
            counters=read_counters(bundle, variant, settings),
            facts=facts(bundle, variant, settings),
            created=bundle.manifest.created,
            clock_mhz=clock_mhz,
            unusable=unusable,
            wall=wall_rate(bundle, variant),
        )


def _floor(bundle: Bundle, variant: str, settings: Mapping[str, Any], roof: int | None) -> Floor | None:
    wanted = str(settings.get("engine", {}).get("device", "auto"))
    device = str(bundle.manifest.device.get("name", "cpu")) if wanted == "auto" else wanted
    floor = load_floor(bundle, variant, device)
    return replace(floor, bytes_per_s=roof) if floor and roof else floor


_SAMPLES = """
SELECT name, value FROM counters
WHERE source = ? AND name IN (?, ?, ?) AND start_ns <= ? AND end_ns >= ?
"""


def _health(bundle: Bundle, steps: Steps) -> tuple[float | None, str]:
    """Return the mean SM clock during the clean steps, and what disturbed them; None and "" where nothing was read."""
    window: list[Any] = [int(steps.end.max()), int(steps.start.min())]
    samples: dict[str, list[float]] = {}
    for row in bundle.query(_SAMPLES, [NVML, SM_CLOCK, THROTTLE, FOREIGN, *window]).to_pylist():
        samples.setdefault(row["name"], []).append(row["value"])
    clocks = samples.get(SM_CLOCK)
    return (float(np.mean(clocks)) if clocks else None), _disturbance(samples)


def _disturbance(samples: Mapping[str, list[float]]) -> str:
    reasons = samples.get(THROTTLE, [])
    throttled = sum(int(value) & ~_HARMLESS_REASONS != 0 for value in reasons)
    if reasons and throttled / len(reasons) > MAX_THROTTLED:
        return f"throttled in {throttled} of {len(reasons)} samples"
    if (others := max(samples.get(FOREIGN, [0.0]))) > 0:
        return f"{others:.0f} foreign processes on the device"
    return ""

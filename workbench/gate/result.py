"""What a gate found: everything its outputs show, and the exit code."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from workbench.errors import ExitCode
from workbench.gate.attribution import Attribution, Term
from workbench.gate.counters import Comparison
from workbench.gate.locate import Location
from workbench.gate.measurement import METRICS, Metric
from workbench.gate.noise import Noise
from workbench.gate.pairs import Pair, Rejected
from workbench.gate.rule import Estimate, Verdict, detectable, pairs_needed

SCHEMA = "workbench.gate/1"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that fails, or would fail, the gate. ``location`` is in the head's tree, where one is known."""

    id: Literal["counter", "time"]
    variant: str
    sentence: str
    evidence: tuple[str, ...]
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class VariantResult:
    """The result of one variant.

    ``verdict`` is on time alone, None where it was not judged; ``reason`` says in words why it is what it is.
    ``adjusted``: the estimate with the difference of the SM clocks taken out, None where clocks were not recorded.
    """

    name: str
    verdict: Verdict | None
    reason: str
    estimate: Estimate | None
    adjusted: Estimate | None
    pairs: tuple[Pair, ...]
    rejected: tuple[Rejected, ...]
    counters: tuple[Comparison, ...]
    attribution: Attribution | None
    noise: Noise | None
    findings: tuple[Finding, ...]

    def shown(self, metric: Metric) -> tuple[float, float] | None:
        """Return the mean of ``metric`` on base and head, in its unit; None without a valid pair."""
        if not self.pairs:
            return None
        return fmean(pair.base.shown(metric) for pair in self.pairs), fmean(
            pair.head.shown(metric) for pair in self.pairs
        )

    @property
    def counters_fail(self) -> bool:
        """Whether a counter alone fails the gate."""
        return any(counter.fails for counter in self.counters)


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of a gate. ``advisory``: verdicts on time are shown and do not fail; counters do."""

    scenario: str
    metric: Metric
    delta: float
    level: float
    max_pairs: int
    base: Mapping[str, Any]
    head: Mapping[str, Any]
    machine: Mapping[str, Any]
    variants: tuple[VariantResult, ...]
    notes: tuple[str, ...]
    advisory: bool = False
    strict: bool = False

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, in the order of the variants."""
        return tuple(finding for variant in self.variants for finding in variant.findings)

    @property
    def exit_code(self) -> ExitCode:
        """Return the code of docs/reference/exit-codes.md; a regression outweighs a launch that could not be used."""
        verdicts = [variant.verdict for variant in self.variants]
        if any(variant.counters_fail for variant in self.variants):
            return ExitCode.REGRESSION
        if Verdict.FAIL in verdicts and not self.advisory:
            return ExitCode.REGRESSION
        if Verdict.UNFIT in verdicts:
            return ExitCode.UNFIT
        if self.strict and not self.advisory and Verdict.INCONCLUSIVE in verdicts:
            return ExitCode.INCONCLUSIVE
        return ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data; numbers that are not finite become null where it is written."""
        unit, meaning = METRICS[self.metric]
        return {
            "schema": SCHEMA,
            "exit_code": int(self.exit_code),
            "outcome": self.exit_code.name.lower(),
            "scenario": self.scenario,
            "metric": {"name": self.metric, "unit": unit, "meaning": meaning},
            "rule": {"delta": self.delta, "level": self.level, "max_pairs": self.max_pairs},
            "advisory": self.advisory,
            "strict": self.strict,
            "base": dict(self.base),
            "head": dict(self.head),
            "machine": dict(self.machine),
            "variants": [_variant_json(variant, self.metric, self.delta) for variant in self.variants],
            "notes": list(self.notes),
        }


def detectable_with(result: VariantResult, delta: float, max_pairs: int) -> tuple[float, int | None, str] | None:
    """Return the minimum detectable effect, the pairs needed to pass an unchanged head, and whose noise it rests on.

    The calibration's noise counts before that of the few pairs at hand. None where neither is known.
    """
    if result.noise:
        sd, source = result.noise.sd_pair, "calibrated"
    elif result.estimate and math.isfinite(result.estimate.sd):
        sd, source = result.estimate.sd, "these pairs"
    else:
        return None
    pairs = result.estimate.pairs if result.estimate else max_pairs
    return detectable(sd, pairs, delta=delta), pairs_needed(sd, delta=delta), source


def plain(value: Fraction | str | None) -> float | int | str | None:
    """Return a counter's value as JSON: an integer where it is one."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def _variant_json(variant: VariantResult, metric: Metric, delta: float) -> dict[str, Any]:
    shown = variant.shown(metric)
    seen = detectable_with(variant, delta, len(variant.pairs))
    return {
        "name": variant.name,
        "verdict": variant.verdict,
        "reason": variant.reason,
        "base": shown and shown[0],
        "head": shown and shown[1],
        "tag": variant.pairs[0].base.tag if variant.pairs else None,
        "estimate": variant.estimate and asdict(variant.estimate) | {"change": variant.estimate.change},
        "clock_adjusted": variant.adjusted and asdict(variant.adjusted) | {"change": variant.adjusted.change},
        "minimum_detectable": seen and {"slowdown": seen[0], "pairs_needed": seen[1], "noise": seen[2]},
        "pairs": [_pair_json(pair, metric) for pair in variant.pairs],
        "rejected": [
            {"side": one.launch.side, "pair": one.launch.pair, "bundle": str(one.launch.bundle), "reason": one.reason}
            for one in variant.rejected
        ],
        "counters": [_counter_json(counter) for counter in variant.counters],
        "attribution": variant.attribution and _attribution_json(variant.attribution),
        "findings": [asdict(finding) for finding in variant.findings],
    }


def _pair_json(pair: Pair, metric: Metric) -> dict[str, Any]:
    return {
        "pair": pair.number,
        "base_first": pair.base_first,
        "log_ratio": pair.log_ratio(metric),
        "clock_log_ratio": pair.clock_log_ratio(),
        **{
            side: {
                "bundle": Path(measured.bundle).name,
                metric: measured.shown(metric),
                "accept_length": float(measured.accept_length),
                "seconds": launch.seconds,
                "other_cpus": launch.other_cpus,
                "clock_mhz": measured.clock_mhz,
            }
            for side, measured, launch in (
                ("base", pair.base, pair.base_launch),
                ("head", pair.head, pair.head_launch),
            )
        },
    }


def _counter_json(counter: Comparison) -> dict[str, Any]:
    return {
        "name": counter.name,
        "unit": counter.unit,
        "base": plain(counter.base),
        "head": plain(counter.head),
        "status": counter.status,
        "fails": counter.fails,
        "accepted": counter.accepted,
        "moved": [{"name": name, "change": plain(change)} for name, change in counter.moved],
    }


def _attribution_json(found: Attribution) -> dict[str, Any]:
    return {
        "total": _term_json(found.total),
        "accept_length": _term_json(found.accept_length),
        "step_time": _term_json(found.step_time),
        "causes": _terms_json(found.causes),
        "movers": _terms_json(found.movers),
        "other_movers": found.other_movers,
        "residual": found.residual,
        "explained": found.explained,
        "not_measured": list(found.not_measured),
    }


def _terms_json(terms: Sequence[Term]) -> list[dict[str, Any]]:
    return [_term_json(term) for term in terms]


def _term_json(term: Term) -> dict[str, Any]:
    return {key: value for key, value in asdict(term).items() if value is not None}

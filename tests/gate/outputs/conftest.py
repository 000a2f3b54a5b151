"""One result that has everything in it: a failure, a counter with a place, rejected launches, hostile names."""

from pathlib import Path
from typing import Any

import pytest

from workbench.gate.attribution import Attribution, Term
from workbench.gate.counters import Comparison
from workbench.gate.findings import Finding
from workbench.gate.launch import Launch
from workbench.gate.locate import Location
from workbench.gate.measurement import Measurement
from workbench.gate.pairs import Pair, Rejected
from workbench.gate.result import GateResult, VariantResult
from workbench.gate.rule import Estimate, Verdict, estimate

HOSTILE = "\x1b[31m<b>|`x`]]>\u202e\x00 & \"'"


def _pair(number: int) -> Pair:
    sides = [
        Measurement(
            bundle=Path(f"{side}-{number}"),
            scenario="made",
            variant="mtp",
            tokens=100,
            steps=50,
            wall_ns=wall,
            p50_ns=wall / 50,
            roof=None,
            causes={},
            parts={},
            tag="measured",
            pinned=True,
            counters={},
            facts={"machine.device": "cpu"},
            created="2026-01-01T00:00:00+00:00",
            clock_mhz=None,
            unusable="",
        )
        for side, wall in (("base", 1_000_000_000), ("head", 1_150_000_000 + number))
    ]
    base = Launch("base", "mtp", number, 0, sides[0].bundle, seconds=5.0)
    head = Launch("head", "mtp", number, 0, sides[1].bundle, seconds=6.0)
    return Pair(number, sides[0], sides[1], base, head)


def _term(name: str, log: float, **more: Any) -> Term:
    return Term(name, log, log - 0.01, log + 0.01, "estimated", **more)


def variant(verdict: Verdict | None, **changes: Any) -> VariantResult:
    pairs = tuple(_pair(number) for number in range(4))
    found: Estimate = estimate([pair.log_ratio("tok_s") for pair in pairs])
    attribution = Attribution(
        total=_term("tok/s", found.mean),
        accept_length=_term("accept length", 0.0),
        step_time=_term("step time", found.mean, base_ns=2e7, head_ns=2.3e7),
        causes=(_term("host-bound", found.mean, base_ns=1e7, head_ns=1.3e7),),
        movers=(_term(HOSTILE, found.mean, base_ns=1e6, head_ns=4e6, calls=(1.0, 2.0)),),
        other_movers=-0.001,
        residual=0.001,
        not_measured=(),
    )
    values: dict[str, Any] = {
        "name": "mtp",
        "verdict": verdict,
        "reason": "because",
        "estimate": found,
        "adjusted": None,
        "pairs": pairs,
        "rejected": (Rejected(Launch("head", "mtp", 1, 0, Path("mtp-02-head")), f"head ended with -9: {HOSTILE}"),),
        "counters": (
            Comparison("syncs", "waits/step", 1, 2, "worse", ((HOSTILE, 1),)),  # type: ignore[arg-type]
            Comparison("kernels", "launches/step", 9, 8, "better"),  # type: ignore[arg-type]
            Comparison("bytes", "B/token", 7, 7, "equal"),  # type: ignore[arg-type]
            Comparison("host operators", "calls/step", None, None, "varies"),
        ),
        "attribution": attribution,
        "noise": None,
        "findings": (
            Finding("counter", "mtp", f"syncs: 1 → 2 {HOSTILE}", (), Location("kernels/a b.py", 7)),
            Finding("time", "mtp", "slower", (), None),
        ),
    }
    return VariantResult(**(values | changes))


def gate_result(*variants: VariantResult, **changes: Any) -> GateResult:
    values: dict[str, Any] = {
        "scenario": "made",
        "metric": "tok_s",
        "delta": 0.02,
        "level": 0.015,
        "max_pairs": 16,
        "base": {"ref": HOSTILE, "commit": "a" * 40, "changed": False},
        "head": {"ref": ".", "commit": None, "changed": True},
        "machine": {"device": "cpu"},
        "variants": variants,
        "notes": (f"note {HOSTILE}",),
    }
    return GateResult(**(values | changes))


@pytest.fixture
def failed() -> GateResult:
    """A FAIL with everything, in hostile words."""
    return gate_result(variant(Verdict.FAIL))


@pytest.fixture
def make_result() -> Any:
    """``make_result([(Verdict.PASS, {})], strict=True)``: verdicts and changes of each variant, and of the result."""

    def make(variants: list[tuple[Verdict | None, dict[str, Any]]], **changes: Any) -> GateResult:
        made = [variant(verdict, **({"counters": (), "findings": ()} | more)) for verdict, more in variants]
        return gate_result(*made, **changes)

    return make

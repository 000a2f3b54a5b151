"""What the run happened under: clocks, other processes, and a trace that may not be trusted."""

import re

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding, Severity
from workbench.diagnose.findings.gain import gain
from workbench.diagnose.numbers import percent
from workbench.quantity import Quantity
from workbench.trace.claims import CLAIMS, Check

THROTTLED_SHARE = 0.2
"""Share of the samples with a throttle reason from which it shaped the run."""

LESS_CLOCK = 0.03

DOUBTS = (
    "head-loss",
    "launch-without-kernel",
    "missing-graph-nodes",
    "data-loss",
    "counter-gap",
    "steps-missing",
    "clock-jump",
)
"""Warnings that say records are missing. Errors always become findings."""


def clock_throttled(facts: Facts) -> list[Finding]:
    """The device's clocks were held down while steps ran."""
    counters = facts.counters
    if not len(counters) or not len(facts.steps):
        return []
    start = counters.ints("start_ns")
    first, last = int(facts.steps.start.min()), int(facts.steps.end.max())
    during = (start >= first) & (start <= last)
    if during.sum() < 3:
        during = np.ones(len(counters), bool)
    codes, names = counters.codes("name")
    value = counters.floats("value")
    held: dict[str, float] = {}
    for code, name in enumerate(names):
        if "throttle" in name.lower():
            own = during & (codes == code)
            if own.any():
                held[name] = float((np.nan_to_num(value[own]) > 0).mean())
    reasons = {name: share for name, share in held.items() if share >= THROTTLED_SHARE}
    if not reasons:
        return []
    clock = [code for code, name in enumerate(names) if re.fullmatch(r"sm_clock|sm clock|clocks_sm", name)]
    own = during & np.isin(codes, clock)
    mean = float(value[own].mean()) if own.any() else 0.0
    most = _most_clock(facts)
    missing = 1 - mean / most if mean and most else 0.0
    if mean and most and missing < LESS_CLOCK:
        return []
    # Memory runs on a clock of its own: at most the time beyond the floor would shrink.
    beyond = facts.wall_ns - sum(one.total_ns for one in facts.accounting.causes if one.name == "floor")
    recoverable = gain(facts, missing * beyond, "estimated", 0.0) if missing else None
    named = ", ".join(name.removeprefix("throttle_") for name in reasons)
    share = max(reasons.values())
    clocks = f", SM clock {mean / 1e6:.0f} of {most / 1e6:.0f} MHz" if missing else ""
    return [
        Finding(
            id="clock-throttled",
            severity="major" if missing >= 0.1 else "minor",
            variant=facts.variant,
            title="Clocks were held down",
            sentence=f"In {percent(share, 2)} of the samples the driver held clocks down ({named}){clocks}.",
            remedy="check power limit, cooling and other load (nvidia-smi -q -d PERFORMANCE); compare runs at"
            " equal clocks only",
            confidence="high" if missing else "medium",
            evidence=(
                *(
                    Evidence(f"samples with {name}", Quantity(part, "share", "measured"), "counters")
                    for name, part in reasons.items()
                ),
                *([Evidence("mean SM clock", Quantity(mean / 1e6, "MHz", "measured"), "counters")] if mean else []),
            ),
            recoverable=recoverable,
        )
    ]


def _most_clock(facts: Facts) -> float:
    """Return the highest SM clock of the device in Hz; 0 where it is not known."""
    for row in facts.bundle.table("env").to_pylist():
        if row["key"].endswith("sm_clock_max_mhz"):
            try:
                return float(row["value"]) * 1e6
            except ValueError:
                return 0.0
    return 0.0


def foreign_process(facts: Facts) -> list[Finding]:
    """Another process computes on the device. In a container a run may see itself under another pid, so programs
    of this kind's own name do not count."""
    others = []
    for row in facts.bundle.table("env").to_pylist():
        if row["key"].endswith("other_processes") and not row["value"].startswith(("none", "not known")):
            others += [part.strip() for part in row["value"].split(", ")]
    strangers = [one for one in others if not re.search(r"python|unknown|workbench", one, re.IGNORECASE)]
    if not strangers:
        return []
    return [
        Finding(
            id="foreign-process",
            severity="major",
            variant=facts.variant,
            title="Another process on the device",
            sentence=f"{len(strangers)} other processes computed on the device: {', '.join(strangers[:3])}.",
            remedy="stop them, or take another device, and measure again",
            confidence="medium",
            evidence=(Evidence("other processes", Quantity(float(len(strangers)), "processes", "measured"), "env"),),
        )
    ]


def data_quality(facts: Facts) -> list[Finding]:
    """What the verdict found wrong: each error, and each warning that says records are missing."""
    found = []
    for check in facts.verdict.checks:
        if check.severity == "info" or (check.severity != "error" and check.id not in DOUBTS):
            continue
        claims = "; ".join(CLAIMS[claim] for claim in check.refuses)
        refused = f"; not said: {claims}" if claims else ""
        found.append(
            Finding(
                id="data-quality",
                severity=_doubt(check),
                variant=facts.variant,
                title=f"The trace cannot be trusted: {check.id}"
                if _doubt(check) == "critical"
                else f"Lost: {check.id}",
                sentence=check.message[:1].upper() + check.message[1:] + refused + ".",
                remedy="record again: warm the profiler up, let no second profiler run, and keep the window short",
                confidence="high",
                evidence=(Evidence(check.id, Quantity(float(check.count), "rows", "measured"), _table(check.id)),),
                location=check.id,
            )
        )
    return found


def _doubt(check: Check) -> Severity:
    """Return critical where the times and kernels shown may be wrong; lost counters leave those as they are."""
    if check.severity != "error":
        return "note"
    return "critical" if set(check.refuses) - {"counters"} else "minor"


def _table(check: str) -> str:
    if check.startswith("counter") or check == "throttled":
        return "counters"
    if "step" in check or check in ("accepted-beyond-drafted", "clock-jump"):
        return "steps"
    return "losses" if check in ("data-loss", "damaged") else "kernels"

"""A diagnosis as plain text: causes, and findings with evidence, narrow enough for a terminal."""

from collections import Counter
from collections.abc import Sequence

from workbench.diagnose.accounting import Accounting
from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.load_split import clean_step
from workbench.diagnose.numbers import parts_that_add_up, percent, significant
from workbench.quantity import Quantity

CAUSE_COLUMNS = ("cause", "ms per step", "share", "tag", "how")

_ROWS = 4
"""Rows of evidence shown of a finding; ``--json`` has all."""


def head_lines(facts: Facts) -> list[str]:
    """Return what a variant is and reaches, and on which times that rests."""
    rate = facts.tok_s
    profiled = " while profiled" if facts.profiled else ""
    said = f"{significant(rate.value, 3)} {rate.unit}{profiled} ({rate.tag})" if rate else "no step time"
    lines = [f"{facts.variant}: {said}, {len(facts.steps)} steps"]
    if facts.profiled:
        lines.append(f"times are traced ones; {_without_profiler(facts)}")
    found = facts.split
    if found is not None:
        mapping = found.mapping
        if not mapping.identity:
            lines.append(
                f"kernels and gaps of {len(found.timeline.steps)} traced steps brought onto {found.steps} "
                f"{facts.time_pass} ones; residual {percent(mapping.residual, 2)} of the step"
            )
        lines += list(found.notes)
    counts = Counter(check.id for check in facts.verdict.checks)
    for check in {check.id: check for check in reversed(facts.verdict.checks)}.values():
        more = f", and {counts[check.id] - 1} more like it" if counts[check.id] > 1 else ""
        lines.append(f"{check.severity}: {check.message} [{check.id}]{more}")
    return lines


def _without_profiler(facts: Facts) -> str:
    """Say how long a step takes without the profiler, and what tok/s that is, as far as anything says it."""
    clean, tokens = clean_step(facts.bundle, facts.variant), facts.tokens
    if clean is None:
        return "a step without the profiler is shorter, by how much the trace cannot say"
    rate = f", {significant(tokens / len(facts.steps) * 1e9 / clean, 3)} tok/s (estimated)" if tokens else ""
    return f"a step without the profiler takes {significant(clean / 1e6, 3)} ms by what is beside the trace{rate}"


def cause_rows(accounting: Accounting, *, profiled: bool = False) -> list[tuple[str, ...]]:
    """Return one row of CAUSE_COLUMNS a cause, the last is the step's wall time. Parts add up as printed.

    ``profiled``: the steps are traced ones.
    """
    whole = round(accounting.wall_ns / max(accounting.steps, 1) / 1e3)
    totals = [cause.total_ns for cause in accounting.causes]
    times, shares = parts_that_add_up(totals, whole), parts_that_add_up(totals, 1000)
    cells = [
        (cause.name, f"{time / 1e3:.3f}", f"{share / 10:.1f}%", cause.tag, cause.note)
        for cause, time, share in zip(accounting.causes, times, shares, strict=True)
    ]
    how = f"mean of {accounting.steps} steps{', while profiled' if profiled else ''}"
    return [*cells, ("step", f"{whole / 1e3:.3f}", "100.0%", "measured", how)]


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines, in their order."""
    if not findings:
        return ["no finding: nothing stands out above the noise and above 2 % of the tok/s"]
    lines = ["findings"]
    for number, one in enumerate(findings, 1):
        worth = f", {gain_text(one.recoverable)}" if one.recoverable else ""
        lines.append(f"  {number}. {one.title} [{one.id}] {one.severity}, confidence {one.confidence}{worth}")
        lines.append(f"     {one.sentence}")
        lines.append(f"     try: {one.remedy}")
        lines += [
            f"       {row.what}: {_value(row.quantity)}{_where(row.table, row.ids)}" for row in one.evidence[:_ROWS]
        ]
        if len(one.evidence) > _ROWS:
            lines.append(f"       and {len(one.evidence) - _ROWS} more rows of evidence (--json)")
        lines.append(f"     {one.page}")
    return lines


def gain_text(gain: Quantity) -> str:
    """Return what a finding would win, with its bounds."""
    bounds = ""
    if gain.low is not None and gain.high is not None:
        bounds = f" ({significant(gain.low, 3)} to {significant(gain.high, 3)})"
    return f"+{significant(gain.value, 3)} {gain.unit}{bounds}, {gain.tag}"


def _value(quantity: Quantity) -> str:
    return f"{significant(quantity.value, 3)} {quantity.unit} ({quantity.tag})"


def _where(table: str, ids: Sequence[int]) -> str:
    if not table:
        return ""
    return f" [{table}{' ' + ', '.join(map(str, ids[:3])) if ids else ''}{', …' if len(ids) > 3 else ''}]"

"""The gate's tables as cells, shared by terminal and Markdown."""

import math
from collections.abc import Sequence

from workbench.diagnose.numbers import significant
from workbench.gate.attribution import Attribution
from workbench.gate.counters import Comparison
from workbench.gate.measurement import METRICS
from workbench.gate.result import GateResult, VariantResult, detectable_with
from workbench.gate.wording import CALM, change, interval, term_cells, value

Cells = tuple[str, ...]

TERM_COLUMNS = ("term", "tok/s", "95 % interval", "µs per step", "calls per step", "tag")


def verdict_columns(result: GateResult) -> Cells:
    """Return the head of the table of verdicts."""
    unit = METRICS[result.metric][0]
    bounds = f"{100 * (1 - 2 * result.level):g} % interval"
    return (
        "variant",
        "verdict",
        f"base {unit}",
        f"head {unit}",
        "change",
        bounds,
        "clock-adjusted",
        "pairs",
        "fails from",
    )


def verdict_rows(result: GateResult) -> list[Cells]:
    """Return one row a variant. "fails from": the slowdown that fails 4 times in 5 at this many pairs."""
    return [_verdict_row(result, variant) for variant in result.variants]


def _verdict_row(result: GateResult, variant: VariantResult) -> Cells:
    shown, found = variant.shown(result.metric), variant.estimate
    base, head = ("-", "-") if shown is None else (significant(number, 4) for number in shown)
    seen = detectable_with(variant, result.delta, result.max_pairs)
    return (
        variant.name,
        verdict_text(variant),
        base,
        head,
        change(found.mean) if found else "-",
        interval(found) if found and math.isfinite(found.low) else "-",
        change(variant.adjusted.mean) if variant.adjusted else "-",
        str(found.pairs) if found else "0",
        f"-{100 * seen[0]:.1f} %" if seen and math.isfinite(seen[0]) else "-",
    )


def verdict_text(variant: VariantResult) -> str:
    """Return the verdict in capitals, with what the counters say where they fail."""
    words = [variant.verdict.value.upper()] if variant.verdict else []
    return ", ".join([*words, "COUNTERS FAIL"] if variant.counters_fail else words or ["COUNTERS EQUAL"])


def counter_rows(variant: VariantResult) -> list[Cells]:
    """Return the counters that are not equal: name, base, head, unit, status."""
    return [
        (counter.name, value(counter.base), value(counter.head), counter.unit, _status(counter))
        for counter in variant.counters
        if counter.status != "equal"
    ]


COUNTER_COLUMNS = ("counter", "base", "head", "unit", "status")


def counter_summary(variant: VariantResult) -> str:
    """Return how many counters are equal, and that they are exact."""
    if not variant.counters:
        return "no counter was recorded on both sides"
    equal = sum(counter.status == "equal" for counter in variant.counters)
    return f"{equal} of {len(variant.counters)} exact counters are equal"


def _status(counter: Comparison) -> str:
    return "worse, accepted" if counter.accepted else "WORSE" if counter.status == "worse" else counter.status


def term_rows(found: Attribution) -> list[Cells]:
    """Return the chain: accept length, step time, its causes, then what moved inside the step, then the residual."""
    rows = [_term_row(found, index) for index in range(2)]
    rows += [(f"  {cells[0]}", *cells[1:], term.tag) for term in found.causes for cells in [term_cells(term)]]
    rows += [(f"    {cells[0]}", *cells[1:], term.tag) for term in found.movers for cells in [term_cells(term)]]
    if found.other_movers:
        rows.append(("    other parts that moved", change(found.other_movers), "", "", "", "estimated"))
    rows.append(("  residual", change(found.residual), "", "", "", ""))
    return rows


def _term_row(found: Attribution, index: int) -> Cells:
    term = (found.accept_length, found.step_time)[index]
    return (*term_cells(term), term.tag)


def worth_explaining(variant: VariantResult) -> bool:
    """Return whether the change of the time is more than noise: its interval excludes zero, and it is not tiny."""
    found, attribution = variant.estimate, variant.attribution
    if found is None or attribution is None or abs(attribution.total.log) < CALM:
        return False
    return found.low > 0 or found.high < 0


def columns_right(columns: Sequence[str], left: Sequence[str]) -> tuple[int, ...]:
    """Return the columns that are aligned to the right: all but those named in ``left``."""
    return tuple(index for index, column in enumerate(columns) if column not in left)

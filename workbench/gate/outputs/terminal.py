"""The result in a terminal."""

from workbench.gate.measurement import METRICS
from workbench.gate.outputs import table
from workbench.gate.result import GateResult, VariantResult
from workbench.gate.wording import cause_sentence, counter_sentence
from workbench.terminal import print_line, print_table


def print_result(result: GateResult) -> None:
    """Print verdicts, counters that changed, reasons and notes on stdout."""
    print_line(headline(result))
    print_line()
    columns = table.verdict_columns(result)
    print_table(columns, table.verdict_rows(result), right=table.columns_right(columns, ("variant", "verdict")))
    for variant in result.variants:
        print_line(f"  {variant.name}: {variant.reason}; {table.counter_summary(variant)}")
    print_line(f"  {METRICS[result.metric][0]}: {METRICS[result.metric][1]}")
    for variant in result.variants:
        _print_counters(variant)
    for variant in result.variants:
        _print_causes(variant)
    rejected = [one for variant in result.variants for one in variant.rejected]
    if rejected:
        print_line()
        print_line("launches that were not used")
    for one in rejected:
        print_line(f"  {one.launch.bundle.name}: {one.reason}")
    if result.notes:
        print_line()
    for line in result.notes:
        print_line(f"note: {line}")


def headline(result: GateResult) -> str:
    """Return the outcome in one line."""
    outcomes = {
        0: "no regression found",
        1: "REGRESSION",
        3: "inconclusive, and --strict",
        4: "the measurement cannot be used",
    }
    name = f"{result.scenario}: " if result.scenario else ""
    advisory = " (time is advisory)" if result.advisory else ""
    return f"gate: {name}{outcomes[int(result.exit_code)]}{advisory}; {sides(result)}"


def sides(result: GateResult) -> str:
    """Return what was compared with what."""
    return f"{_side(result.base)} → {_side(result.head)}"


def _side(described: object) -> str:
    assert isinstance(described, dict)  # noqa: S101 - made by Side.describe
    if bundles := described.get("bundles"):
        return f"{len(bundles)} bundles ({bundles[0]} …)" if len(bundles) > 1 else str(bundles[0])
    commit = str(described.get("commit") or "no commit")[:12]
    ref = "working tree" if described["ref"] == "." else described["ref"]
    return f"{ref} ({commit}{', changed' if described.get('changed') else ''})"


def _print_counters(variant: VariantResult) -> None:
    rows = table.counter_rows(variant)
    if not rows:
        return
    print_line()
    print_table(table.COUNTER_COLUMNS, rows, title=f"counters of {variant.name} that changed", right=(1, 2))
    for counter in variant.counters:
        if counter.status in ("worse", "better") and counter.moved:
            print_line(f"  {counter_sentence(counter)}")


def _print_causes(variant: VariantResult) -> None:
    found = variant.attribution
    if found is None or not table.worth_explaining(variant):
        return
    print_line()
    print_line(f"why {variant.name} changed: {cause_sentence(found)}")
    print_table(table.TERM_COLUMNS, table.term_rows(found), right=(1, 2, 3, 4))

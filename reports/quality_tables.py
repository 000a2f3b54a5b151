"""The tables of a report that say how far to trust it: limits, losses, clocks, instrument cost, environment."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from workbench.diagnose.numbers import significant
from workbench.diagnose.quality import InstrumentCost, Limit
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Table, number, plain_rows
from workbench.trace.manifest import Clock

TEXT_LIMIT = 400
SECRET = re.compile(
    r"(?:^|[^a-z])(?:token|secrets?|pass(?:word|wd|phrase)?|credentials?|(?:api|private)[^a-z]?key|auth)(?:$|[^a-z])",
    re.IGNORECASE,
)
"""Keys whose values a report never shows."""


def limits_table(limits: Sequence[Limit]) -> Table:
    """Return what could not be measured, why, and what to do about it."""
    return Table(
        "Not measured in this run.",
        (Column("What"), Column("Why"), Column("What stands in"), Column("How to get it"), Column("Variants")),
        (
            plain_rows(
                *(
                    (
                        f"{visible(limit.what)} ({visible(limit.instrument)})",
                        visible(limit.why, TEXT_LIMIT),
                        visible(limit.fallback, TEXT_LIMIT) or "nothing",
                        visible(limit.fix, TEXT_LIMIT) or "not on this machine",
                        ", ".join(map(visible, limit.variants)) or "all",
                    )
                    for limit in limits
                )
            ),
        ),
        phone="cards",
    )


def losses_table(losses: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of table ``losses``: what instruments lost."""
    return Table(
        "Records lost. data_loss: findings on the interval are doubtful; error: the whole table is.",
        (Column("Instrument"), Column("What"), Column("Count", numeric=True), Column("Severity"), Column("Detail")),
        (
            plain_rows(
                *(
                    (
                        visible(row["probe"]),
                        visible(row["kind"]),
                        f"{row['count']:,}",
                        row["severity"],
                        visible(row["detail"], TEXT_LIMIT),
                    )
                    for row in losses
                )
            ),
        ),
        phone="cards",
    )


def cost_table(costs: Sequence[InstrumentCost]) -> Table:
    """Return what the instruments added to the step time."""

    def change(cost: InstrumentCost) -> Cell:
        def signed(share: float) -> str:
            return f"{'+' if share >= 0 else '−'}{significant(abs(100 * share), 3)}"

        found = cost.cost
        spread = "" if found.low is None or found.high is None else f"95 %: {signed(found.low)} to {signed(found.high)}"
        return Cell(signed(found.value), found.tag, note=spread)

    return Table(
        "Median step with and without instruments, at the same places of the same prompts. Times in this report come "
        "from the clean pass.",
        (
            Column("Variant"),
            Column("Instruments"),
            Column("Clean", "ms", numeric=True),
            Column("With them", "ms", numeric=True),
            Column("Cost", "%", numeric=True),
        ),
        (
            Group(
                tuple(
                    (
                        Cell(visible(cost.variant), note=f"{cost.steps} traced steps" if cost.steps else ""),
                        Cell(visible(cost.instruments) or "not stated"),
                        number(cost.clean),
                        number(cost.traced),
                        change(cost),
                    )
                    for cost in costs
                )
            ),
        ),
        phone="cards",
    )


def clock_table(clock: Clock) -> Table:
    """Return how well the instruments' clocks agree."""
    return Table(
        f"One clock: {visible(clock.name) or 'not named'}. Spans of two instruments closer than the residual have "
        "no order.",
        (Column("Instrument's clock"), Column("Residual", "µs", numeric=True), Column("Drift", "ppb", numeric=True)),
        (
            Group(
                tuple(
                    (
                        Cell(visible(source.name)),
                        Cell(significant(source.residual_ns / 1e3), "measured"),
                        Cell(f"{source.drift_ppb:,}"),
                    )
                    for source in clock.sources
                )
            ),
        ),
    )


def rows_table(rows: Mapping[str, int]) -> Table:
    """Return how many rows each table of the bundle holds."""
    return Table(
        "Rows in the bundle.",
        (Column("Table"), Column("Rows", numeric=True)),
        (plain_rows(*((visible(name), f"{count:,}") for name, count in sorted(rows.items()))),),
    )


def facts_table(caption: str, *sources: Mapping[str, Any]) -> Table:
    """Return nested facts as dotted keys and values, sorted; values of secret-looking keys are withheld."""
    facts: list[tuple[str, str]] = sorted(fact for source in sources if source for fact in _flat("", source))
    return Table(
        caption,
        (Column("Fact"), Column("Value")),
        (
            plain_rows(
                *(
                    (visible(key), "withheld" if SECRET.search(key) else visible(value, TEXT_LIMIT))
                    for key, value in facts
                )
            ),
        ),
    )


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _flat(f"{prefix}.{index}", inner)
    else:
        yield prefix, "none" if value in (None, [], {}, "") else str(value)

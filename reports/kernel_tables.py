"""The kernels of a step as a table: time, share, bandwidth, occupancy, registers, spills, CTAs and waves."""

from collections.abc import Sequence

from workbench.diagnose.kernel_account import KernelRow
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Row, Table

COLUMNS = (
    Column("Kernel"),
    Column("Calls", "per step", numeric=True),
    Column("Clean", "µs per step", numeric=True),
    Column("Traced", "µs per step", numeric=True),
    Column("Share", "%", numeric=True),
    Column("HBM read", "GB/s", numeric=True),
    Column("Occupancy", "of limit, %", numeric=True),
    Column("Registers", numeric=True),
    Column("Spills", "B/thread", numeric=True),
    Column("CTAs", numeric=True),
    Column("Waves", numeric=True),
)


def kernel_table(rows: Sequence[KernelRow], unseen: str = "") -> Table:
    """Return one row a kernel and phase. ``unseen``: what was left out of the table, in words."""
    caption = (
        "Clean: the time in a step without the profiler, corrected from the traced one (estimated). Traced: as the "
        "profiler saw it. Occupancy: resident warps of what an SM holds, measured in replays of the kernel (workbench "
        "deep), else where one launch is long enough for the sampled pass to tell, beside the most that the launch "
        "allows. A dash: not measured. "
        "Waves: CTAs over what the device holds at once."
    )
    return Table(f"{caption} {unseen}".strip(), COLUMNS, (Group(tuple(map(_row, rows))),), "cards")


def _row(row: KernelRow) -> Row:
    return (
        Cell(visible(row.short_name.rsplit("::", 1)[-1], 60), note=f"{row.kind}, {row.phase}"),
        Cell(significant(row.per_step, 3)),
        Cell(significant(row.clean_ns / 1e3), "estimated" if row.rule != "as traced" else "measured"),
        Cell(significant(row.traced_ns / 1e3)),
        Cell(significant(100 * row.share, 3)),
        Cell(significant(row.achieved.value, 3), row.achieved.tag) if row.achieved else Cell("–"),
        _occupancy(row.occupancy, row.occupancy_limit),
        Cell(str(row.registers) if row.registers else "–"),
        Cell("–" if row.spill_bytes is None or row.kind.endswith("copy") else f"{row.spill_bytes:,}"),
        Cell(f"{row.ctas:,}" if row.ctas else "–"),
        Cell("–" if row.waves is None else significant(row.waves, 3) if row.waves >= 0.01 else "< 0.01"),
    )


def _occupancy(seen: Quantity | None, limit: Quantity | None) -> Cell:
    most = f"{significant(100 * limit.value, 3)}" if limit else "–"
    why = f"limit set by {visible(limit.note, 60)}" if limit and limit.note else ""
    if seen is None:
        return Cell(f"– of {most}" if limit else "–", note=why)
    return Cell(f"{significant(100 * seen.value, 3)} of {most}", seen.tag, why)


def kernels_sentence(rows: Sequence[KernelRow]) -> str:
    """Return how many kernels a step launches and how many of them are shorter than 3 µs."""
    launches = sum(row.per_step for row in rows)
    short = sum(row.per_step for row in rows if row.per_step and row.clean_ns / row.per_step < 3000)
    spilling = sum(1 for row in rows if row.spill_bytes)
    spills = f"{spilling} names spill" if spilling else "none spills"
    part = percent(short / launches) if launches else "none"
    return f"{launches:,.0f} launches a step of {len(rows)} kinds; {part} take less than 3 µs; {spills}."

"""The tables of a report on an ingested trace: verdict, busy and idle, steps as traced, gaps, kernels, floor."""

from collections.abc import Sequence

from workbench.diagnose.busy import CATEGORIES, Busy
from workbench.diagnose.gaps import GapCause
from workbench.diagnose.kernels_by_name import NamedKernel
from workbench.diagnose.numbers import byte_text, significant
from workbench.diagnose.overview import FloorOverview, StepOverview
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Table, number, plain_rows
from workbench.trace.claims import CLAIMS
from workbench.trace.validity import Verdict

TEXT_LIMIT = 600
UNKNOWN = Cell("not known")


def verdict_table(verdict: Verdict) -> Table:
    """Return what is wrong with the trace, the worst first."""
    return Table(
        "error: what it refuses cannot be said at all. warning: neither, or with care. info: worth knowing.",
        (Column("Check"), Column("Severity"), Column("What was found", remark=True)),
        (
            plain_rows(
                *((visible(check.id), check.severity, visible(check.message, TEXT_LIMIT)) for check in verdict.checks),
            ),
        ),
    )


def refusals_table(verdict: Verdict) -> Table:
    """Return what is not said on this page, and the checks that refuse it."""
    return Table(
        "Left out of this page because of the verdict.",
        (Column("Not said"), Column("Because of")),
        (
            plain_rows(
                *(
                    (CLAIMS[claim], visible(", ".join(reasons), TEXT_LIMIT))
                    for claim, reasons in verdict.refusals.items()
                )
            ),
        ),
        phone="cards",
    )


def busy_table(rows: Sequence[Busy]) -> Table:
    """Return busy and idle time by device; the categories add up to the window."""
    return Table(
        "From the first to the last activity of any device, by interval union: nothing is counted twice, so the parts "
        "add up to the window. Collectives, copies and fills count where no compute kernel ran.",
        (
            Column("Device"),
            Column("Window", "ms", numeric=True),
            Column("Busy", "%", numeric=True),
            *(Column(name, "ms", numeric=True) for name in CATEGORIES),
        ),
        (
            Group(
                tuple(
                    (
                        Cell(str(one.device)),
                        Cell(significant(one.window_ns / 1e6), "measured"),
                        Cell(significant(100 * one.busy_ns / one.window_ns, 3) if one.window_ns else "–"),
                        *(Cell(significant(ns / 1e6)) for ns in one.by_category),
                    )
                    for one in rows
                )
            ),
        ),
        phone="cards",
    )


def steps_table(rows: Sequence[StepOverview]) -> Table:
    """Return the steps of each device as traced."""
    return Table(
        "With the profiler on. Parts are medians of their own, so they need not add up to the median step.",
        (
            Column("Device"),
            Column("Steps", numeric=True),
            Column("Median", "ms", numeric=True),
            Column("Shortest", "ms", numeric=True),
            Column("Longest", "ms", numeric=True),
            *(Column(name, "ms", numeric=True) for name in CATEGORIES),
        ),
        (
            Group(
                tuple(
                    (
                        Cell(str(one.device)),
                        Cell(f"{one.steps:,}"),
                        Cell(significant(one.median.value), one.median.tag),
                        *(Cell(significant(value.value)) for value in (one.shortest, one.longest)),
                        *(Cell(significant(one.parts[name].value)) for name in CATEGORIES),
                    )
                    for one in rows
                )
            ),
        ),
        phone="cards",
    )


def gaps_table(causes: Sequence[GapCause]) -> Table:
    """Return the longest gaps: what the thread that ended each did meanwhile."""
    return Table(
        "Time in which the device ran nothing, and what the thread did that launched what ended it.",
        (
            Column("Device"),
            Column("Gap", "ms", numeric=True),
            Column("Thread"),
            Column("What it did", remark=True),
        ),
        (
            Group(
                tuple(
                    (
                        Cell(str(cause.gap.device)),
                        Cell(significant(cause.gap.ns / 1e6), "measured"),
                        Cell("not known" if cause.thread is None else str(cause.thread)),
                        Cell(visible(cause.sentence(), TEXT_LIMIT)),
                    )
                    for cause in causes
                )
            ),
        ),
    )


def kernels_table(kernels: Sequence[NamedKernel]) -> Table:
    """Return one row a kernel name."""
    return Table(
        "Time: union of the name's intervals, measured with the profiler on. Share: of the time in which anything ran; "
        "kernels that overlap count for both. Grid, block, registers and occupancy limit: of the launch shape that "
        "took most time. The limit is the share of an SM's warps that a launch allows, not what it reached.",
        (
            Column("Kernel"),
            Column("Time", "ms", numeric=True),
            Column("Share", "%", numeric=True),
            Column("Runs", numeric=True),
            Column("Mean", "µs", numeric=True),
            Column("Grid", "CTAs", numeric=True),
            Column("Block", "threads", numeric=True),
            Column("Registers", "a thread", numeric=True),
            Column("Occupancy limit", "%", numeric=True),
        ),
        (Group(tuple(_kernel(one) for one in kernels)),),
        phone="cards",
    )


def _kernel(one: NamedKernel) -> tuple[Cell, ...]:
    launch = one.launch
    name = visible(one.name, 160)
    shapes = f"{one.shapes} shapes" if one.shapes > 1 else ""
    occupancy = launch.occupancy
    return (
        Cell(visible(one.short_name), note="" if name == one.short_name else name),
        Cell(significant(one.ns / 1e6)),
        Cell(significant(100 * one.busy_share, 3)),
        Cell(f"{one.executions:,}", note=f"{one.in_steps:,} in steps" if 0 < one.in_steps < one.executions else ""),
        Cell(significant(one.mean_ns / 1e3)),
        Cell(_extent(launch.grid), note=shapes),
        Cell(_extent(launch.block)),
        Cell("–" if launch.registers is None else str(launch.registers), note=_local(launch.local_bytes)),
        Cell(significant(100 * occupancy.value, 3), occupancy.tag, occupancy.note) if occupancy else Cell("–"),
    )


def _local(local_bytes: int | None) -> str:
    return f"{local_bytes:,} B spill or stack" if local_bytes else ""


def _extent(extent: tuple[int, int, int] | None) -> str:
    if extent is None:
        return "–"
    last = max((index for index, size in enumerate(extent) if size != 1), default=0)
    return " × ".join(f"{size:,}" for size in extent[: last + 1])


def floor_table(floor: FloorOverview, steps: Sequence[StepOverview]) -> Table:
    """Return the least time of a step at each roof, and how many times longer the traced steps are."""
    median = min((one.median.value for one in steps), default=None)

    def times(roof_ms: float) -> Cell:
        return Cell(significant(median / roof_ms, 3), "modelled") if median is not None and roof_ms > 0 else UNKNOWN

    read = floor.bytes_per_step
    return Table(
        f"{byte_text(read.value)} a step ({read.tag}: {visible(read.note)}), over each roof. The traced step is longer "
        "than the real one, so the last column is too high by as much.",
        (
            Column("Roof"),
            Column("Floor", "ms", numeric=True),
            Column("Traced step over floor", "×", numeric=True),
        ),
        (Group(tuple((Cell(visible(roof.note, 300)), number(roof), times(roof.value)) for roof in floor.at_roof)),),
        phone="cards",
    )

"""The figures of a watched server as rows, so that every face prints the same ones in the same words."""

from dataclasses import dataclass

from workbench.diagnose.attached import Attached
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity, Tag
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Table

_ROWS = (
    ("speed", "tok_s"),
    ("step", "step"),
    ("accept length", "accept_length"),
    ("device memory traffic", "traffic"),
    ("of the roof", "roof_share"),
    ("nothing moves", "idle"),
    ("SM active", "sm_active"),
    ("CTAs resident", "ctas_per_sm"),
    ("warps resident", "warps_active"),
    ("decoding", "decoding"),
    ("bytes read a step", "bytes_per_step"),
    ("byte model", "model_bytes"),
    ("distinct experts", "experts"),
    ("forwards without graph", "eager_share"),
    ("SM clock", "clock"),
    ("power", "power"),
    ("watched", "seconds"),
    ("counters read", "sampled"),
)


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure: ``amount`` with its unit, an interval as ``low to high``."""

    label: str
    amount: str
    tag: Tag
    note: str


def figures(found: Attached) -> tuple[FigureRow, ...]:
    """Return the figures that are known."""
    known = ((label, getattr(found, name)) for label, name in _ROWS)
    return tuple(FigureRow(label, amount(value), value.tag, value.note) for label, value in known if value is not None)


def amount(value: Quantity) -> str:
    """Return a quantity with its unit, its interval in place of its value where it has one."""
    if value.unit == "share":
        return percent(value.value, 3)
    scale, unit = (1e9, "GB") if value.unit == "B" else (1.0, value.unit)
    text = significant(value.value / scale, 4)
    if value.low is not None and value.high is not None and value.low < value.high:
        text = f"{significant(value.low / scale, 4)} to {significant(value.high / scale, 4)}"
    return f"{text} {unit}"


def figures_table(found: Attached) -> Table:
    """Return the figures as a table of a page."""
    rows = tuple(
        (Cell(row.label), Cell(row.amount, row.tag), Cell(visible(row.note, 400) or "–")) for row in figures(found)
    )
    columns = (Column("What"), Column("Value", numeric=True), Column("How it is known", remark=True))
    return Table("Means over the bursts in which counters were read, and over the window.", columns, (Group(rows),))

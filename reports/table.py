"""A table as data, so that every format of a report prints the same rows."""

from dataclasses import dataclass
from typing import Literal

from workbench.diagnose.numbers import significant
from workbench.quantity import Quantity, Tag


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title and the unit of its numbers. ``remark`` columns hold sentences and give way on a phone."""

    title: str
    unit: str = ""
    numeric: bool = False
    remark: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry. ``note`` is printed small below; ``colour`` names a swatch of the palette."""

    text: str
    tag: Tag | None = None
    note: str = ""
    colour: str = ""


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that belong together, with a title and a row of totals where it has them."""

    rows: tuple[Row, ...]
    title: str = ""
    total: Row | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table. On a phone, "cards" turns every row into a card of titled entries; "rows" keeps the columns."""

    caption: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    phone: Literal["rows", "cards"] = "rows"

    def __post_init__(self) -> None:
        for group in self.groups:
            for row in (*group.rows, *([group.total] if group.total else [])):
                if len(row) != len(self.columns):
                    raise AssertionError(f"{self.caption}: {len(row)} cells in a row of {len(self.columns)} columns")


ABSENT = Cell("not known")


def number(quantity: Quantity | None, digits: int = 4, *, scale: float = 1, note: str = "") -> Cell:
    """Return a quantity as a cell: value over ``scale``, tag, interval in brackets; the unit stands in the head."""
    if quantity is None:
        return ABSENT
    interval = ""
    if quantity.low is not None and quantity.high is not None and quantity.low < quantity.high:
        low, high = (significant(bound / scale, digits) for bound in (quantity.low, quantity.high))
        interval = f"[{low},\u00a0{high}]"
    return Cell(significant(quantity.value / scale, digits), quantity.tag, "; ".join(filter(None, (interval, note))))


def plain_rows(*rows: tuple[str, ...]) -> Group:
    """Return rows of text without tags as a group."""
    return Group(tuple(tuple(Cell(text) for text in row) for row in rows))

"""The pieces of a page: texts, figures and tables in sections. Templates draw them by ``kind``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.reports.figures import Figure
from workbench.reports.table import Table


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A paragraph; "warning" stands out."""

    kind: ClassVar[str] = "text"
    text: str
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class FigureBlock:
    """A figure with its caption. ``alt`` says in words what it shows; ``id`` is its place in the page.

    ``legend``: causes to name beside their colours, in place of plotly's legend.
    """

    kind: ClassVar[str] = "figure"
    id: str
    figure: Figure
    caption: str
    alt: str
    legend: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FigureRow:
    """Figures beside each other where there is room."""

    kind: ClassVar[str] = "row"
    figures: tuple[FigureBlock, ...]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; folded away under ``folded`` where that is given."""

    kind: ClassVar[str] = "table"
    table: Table
    folded: str = ""


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """Text as it is, folded away under ``title``."""

    kind: ClassVar[str] = "source"
    title: str
    text: str


Block = TextBlock | FigureBlock | FigureRow | TableBlock | SourceBlock


@dataclass(frozen=True, slots=True)
class Section:
    """A section: ``id`` is its anchor, ``intro`` its first sentence."""

    id: str
    title: str
    intro: str
    blocks: tuple[Block, ...]


def figure_blocks(made: Sequence[Section]) -> list[FigureBlock]:
    """Return all figures of the sections in order."""
    found: list[FigureBlock] = []
    for section in made:
        for block in section.blocks:
            if isinstance(block, FigureBlock):
                found.append(block)
            elif isinstance(block, FigureRow):
                found += block.figures
    return found

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


@dataclass(frozen=True, slots=True)
class FindingBlock:
    """A finding. ``id``: its place in the page; ``gain``: what it would give back, in words, with its tag."""

    kind: ClassVar[str] = "finding"
    id: str
    severity: str
    title: str
    sentence: str
    remedy: str
    gain: str
    tag: str
    facts: str
    evidence: Table | None


@dataclass(frozen=True, slots=True)
class FoldBlock:
    """Blocks folded away under ``title``; their figures are drawn when it is opened."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: tuple["Block", ...]


Block = TextBlock | FigureBlock | FigureRow | TableBlock | SourceBlock | FindingBlock | FoldBlock


@dataclass(frozen=True, slots=True)
class Section:
    """A section: ``id`` is its anchor, ``intro`` its first sentence."""

    id: str
    title: str
    intro: str
    blocks: tuple[Block, ...]


def figure_blocks(made: Sequence[Section]) -> list[FigureBlock]:
    """Return all figures of the sections in order, those folded away included."""
    return [figure for section in made for block in section.blocks for figure in _figures(block)]


def _figures(block: Block) -> list[FigureBlock]:
    if isinstance(block, FigureBlock):
        return [block]
    if isinstance(block, FigureRow):
        return list(block.figures)
    if isinstance(block, FoldBlock):
        return [figure for inner in block.blocks for figure in _figures(inner)]
    return []

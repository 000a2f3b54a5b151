"""The pieces that pages are built of: tables, figures and texts of the report as Dash components, links, messages.

Text reaches the page as text nodes only, so a name from a bundle cannot become markup.
"""

from collections.abc import Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from workbench.dashboards.context import Browser, Children
from workbench.dashboards.place import Place
from workbench.diagnose.numbers import significant
from workbench.quantity import Quantity
from workbench.reports import palette
from workbench.reports.blocks import (
    Block,
    FigureBlock,
    FigureRow,
    FoldBlock,
    Section,
    SourceBlock,
    TableBlock,
    TextBlock,
)
from workbench.reports.labels import visible
from workbench.reports.plotly_config import CONFIG, TEMPLATES
from workbench.reports.step_figure import COLOURS
from workbench.reports.table import Cell, Column, Group, Table

Attributes = dict[str, Any]
"""Attributes of an element whose names are not Python's, such as ``aria-label``."""

SWATCHES = {name: f"cause-{index}" for index, name in enumerate(palette.CAUSES)}


def link(text: str, place: Place, *, kind: str = "", title: str = "") -> Component:
    """Return a link to ``place`` that does not load the page again."""
    return dcc.Link(text, href=place.href, className=kind, title=title or None)


def pills(label: str, choices: Sequence[tuple[str, Place, bool]]) -> Component:
    """Return links side by side, the chosen one marked."""
    made = [
        dcc.Link(text, href=place.href, className="pill chosen" if chosen else "pill")
        for text, place, chosen in choices
    ]
    return html.Div([html.Span(label, className="pills-label"), *made], className="pills")


def message(text: str, tone: str = "warning") -> Component:
    """Return one line that stands out."""
    return html.P(html.Bdi(text), className=tone, role="status")


def heading(text: str) -> Component:
    """Return the title of a page."""
    return html.H1(html.Bdi(text))


def section(title: str, children: Sequence[Any], intro: str = "", id_: str = "") -> Component:
    """Return a titled box."""
    head: Children = [html.H2(title)] if title else []
    if intro:
        head.append(html.P(html.Bdi(intro)))
    named: Attributes = {"id": id_} if id_ else {}
    return html.Section([*head, *children], **named)


def tag(name: str) -> Component:
    """Return the mark that says how a number is known."""
    return html.Span(name, className=f"tag {name}")


def quantity(value: Quantity | None, digits: int = 4) -> Children:
    """Return a number with its unit and tag."""
    if value is None:
        return [html.Span("not known", className="muted")]
    return [html.Span(f"{significant(value.value, digits)} {value.unit} ", title=value.note), tag(value.tag)]


def graph(figure: dict[str, Any], browser: Browser, id_: str = "", *, alt: str = "", **config: Any) -> Component:
    """Return a figure in the colours of the browser's scheme, without a way out of the page."""
    height = figure["layout"].get("height", 400)
    named: Attributes = {"id": id_} if id_ else {}
    settings: Any = CONFIG | config
    drawn = dcc.Graph(figure=themed(figure, browser), config=settings, style={"height": f"{height}px"}, **named)
    spoken: Attributes = {"role": "img", "aria-label": alt} if alt else {}
    return html.Div(drawn, className="plot", **spoken)


def themed(figure: dict[str, Any], browser: Browser) -> dict[str, Any]:
    """Return the figure with the template of the browser's colour scheme."""
    return {"data": figure["data"], "layout": figure["layout"] | {"template": TEMPLATES[browser.scheme]}}


def legend(names: Sequence[str]) -> Component:
    """Return causes, and what a span of a step is, beside their colours."""
    swatches = [SWATCHES.get(COLOURS.get(name, name), "cause-other") for name in names]
    items = [html.Li([html.Span(className=f"swatch {one}"), name]) for one, name in zip(swatches, names, strict=True)]
    hidden: Attributes = {"aria-hidden": "true"}
    return html.Ul(items, className="legend", **hidden)


def blocks(made: Sequence[Block], browser: Browser) -> Children:
    """Return the pieces of a report's page."""
    return [component for block in made for component in _block(block, browser)]


def report_section(one: Section, browser: Browser) -> Component:
    """Return a section of the report."""
    return section(one.title, blocks(one.blocks, browser), one.intro, one.id)


def _block(block: Block, browser: Browser) -> Children:
    if isinstance(block, TextBlock):
        return [html.P(html.Bdi(block.text), className=block.tone)]
    if isinstance(block, FigureBlock):
        return [_figure(block, browser)]
    if isinstance(block, FigureRow):
        return [html.Div([_figure(one, browser) for one in block.figures], className="figures")]
    if isinstance(block, TableBlock):
        shown = table(block.table)
        return [html.Details([html.Summary(html.Bdi(block.folded)), *shown])] if block.folded else shown
    if isinstance(block, SourceBlock):
        return [html.Details([html.Summary(block.title), html.Pre(block.text, tabIndex=0, dir="ltr")])]
    if isinstance(block, FoldBlock):
        return [html.Details([html.Summary(html.Bdi(block.title)), *blocks(block.blocks, browser)])]
    return []  # findings have a page of their own here


def _figure(block: FigureBlock, browser: Browser) -> Component:
    parts: Children = [legend(block.legend)] if block.legend else []
    parts += [graph(block.figure, browser, alt=block.alt), html.Figcaption(block.caption)]
    return html.Figure(parts)


def table(one: Table) -> Children:
    """Return a table of the report and its caption."""
    remarks = " remarks" if any(column.remark for column in one.columns) else ""
    head = html.Thead(html.Tr([_head(column) for column in one.columns], role="row"), role="rowgroup")
    bodies = [_group(group, one.columns) for group in one.groups]
    drawn = html.Table([head, *bodies], className=f"{one.phone}{remarks}", role="table")
    spoken: Attributes = {"aria-label": one.caption[:200]}
    scroll = html.Div(drawn, className="scroll", role="region", tabIndex=0, **spoken)
    return [scroll, html.P(html.Bdi(one.caption), className="caption")] if one.caption else [scroll]


def _head(column: Column) -> Component:
    unit = [html.Span(f" {column.unit}", className="unit")] if column.unit else []
    return html.Th([column.title, *unit], scope="col", role="columnheader", className=_class(column))


def _class(column: Column) -> str:
    return "number" if column.numeric else "remark" if column.remark else "text"


def _group(group: Group, columns: Sequence[Column]) -> Component:
    rows: Children = []
    if group.title:
        title = html.Th(html.Bdi(group.title), colSpan=len(columns), scope="rowgroup", role="rowheader")
        rows.append(html.Tr(title, className="group", role="row"))
    rows += [html.Tr(_cells(row, columns), role="row") for row in group.rows]
    if group.total:
        rows.append(html.Tr(_cells(group.total, columns), className="total", role="row"))
    return html.Tbody(rows, role="rowgroup")


def _cells(row: Sequence[Cell], columns: Sequence[Column]) -> Children:
    made: Children = []
    for index, (cell, column) in enumerate(zip(row, columns, strict=True)):
        title = f"{column.title}, {column.unit}" if column.unit else column.title
        value: list[Any] = []
        if cell.colour:
            value.append(html.Span(className=f"swatch {SWATCHES.get(cell.colour, 'cause-other')}"))
        value.append(html.Bdi(cell.text))
        value += [" ", tag(cell.tag)] if cell.tag else []
        value += [html.Small(html.Bdi(cell.note))] if cell.note else []
        inside = html.Span(value, className="value")
        common: Attributes = {"className": _class(column), "data-title": title}
        if index == 0 and not column.numeric:
            made.append(html.Th(inside, scope="row", role="rowheader", **common))
        else:
            made.append(html.Td(inside, role="cell", **common))
    return made


def variant_pills(place: Place, names: Sequence[str], chosen: str) -> Children:
    """Return the variants of a run to choose from; nothing where there is one."""
    if len(names) < 2:
        return []
    return [
        pills(
            "variant",
            [(visible(name, 40) or "all", place.to(place.page, variant=name), name == chosen) for name in names],
        )
    ]

"""Roofline against achieved: where the step, its phases and its kernels lie under the roofs."""

from dash import Dash, Input, Output, State, html, no_update

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import graph, heading, message, section, table, variant_pills
from workbench.dashboards.place import PageName, Place, read_place
from workbench.diagnose.facts import Facts
from workbench.diagnose.numbers import byte_text, percent, significant
from workbench.diagnose.roofline import Roofline
from workbench.errors import UnfitError, WorkbenchError
from workbench.reports.device_sections import drawn, known_roofline
from workbench.reports.labels import visible
from workbench.reports.roofline_figure import roofline_figure
from workbench.reports.table import Cell, Column, Group, Table
from workbench.timeline.kernel_rows import kernel_span

NAME: PageName = "roofline"
TITLE = "Roofline"
ROWS = 60


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the roofline of one variant."""
    bundle = context.bundle(place)
    chosen = context.variant(place)
    diagnosis = context.catalogue.diagnosis(place.run)
    summary = {variant.name: variant for variant in diagnosis.variants}.get(chosen)
    parts: Children = [heading("Roofline: achieved bandwidth against the roofs")]
    parts += variant_pills(place, context.catalogue.run(place.run).variants, chosen)
    if summary is None:
        raise UnfitError(f"variant {visible(chosen, 60)!r} has no measured step")
    found = known_roofline(Facts(bundle, chosen), summary)
    parts += [message(visible(text, 300)) for text in found.missing]
    if found.points or found.roofs:
        caption = (
            "Area: time. A cross: above a roof, so its bytes or the roof are wrong. Diagonals: equal tok/s. A click on "
            "a kernel leads to its longest run on the timeline. Points of next to no bytes are in the table alone."
        )
        figure = roofline_figure(drawn(found))
        shown = graph(figure, browser, "roofline-graph", alt="Achieved bandwidth over bytes per accepted token.")
        parts.append(section("", [html.Figure([shown, html.Figcaption(caption)])]))
    if found.points:
        parts.append(section("Numbers", table(_table(found))))
    return parts


def register(app: Dash, context: Context) -> None:
    """A click on a kernel leads to the timeline."""

    def click(data: object, path: str, query: str) -> object:
        place = read_place(path, query)
        try:
            kernel = int(data["points"][0]["customdata"][0])  # type: ignore[index]
            start, end = kernel_span(context.bundle(place), context.variant(place), kernel)
        except (KeyError, IndexError, TypeError, ValueError, WorkbenchError):
            return no_update
        room = 10 * (end - start)
        return place.at(start - room, end + room, kernel).href

    app.callback(
        Output("goto", "href", allow_duplicate=True),
        Input("roofline-graph", "clickData"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )(click)


def _table(found: Roofline) -> Table:
    best = max((roof.bandwidth.value for roof in found.roofs if roof.name == "measured"), default=0.0)
    rows = tuple(
        (
            Cell(visible(point.name, 80), note=f"{point.kind}, {point.run_pass} pass, {point.calls:,} times"),
            Cell(significant(point.total_ns / 1e6)),
            Cell(byte_text(point.bytes_per_call.value), point.bytes_per_call.tag),
            Cell(significant(point.achieved.value), point.achieved.tag, point.verdict()),
            Cell(percent(point.achieved.value / best) if best else "not known"),
            Cell(byte_text(point.bytes_per_token.value) if point.bytes_per_token else "not known"),
        )
        for point in found.points[:ROWS]
    )
    columns = (
        Column("What"),
        Column("Time", "ms in all", numeric=True),
        Column("Bytes each", numeric=True),
        Column("Achieved", "GB/s", numeric=True),
        Column("Of the measured roof", numeric=True),
        Column("Bytes per accepted token", numeric=True),
    )
    rest = f" The {ROWS} longest of {len(found.points):,}." if len(found.points) > ROWS else ""
    return Table(f"1 GB/s is 1e9 bytes per second.{rest}", columns, (Group(rows),), phone="cards")

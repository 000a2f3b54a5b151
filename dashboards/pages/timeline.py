"""The timeline: every signal of one variant on one axis, from the whole run to nanoseconds.

The window is in the URL; a zoom in the figure writes it there, and whatever the URL says is drawn. Nothing is kept
between two requests.
"""

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from workbench.dashboards.context import Browser, Children, Context, read_browser
from workbench.dashboards.parts import heading, message, pills, section, themed, variant_pills
from workbench.dashboards.place import PageName, Place, read_place
from workbench.dashboards.timeline_figure import duration_text, timeline_figure
from workbench.errors import WorkbenchError
from workbench.reports.labels import visible
from workbench.reports.plotly_config import CONFIG
from workbench.timeline.kernel_rows import kernel_span
from workbench.timeline.tracks import Timeline
from workbench.timeline.window import clamp, look

NAME: PageName = "timeline"
TITLE = "Timeline"
PIXELS_PER_BIN = 1.5
LEGEND = (
    "Where a row holds few spans they are drawn one by one; where it holds many, each bin shows the share of time in "
    "which any ran. Gaps show their longest in each bin at its full length, so none is lost by zooming out; counters "
    "show least and greatest. Steps: green clean, blue sampled, violet laned, orange traced. Drag across to zoom, "
    "double-click for the whole run, click a span to point at it."
)


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the page; the figure and the line of windows above it are filled by the callback."""
    chosen = context.variant(place)
    timeline = context.catalogue.timeline(place.run, chosen)
    parts: Children = [heading(f"Timeline of {visible(chosen, 60)}")]
    parts += variant_pills(place, context.catalogue.run(place.run).variants, chosen)
    parts += [message(visible(text, 300)) for text in timeline.left_out]
    config: Any = CONFIG | {"doubleClick": "autosize", "displayModeBar": False}
    figure = dcc.Graph(id="timeline-graph", config=config, style={"height": "600px"})
    parts.append(section("", [html.Div(id="timeline-tools"), figure, html.P(LEGEND, className="caption")]))
    return parts


def register(app: Dash, context: Context) -> None:
    """Draw what the URL says; write a zoom and a click into the URL."""

    def draw(query: str, data: Any, path: str) -> tuple[object, object, object]:
        place = read_place(path, query)
        if place.page != NAME:
            return no_update, no_update, no_update
        browser = read_browser(data)
        try:
            timeline = context.catalogue.timeline(place.run, context.variant(place))
            start, end = clamp(timeline, place.start_ns, place.end_ns)
            window = look(timeline, start, end, round(min(browser.width, 1400) / PIXELS_PER_BIN))
            pointed = None
            if place.kernel is not None:
                pointed = kernel_span(context.bundle(place), timeline.variant, place.kernel)
        except WorkbenchError as error:
            return no_update, [message(visible(context.said(error), 300))], no_update
        figure = timeline_figure(timeline, window, pointed)
        # On a phone the page must scroll when a finger lands on the figure.
        figure["layout"]["dragmode"] = False if browser.narrow else "zoom"
        height = {"height": f"{figure['layout']['height']}px"}
        return themed(figure, browser), _tools(timeline, place, start, end), height

    def zoom(moved: Any, path: str, query: str) -> object:
        place = read_place(path, query)
        window = read_zoom(moved)
        if place.page != NAME or window is None:
            return no_update
        try:
            timeline = context.catalogue.timeline(place.run, context.variant(place))
        except WorkbenchError:
            return no_update
        if window == (None, None):
            return place.at(None, None, place.kernel).href
        first, last = window
        zero = timeline.start_ns
        return place.at(*clamp(timeline, zero + (first or 0), zero + (last or 0)), place.kernel).href

    def click(data: Any, path: str, query: str) -> object:
        place = read_place(path, query)
        try:
            table, key = data["points"][0]["customdata"]
            if table != "kernels":
                return no_update
            return place.at(place.start_ns, place.end_ns, int(key)).href
        except (KeyError, IndexError, TypeError, ValueError):
            return no_update

    url = (State("url", "pathname"), State("url", "search"))
    app.callback(
        Output("timeline-graph", "figure"),
        Output("timeline-tools", "children"),
        Output("timeline-graph", "style"),
        Input("url", "search"),
        Input("browser", "data"),
        State("url", "pathname"),
    )(draw)
    goto = Output("goto", "href", allow_duplicate=True)
    app.callback(goto, Input("timeline-graph", "relayoutData"), *url, prevent_initial_call=True)(zoom)
    app.callback(goto, Input("timeline-graph", "clickData"), *url, prevent_initial_call=True)(click)


def read_zoom(moved: Any) -> tuple[int, int] | tuple[None, None] | None:
    """Return the window of a plotly relayout event, ns since the run began; two Nones: the whole run; else None."""
    if not isinstance(moved, dict):
        return None
    if moved.get("xaxis.autorange"):
        return None, None
    first, last = moved.get("xaxis.range[0]"), moved.get("xaxis.range[1]")
    if not isinstance(first, int | float) or not isinstance(last, int | float) or not abs(first) + abs(last) < 2**62:
        return None
    return round(min(first, last)), round(max(first, last))


def _tools(timeline: Timeline, place: Place, start: int, end: int) -> list[Component]:
    width = end - start
    whole = (start, end) == (timeline.start_ns, timeline.end_ns)

    def window(first: int, last: int) -> Place:
        return place.at(*clamp(timeline, first, last), place.kernel)

    moves = [
        ("whole run", place.at(None, None, place.kernel), whole),
        ("◀ earlier", window(start - width // 2, end - width // 2), False),
        ("later ▶", window(start + width // 2, end + width // 2), False),
        ("+ zoom in", window(start + width * 3 // 8, end - width * 3 // 8), False),
        ("− zoom out", window(start - 3 * width // 2, end + 3 * width // 2), False),
    ]
    spots = [(name, window(*span), (start, end) == span) for name, span in timeline.moments.items()]
    spots += [(f"{name} pass", window(*span), (start, end) == span) for name, span in timeline.passes.items()]
    shown = f"{duration_text(width)} of {duration_text(timeline.end_ns - timeline.start_ns)}"
    return [html.Div([pills(shown, moves), pills("go to", spots)], className="timeline-tools")]

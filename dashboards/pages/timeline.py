"""The timeline: every signal of one variant on one axis, from the whole run to nanoseconds.

The window is in the URL; a zoom in the figure writes it there, and whatever the URL says is drawn. At the median and
the worst step the picture of the report comes first: it has the signals of the other passes, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from workbench.dashboards.context import Browser, Children, Context, read_browser
from workbench.dashboards.parts import heading, message, pills, section, themed, variant_pills
from workbench.dashboards.place import PageName, Place, read_place
from workbench.dashboards.step_view import StepView
from workbench.dashboards.timeline_figure import timeline_figure
from workbench.dashboards.timeline_rows import duration_text
from workbench.errors import WorkbenchError
from workbench.reports.labels import visible
from workbench.reports.plotly_config import CONFIG
from workbench.timeline.kernel_rows import kernel_span
from workbench.timeline.shown import Shown, choose
from workbench.timeline.tracks import Timeline
from workbench.timeline.window import clamp

NAME: PageName = "timeline"
TITLE = "Timeline"
PIXELS_PER_BIN, FRAME_PIXELS = 1.5, 100
LEGEND = (
    "Where a row holds few spans they are drawn one by one; where it holds many, each bin shows the share of time in "
    "which any ran. Gaps, between kernels of consecutive steps of one sequence, show their longest in each bin at its "
    "full length, so none is lost by zooming out; counters show least and greatest. Steps: green clean, blue sampled, "
    "violet laned, orange traced. Drag across to zoom, double-click for the whole run, click a span to point at it."
)
MAX_NAMED = 12


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the page; the figure and the line of windows above it are filled by the callback."""
    chosen = context.variant(place)
    timeline = context.catalogue.timeline(place.run, chosen)
    parts: Children = [heading(f"Timeline of {visible(chosen, 60)}")]
    parts += variant_pills(place, context.catalogue.run(place.run).variants, chosen)
    parts += [message(visible(text, 300)) for text in timeline.left_out]
    config: Any = CONFIG | {"doubleClick": "autosize", "displayModeBar": False}
    figure = dcc.Graph(id="timeline-graph", config=config, style={"height": "600px"})
    notes = html.Div(id="timeline-notes")
    rows = [html.Div(id="timeline-tools"), html.Div(id="timeline-step"), figure, notes]
    parts.append(section("", [*rows, html.P(LEGEND, className="caption")]))
    return parts


def register(app: Dash, context: Context) -> None:
    """Draw what the URL says; write a zoom and a click into the URL."""

    steps = StepView(context)

    def draw(query: str, data: Any, path: str) -> tuple[object, ...]:
        place = read_place(path, query)
        if place.page != NAME:
            return (no_update,) * 5
        browser = read_browser(data)
        try:
            timeline = context.catalogue.timeline(place.run, context.variant(place))
            start, end = clamp(timeline, place.start_ns, place.end_ns)
            bins = round(min(browser.width, 1400) / PIXELS_PER_BIN)
            shown = choose(timeline, start, end, bins, every=place.counters == "all")
            moment = next((name for name, span in timeline.moments.items() if span == (start, end)), "")
            step = steps.view(place, timeline.variant, moment, browser) if moment else []
            pointed = None
            if place.kernel is not None:
                pointed = kernel_span(context.bundle(place), timeline.variant, place.kernel)
        except WorkbenchError as error:
            return no_update, [message(visible(context.said(error), 300))], no_update, [], []
        figure = timeline_figure(timeline, shown.window, pointed, min(browser.width, 1400) - FRAME_PIXELS)
        # On a phone the page must scroll when a finger lands on the figure.
        figure["layout"]["dragmode"] = False if browser.narrow else "zoom"
        height = {"height": f"{figure['layout']['height']}px"}
        if step:
            step.append(html.H2("The same step as recorded"))
        return themed(figure, browser), _tools(timeline, place, start, end), height, step, _notes(shown)

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
        Output("timeline-step", "children"),
        Output("timeline-notes", "children"),
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
    counters = [
        ("main", replace(place, counters="main"), place.counters == "main"),
        ("all counters", replace(place, counters="all"), place.counters == "all"),
    ]
    lasted = f"{duration_text(width)} of {duration_text(timeline.end_ns - timeline.start_ns)}"
    within = next((band for band in timeline.bands if band.start_ns <= start and end <= band.end_ns), None)
    lasted += f", {within.run_pass} pass" if within else ""
    made = [pills(lasted, moves), pills("go to", spots), pills("counters", counters)]
    said: list[Component] = []
    ran = sum(band.end_ns - band.start_ns for band in timeline.bands)
    if whole and 0 < ran < (timeline.end_ns - timeline.start_ns) / 2:
        text = (
            f"Steps ran for {duration_text(ran)} of this time, in the bands that are named; other variants ran in "
            "between, and instruments were set up. The links lead to each pass."
        )
        said.append(html.P(text, className="caption"))
    return [html.Div(made, className="timeline-tools"), *said]


def _notes(shown: Shown) -> list[Component]:
    """Return a line for each reason why a track has no row."""
    reasons = (
        ("Nothing in this window", shown.elsewhere),
        ("Never set", shown.never_set),
        ("Never rose", shown.never_rose),
        ("More counters, drawn by “all counters”", shown.folded),
    )
    return [html.P([f"{why}: ", html.Bdi(_listed(labels))], className="caption") for why, labels in reasons if labels]


def _listed(labels: Sequence[str]) -> str:
    more = f"; and {len(labels) - MAX_NAMED} more" if len(labels) > MAX_NAMED else ""
    return "; ".join(visible(label, 60) for label in labels[:MAX_NAMED]) + more

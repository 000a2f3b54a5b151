"""How each scenario's speed went from run to run, and where its level changed."""

import time
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from workbench.dashboards.context import Browser, Children, Context, read_browser
from workbench.dashboards.parts import graph, heading, link, message, pills, section
from workbench.dashboards.place import PageName, Place, read_place
from workbench.diagnose.numbers import significant
from workbench.errors import WorkbenchError
from workbench.reports.labels import figure_labels, figure_text, visible
from workbench.reports.palette import CAUSES, variant_colour
from workbench.runs.changes import LEVEL, MIN_CHANGE, MIN_SIDE
from workbench.runs.history import Series, history

NAME: PageName = "history"
TITLE = "History"
MAX_RUNS = 400
PATIENCE_S = 2.0
METHOD = (
    f"A line marks a change of level: binary segmentation, Welch's t on log tok/s with at least {MIN_SIDE} runs a "
    f"side, corrected for the splits tried and by Holm, at {LEVEL:.0%}, and no change below {MIN_CHANGE:.0%}. Runs of "
    "one machine are correlated, so this says where to look; workbench gate decides."
)


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the page; runs that nobody diagnosed yet are added as they are."""
    shown, waiting = _contents(context, place, browser)
    return [
        html.Div(shown, id="history"),
        dcc.Interval(id="history-tick", interval=2500, max_intervals=1000, disabled=not waiting),
    ]


def register(app: Dash, context: Context) -> None:
    """Add what took longer than one request."""

    def more(_: int | None, path: str, query: str, data: Any) -> tuple[object, object]:
        place = read_place(path, query)
        if place.page != NAME:
            return no_update, no_update
        shown, waiting = _contents(context, place, read_browser(data))
        return shown, not waiting

    app.callback(
        Output("history", "children"),
        Output("history-tick", "disabled"),
        Input("history-tick", "n_intervals"),
        State("url", "pathname"),
        State("url", "search"),
        State("browser", "data"),
        prevent_initial_call=True,
    )(more)


def _contents(context: Context, place: Place, browser: Browser) -> tuple[Children, bool]:
    """Return one figure a scenario and device, and whether runs are missing still."""
    entries = [entry for entry in context.catalogue.runs() if entry.state in ("sealed", "salvaged", "failed")]
    scenarios = sorted({entry.scenario for entry in entries})
    parts: Children = [heading("History")]
    chosen = place.scenario if place.scenario in scenarios else ""
    if len(scenarios) > 1:
        choices = [("all", place.to(NAME, scenario=""), not chosen)]
        choices += [
            (visible(one, 40) or "unnamed", place.to(NAME, scenario=one), one == chosen) for one in scenarios[:30]
        ]
        parts.append(pills("scenario", choices))
    diagnosed = []
    deadline = time.monotonic() + PATIENCE_S
    wanted = [entry for entry in entries if not chosen or entry.scenario == chosen][:MAX_RUNS]
    waiting = 0
    for entry in wanted:
        if time.monotonic() > deadline and context.catalogue.diagnosed(entry) is None:
            waiting += 1
            continue
        try:
            diagnosed.append((entry, context.catalogue.diagnosis(entry.id)))
        except WorkbenchError:
            continue  # the list of runs says why
    grouped: dict[tuple[str, str], list[Series]] = {}
    for series in history(diagnosed):
        grouped.setdefault((series.scenario, series.device), []).append(series)
    if waiting:
        parts.append(message(f"Reading: {waiting} of {len(wanted)} runs are not in yet.", "muted"))
    elif not grouped:
        parts.append(message("No run with an answer yet.", "muted"))
    for (scenario, device), rows in grouped.items():
        title = f"{visible(scenario, 60) or 'unnamed'} on {visible(device, 40)}"
        parts.append(section(title, [graph(history_figure(rows), browser), *_changes(rows, place)]))
    parts.append(html.P(METHOD, className="caption"))
    return parts, waiting > 0


def _changes(rows: list[Series], place: Place) -> Children:
    items = []
    for series in rows:
        for change in series.changes:
            run = series.points[change.index].run
            text = f"{visible(series.variant, 40)}: {change.ratio - 1:+.1%} from "
            items.append(html.Li([html.Bdi(text), link(visible(run.name, 60), place.to("overview", run=run.id))]))
    return [html.Ul(items)] if items else [html.P("No change of level.", className="muted")]


def history_figure(rows: list[Series]) -> dict[str, Any]:
    """Return tok/s over time, a line a variant, marked where its level changed."""
    data: list[dict[str, Any]] = []
    shapes = []
    for index, (series, label) in enumerate(zip(rows, figure_labels([one.variant for one in rows]), strict=True)):
        when = [point.run.created.removesuffix("+00:00") for point in series.points]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label,
                "x": when,
                "y": [point.tok_s for point in series.points],
                "line": {"color": variant_colour(index), "width": 1.5},
                "marker": {"size": 7},
                "hovertext": [
                    f"{label}<br>{significant(point.tok_s)} tok/s<br>"
                    f"accept length {significant(point.accept_length, 3)}<br>{figure_text(visible(point.run.name, 60))}"
                    for point in series.points
                ],
                "hoverinfo": "text",
            }
        )
        shapes += [
            {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": when[change.index],
                "x1": when[change.index],
                "y0": 0,
                "y1": 1,
                "line": {"color": CAUSES["cpu-sync"], "width": 1.5, "dash": "dash"},
            }
            for change in series.changes
        ]
    layout = {
        "height": 340,
        "dragmode": False,
        "shapes": shapes,
        "xaxis": {"type": "date"},
        "yaxis": {"title": {"text": "tok/s"}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}

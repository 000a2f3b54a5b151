"""A run as it goes: asked once a second of what its writer has flushed; and, where allowed, a button to start one."""

from typing import Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from workbench.dashboards.context import Browser, Children, Context, read_browser
from workbench.dashboards.parts import graph, heading, link, message, quantity, section, table
from workbench.dashboards.place import PageName, Place, read_place
from workbench.diagnose.numbers import significant
from workbench.errors import WorkbenchError
from workbench.reports.labels import visible
from workbench.reports.palette import VARIANTS
from workbench.reports.table import Cell, Column, Group, Table, number
from workbench.runs.live import Live, live_view

NAME: PageName = "live"
TITLE = "Live"


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the page; its contents are renewed every second while it is looked at."""
    return [
        html.Div(_contents(context, place, browser), id="live"),
        dcc.Interval(id="tick", interval=1000),
        *_start(context),
    ]


def register(app: Dash, context: Context) -> None:
    """Renew the page; start a scenario where that is allowed."""

    def renew(_: int, path: str, query: str, data: Any) -> object:
        place = read_place(path, query)
        return _contents(context, place, read_browser(data)) if place.page == NAME else no_update

    app.callback(
        Output("live", "children"),
        Input("tick", "n_intervals"),
        State("url", "pathname"),
        State("url", "search"),
        State("browser", "data"),
        prevent_initial_call=True,
    )(renew)
    start_run = context.start_run
    if start_run is None:
        return

    def start(clicks: list[int | None]) -> tuple[object, object]:
        if not any(clicks) or not isinstance(ctx.triggered_id, dict):
            return no_update, no_update
        try:
            folder = start_run(str(ctx.triggered_id["scenario"]))
        except WorkbenchError as error:
            return no_update, [message(visible(context.said(error), 300))]
        for entry in context.catalogue.runs():
            if entry.folder == folder:
                return Place("live", run=entry.id).href, ""
        return no_update, [message(f"{folder.name} is being started: it appears here when it writes.", "muted")]

    app.callback(
        Output("goto", "href", allow_duplicate=True),
        Output("start-says", "children"),
        Input({"role": "start", "scenario": ALL}, "n_clicks"),
        prevent_initial_call=True,
    )(start)


def _start(context: Context) -> Children:
    if context.start_run is None:
        return []
    from workbench.scenario import scenario_names

    buttons = [
        html.Button(name, id={"role": "start", "scenario": name}, className="start pill") for name in scenario_names()
    ]
    text = "Starts the scenario on this machine, one at a time."
    return [section("Start a scenario", [html.Div(buttons, className="pills"), html.Div(id="start-says")], text)]


def _contents(context: Context, place: Place, browser: Browser) -> Children:
    if not place.run:
        going = [entry for entry in context.catalogue.runs() if entry.state == "open"]
        if not going:
            return [heading("Live"), message("No run is being written below this folder.", "muted")]
        items = [html.Li(link(visible(entry.name, 80), place.to(NAME, run=entry.id))) for entry in going]
        return [heading("Live"), section("Being written", [html.Ul(items)])]
    try:
        entry = context.catalogue.run(place.run)
        live = live_view(entry)
    except WorkbenchError as error:
        return [heading("Live"), message(visible(context.said(error), 300))]
    if live.state != "open":
        ended = f"This run has ended: {live.state}. {visible(live.note, 300)}"
        return [heading(visible(entry.name, 80)), message(ended, "muted"), link("Overview", place.to("overview"))]
    parts: Children = [heading(f"{visible(entry.name, 80)}: {'running' if live.running else 'cut off'}")]
    parts += [message(visible(live.note, 300))] if live.note else []
    if not live.passes:
        return [*parts, message("No step so far: building the model or measuring the roof.", "muted")]
    newest = live.passes[0]
    numbers: list[tuple[str, Children]] = [
        ("now", [html.Span(f"{visible(newest.variant, 30)}, {newest.run_pass}")]),
        ("last 5 s", quantity(newest.recent_tok_s, 3)),
        ("so far", quantity(newest.tok_s, 3)),
        ("median step", quantity(newest.step_p50, 3)),
    ]
    parts.append(html.Dl([html.Div([html.Dt(name), html.Dd(value)]) for name, value in numbers], className="numbers"))
    parts.append(section("Newest steps", [graph(live_figure(live), browser, "live-graph")]))
    parts.append(section("So far", table(_table(live))))
    if live.counters:
        rows = tuple(
            (
                Cell(visible(one.name, 60), note=visible(one.source, 30)),
                Cell(f"{significant(one.value)} {visible(one.unit, 20)}"),
            )
            for one in live.counters
        )
        columns = (Column("Counter"), Column("Newest", numeric=True))
        parts.append(section("Counters", table(Table("", columns, (Group(rows),)))))
    return parts


def _table(live: Live) -> Table:
    rows = tuple(
        (
            Cell(visible(one.variant, 60), note=one.run_pass),
            Cell(f"{one.steps:,}"),
            Cell(f"{one.tokens:,}" if one.tokens is not None else "not known"),
            number(one.tok_s, 3),
            number(one.step_p50, 3),
        )
        for one in live.passes
    )
    columns = (
        Column("Variant"),
        Column("Steps", numeric=True),
        Column("Tokens", numeric=True),
        Column("Speed", "tok/s", numeric=True),
        Column("Step, p50", "ms", numeric=True),
    )
    return Table("What is flushed so far, at most a second old; warm-up steps left out.", columns, (Group(rows),))


def live_figure(live: Live) -> dict[str, Any]:
    """Return the newest steps: duration over time."""
    when, wall = live.recent
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": when,
        "y": wall,
        "marker": {"size": 5, "color": VARIANTS[0]},
        "hovertemplate": "%{y:.3f} ms, %{x:.2f} s<extra></extra>",
    }
    layout = {
        "height": 280,
        "dragmode": False,
        "xaxis": {"title": {"text": "s before the newest step"}},
        "yaxis": {"title": {"text": "step time (ms)"}, "rangemode": "tozero"},
    }
    return {"data": [trace], "layout": layout}

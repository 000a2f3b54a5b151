"""The Dash application: one layout, a router, and the pages. ``workbench serve`` puts it on a port.

No analysis and no state is here: a page shows what ``workbench.diagnose``, ``workbench.timeline`` and
``workbench.runs`` computed for what the URL says.
"""

import logging
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from flask import Response

from workbench.dashboards.context import Browser, Children, Context, read_browser
from workbench.dashboards.guard import LOOPBACK, Guard, policy
from workbench.dashboards.pages import (
    compare,
    findings,
    history,
    kernels,
    ladder,
    live,
    overview,
    roofline,
    runs,
    speculation,
    timeline,
)
from workbench.dashboards.parts import heading, link, message
from workbench.dashboards.place import PageName, Place, read_place
from workbench.errors import WorkbenchError
from workbench.reports import palette
from workbench.reports.labels import visible

PAGES: tuple[Any, ...] = (
    runs,
    history,
    live,
    overview,
    roofline,
    timeline,
    kernels,
    speculation,
    findings,
    ladder,
    compare,
)
"""Every page, in the order of the navigation; each is a ``context.Page``."""

OF_ALL_RUNS: tuple[PageName, ...] = ("runs", "history", "live")
_LOG = logging.getLogger(__name__)

INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/report.css">
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


def create_app(context: Context) -> Dash:
    """Return the application over ``context``. It is safe to show to others only behind ``guarded``."""
    app = Dash(
        "workbench",
        title="Decode workbench",
        update_title="",
        assets_folder=str(Path(__file__).resolve().parent / "assets"),
        assets_external_path="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        index_string=INDEX,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
        requests_pathname_prefix="/",
        routes_pathname_prefix="/",
        use_pages=False,
        add_log_handler=False,
        enable_mcp=False,
    )
    app.layout = _layout
    style = _report_style()
    app.server.add_url_rule("/report.css", "report_css", lambda: Response(style, mimetype="text/css"))
    _register(app, context)
    for page in PAGES:
        page.register(app, context)
    return app


def guarded(app: Dash, *, token: str = "", hosts: Collection[str] = ()) -> Guard:
    """Return ``app`` as a WSGI application behind its guard. ``hosts``: names allowed beside the loopback's."""
    return Guard(app.server, hosts=LOOPBACK | set(hosts), policy=policy(app.csp_hashes()), token=token)


def _layout() -> Component:
    return html.Div(
        [
            # Read with one, written with the other: a location bound both ways fires twice (plotly/dash#1049).
            dcc.Location(id="url", refresh=False),
            dcc.Location(id="goto", refresh="callback-nav"),
            dcc.Store(id="browser"),
            dcc.Store(id="shown"),
            html.A("Skip to content", href="#page", className="skip"),
            html.Header(id="header"),
            html.Main(id="page", tabIndex=-1),
        ]
    )


def _register(app: Dash, context: Context) -> None:
    def show(path: str, query: str, data: Any, shown: str | None) -> tuple[object, object, object]:
        if data is None:  # the browser has not described itself yet
            return no_update, no_update, no_update
        place, browser = read_place(path, query), read_browser(data)
        # A new window or new search words redraw a part of their page, by that page's own callback.
        key = f"{browser}{place.to(place.page, text='').href}"
        if key == shown:
            return header(context, place), no_update, no_update
        return header(context, place), contents(context, place, browser), key

    clientside: Any = app.clientside_callback  # untyped in dash
    clientside(
        ClientsideFunction("workbench", "browser"),
        Output("browser", "data"),
        Input("url", "pathname"),
        State("browser", "data"),
    )
    app.callback(
        Output("header", "children"),
        Output("page", "children"),
        Output("shown", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("browser", "data"),
        State("shown", "data"),
    )(show)


def contents(context: Context, place: Place, browser: Browser) -> Children:
    """Return the page of ``place``, or one line that says why there is none."""
    page = next(page for page in PAGES if place.page == page.NAME)
    if place.page not in OF_ALL_RUNS and not place.run:
        return [heading(page.TITLE), message("Choose a run first.", "muted"), link("List of runs", place.to("runs"))]
    try:
        made: Children = page.render(context, place, browser)
    except WorkbenchError as error:
        return [heading(page.TITLE), message(visible(context.said(error), 500))]
    except Exception:  # one page must not take the others down; the reason is for whoever runs the server
        _LOG.exception("page %s failed", place.page)
        return [heading(page.TITLE), message("internal error: the server's log has the traceback")]
    return made


def header(context: Context, place: Place) -> Children:
    """Return the navigation: over all runs, then of the chosen run."""
    top = [_tab(page, place) for page in PAGES if page.NAME in OF_ALL_RUNS]
    brand = link("Decode workbench", Place(baseline=place.baseline), kind="brand")
    bar: Children = [html.Div([brand, html.Nav(top)], className="bar")]
    where: Children = []
    if place.run:
        name, state = _named(context, place.run)
        where.append(html.Span([html.Bdi(name), state], className="run"))
        where.append(html.Nav([_tab(page, place) for page in PAGES if page.NAME not in OF_ALL_RUNS]))
    if place.baseline:
        name, _ = _named(context, place.baseline)
        where.append(html.Span(["baseline: ", html.Bdi(name)], className="pinned"))
    return [*bar, html.Div(where, className="where")] if where else bar


def _tab(page: Any, place: Place) -> Component:
    there = place.to(page.NAME)
    if page.NAME in OF_ALL_RUNS:
        there = place.to(page.NAME, run="", variant="")
    return link(page.TITLE, there, kind="here" if place.page == page.NAME else "")


def _named(context: Context, run_id: str) -> tuple[str, str]:
    try:
        entry = context.catalogue.run(run_id)
    except WorkbenchError:
        return "unknown run", ""
    return visible(entry.name, 60), "" if entry.state == "sealed" else f" ({entry.state})"


def _report_style() -> str:
    """Return the report's style sheet, so that both faces look alike."""
    from jinja2 import Environment

    text = (files("workbench") / "reports" / "templates" / "style.css.j2").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(text).render(causes=palette.CAUSES)

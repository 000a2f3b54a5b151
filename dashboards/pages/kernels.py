"""Kernels as a table, sorted and filtered by the server; a click leads to the timeline at that kernel."""

from typing import Any

import dash_ag_grid
from dash import Dash, Input, Output, State, html, no_update

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import heading, message, pills, section, variant_pills
from workbench.dashboards.place import PageName, Place, read_place
from workbench.errors import WorkbenchError
from workbench.reports.labels import visible
from workbench.timeline.kernel_rows import EXECUTION_COLUMNS, NAME_COLUMNS, TEXT, kernel_span

NAME: PageName = "kernels"
TITLE = "Kernels"
PAGE_ROWS = 100

TITLES = {
    "name": "kernel",
    "total_ms": "total (ms)",
    "share": "share",
    "mean_us": "mean (µs)",
    "shortest_us": "shortest (µs)",
    "longest_us": "longest (µs)",
    "ctas": "CTAs",
    "local_bytes": "local bytes per thread",
    "spill_bytes": "spill bytes",
    "occupancy_limit": "occupancy limit",
    "kernel_id": "id",
    "start_ms": "start (ms)",
    "duration_us": "duration (µs)",
    "step_id": "step",
}
SHARES = frozenset({"share", "occupancy_limit"})
DECIMALS = frozenset({"total_ms", "mean_us", "shortest_us", "longest_us", "start_ms", "duration_us"})


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the table, empty: the grid asks for its rows itself."""
    bundle = context.bundle(place)
    chosen = context.variant(place)
    parts: Children = [heading(f"Kernels of {visible(chosen, 60)}")]
    parts += variant_pills(place, context.catalogue.run(place.run).variants, chosen)
    if not bundle.rows("kernels"):
        why = bundle.query("SELECT DISTINCT why FROM limits WHERE what ILIKE '%kernel%'").column("why").to_pylist()
        reason = f": {visible(why[0], 200)}" if why else ""
        return [*parts, message(f"This run recorded no kernel{reason}.")]
    choices = [
        ("by name", place.to(NAME, by="name"), place.by == "name"),
        ("every execution", place.to(NAME, by="execution"), place.by == "execution"),
    ]
    columns = NAME_COLUMNS if place.by == "name" else EXECUTION_COLUMNS
    grid = dash_ag_grid.AgGrid(
        id="kernel-grid",
        rowModelType="infinite",
        columnDefs=[_column(name, browser) for name in columns],
        defaultColDef={"sortable": True, "resizable": True, "filter": True, "floatingFilter": not browser.narrow},
        dashGridOptions={
            "rowBuffer": 20,
            "cacheBlockSize": PAGE_ROWS,
            "maxBlocksInCache": 20,
            "infiniteInitialRowCount": 1,
        },
        columnSize=None,
        getRowId="params.data.row",
        style={"height": "620px"},
    )
    says = html.Div(id="kernel-says")
    intro = (
        "Times are of the traced pass. Sorting and filtering are done by the server over all rows. A click leads to "
        "the timeline: to the longest execution of a name, or to the execution itself."
    )
    return [*parts, pills("rows", choices), section("", [html.P(intro), says, html.Div(grid, className="grid")])]


def register(app: Dash, context: Context) -> None:
    """Answer the grid's requests, and lead a click to the timeline."""

    def rows(request: Any, path: str, query: str) -> tuple[object, object]:
        place = read_place(path, query)
        if not isinstance(request, dict) or place.page != NAME:
            return no_update, no_update
        try:
            sort = [(str(one["colId"]), one["sort"]) for one in request.get("sortModel") or []]
            page = context.catalogue.kernels(place.run, context.variant(place)).page(
                place.by,
                int(request["startRow"]),
                int(request["endRow"]),
                sort,
                request.get("filterModel") or {},
            )
        except WorkbenchError as error:
            return {"rowData": [], "rowCount": 0}, [message(visible(context.said(error), 300))]
        except (KeyError, TypeError, ValueError):
            return {"rowData": [], "rowCount": 0}, [message("The table asked for rows in a way that is not known.")]
        return {"rowData": [_shown(row) for row in page.rows], "rowCount": page.total}, []

    def click(cell: Any, request: Any, path: str, query: str) -> object:
        place = read_place(path, query)
        try:
            kernel = int(cell["rowId"] if "rowId" in cell else cell["value"])
            start, end = kernel_span(context.bundle(place), context.variant(place), kernel)
        except (KeyError, TypeError, ValueError, WorkbenchError):
            return no_update
        room = max(10 * (end - start), 1000)
        return place.at(start - room, end + room, kernel).href

    url = (State("url", "pathname"), State("url", "search"))
    app.callback(
        Output("kernel-grid", "getRowsResponse"),
        Output("kernel-says", "children"),
        Input("kernel-grid", "getRowsRequest"),
        *url,
    )(rows)
    app.callback(
        Output("goto", "href", allow_duplicate=True),
        Input("kernel-grid", "cellClicked"),
        State("kernel-grid", "getRowsRequest"),
        *url,
        prevent_initial_call=True,
    )(click)


def _column(name: str, browser: Browser) -> dict[str, Any]:
    column: dict[str, Any] = {
        "field": name,
        "headerName": TITLES.get(name, name),
        "filter": "agTextColumnFilter" if name in TEXT else "agNumberColumnFilter",
        "width": 130,
    }
    if name == "name":
        column |= {"width": 200 if browser.narrow else 380}
        column |= {} if browser.narrow else {"pinned": "left"}
    elif name not in TEXT:
        column["type"] = "rightAligned"
    if name in SHARES:
        column["valueFormatter"] = {"function": "params.value == null ? '' : d3.format('.1%')(params.value)"}
    elif name in DECIMALS:
        column["valueFormatter"] = {"function": "params.value == null ? '' : d3.format(',.3f')(params.value)"}
    elif name not in TEXT and name != "kernel_id":
        column["valueFormatter"] = {"function": "params.value == null ? '' : d3.format(',')(params.value)"}
    if name == "share":
        column["headerTooltip"] = "of the summed time of all kernels of the variant"
    return column


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: visible(value, 300) if isinstance(value, str) else value for name, value in row.items()}
    return texts | {"row": str(row["kernel_id"])}  # the grid wants its key as text

"""The list of runs: filters, the pinned baseline, and each run's answer beside it."""

import time
from collections.abc import Sequence
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import heading, link, message, pills, section, tag
from workbench.dashboards.place import PageName, Place, read_place
from workbench.diagnose.headline import fastest
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.summary import Diagnosis
from workbench.errors import WorkbenchError
from workbench.reports.labels import visible
from workbench.runs.catalogue import RunEntry, matching

NAME: PageName = "runs"
TITLE = "Runs"
SHOWN = 200
PATIENCE_S = 1.5
"""Time one answer spends on runs that were not diagnosed before; the page asks again for the rest."""

HEAD = ("Run", "Began (UTC)", "Scenario", "Device", "State", "Fastest variant", "tok/s", "Accept length", "Of the roof")


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the list with its filters."""
    search = dcc.Input(
        id="search",
        type="search",
        value=place.text,
        placeholder="words in name, scenario, variant, device",
        debounce=0.4,
        className="search",
    )
    return [
        heading("Runs"),
        html.Div(search, role="search"),
        html.Div(id="runs-list"),
        dcc.Interval(id="runs-tick", interval=1500, max_intervals=400),
    ]


def register(app: Dash, context: Context) -> None:
    """Search as the reader types; fill in answers that took longer than one request."""

    def search(text: str | None, path: str, query: str) -> object:
        place = read_place(path, query)
        moved = place.to("runs", text=text or "")
        return no_update if place.page != "runs" or moved.text == place.text else moved.href

    def refresh(query: str, ticks: int | None, path: str) -> tuple[object, object]:
        place = read_place(path, query)
        if place.page != NAME:
            return no_update, no_update
        # Always the whole list: an answer that comes late is dropped in favour of the newest request's.
        return _list(context, place), not _waiting(context, place)

    app.callback(
        Output("goto", "href", allow_duplicate=True),
        Input("search", "value"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )(search)
    app.callback(
        Output("runs-list", "children"),
        Output("runs-tick", "disabled"),
        Input("url", "search"),
        Input("runs-tick", "n_intervals"),
        State("url", "pathname"),
    )(refresh)


def _found(context: Context, place: Place) -> tuple[tuple[RunEntry, ...], tuple[RunEntry, ...]]:
    every = context.catalogue.runs()
    fit = {"text": place.text, "state": place.state, "scenario": place.scenario, "device": place.device}
    return every, matching(every, **fit)


def _waiting(context: Context, place: Place) -> bool:
    _, found = _found(context, place)
    return any(_can_be_diagnosed(entry) and context.catalogue.diagnosed(entry) is None for entry in found[:SHOWN])


def _can_be_diagnosed(entry: RunEntry) -> bool:
    return entry.manifest is not None and entry.state != "open"


def _list(context: Context, place: Place) -> Children:
    every, found = _found(context, place)
    if not every:
        return [message(f"No run below {visible(str(context.catalogue.root), 200)}. Try: workbench run quickstart")]
    parts = _filters(every, place)
    if not found:
        return [*parts, message("No run fits these filters.")]
    deadline = time.monotonic() + PATIENCE_S
    answers = {entry.id: _answer(context, entry, deadline) for entry in found[:SHOWN]}
    base = _baseline(context, place)
    rows = [_row(context, entry, answers[entry.id], place, base) for entry in found[:SHOWN]]
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title in (*HEAD, "")]))
    parts.append(section("", [html.Div(html.Table([head, html.Tbody(rows)], className="cards"), className="scroll")]))
    if len(found) > SHOWN:
        parts.append(message(f"{SHOWN} of {len(found):,} runs are shown: narrow the filters.", "muted"))
    return parts


def _baseline(context: Context, place: Place) -> tuple[RunEntry, float] | None:
    """Return the pinned run and its tok/s; None where none is pinned or it has no answer."""
    if not place.baseline:
        return None
    try:
        return context.catalogue.run(place.baseline), fastest(context.catalogue.diagnosis(place.baseline)).tok_s.value
    except WorkbenchError:
        return None


def _answer(context: Context, entry: RunEntry, deadline: float) -> Diagnosis | WorkbenchError | None:
    if not _can_be_diagnosed(entry):
        return None
    known = context.catalogue.diagnosed(entry)
    if known is not None or time.monotonic() > deadline:
        return known
    try:
        return context.catalogue.diagnosis(entry.id)
    except WorkbenchError as error:
        return error


def _filters(every: Sequence[RunEntry], place: Place) -> Children:
    made: Children = []
    for name, of in (("state", RunEntry.state), ("scenario", RunEntry.scenario), ("device", RunEntry.device)):
        values = sorted({str(of.fget(entry)) for entry in every if of.fget} - {""})  # type: ignore[attr-defined]
        if len(values) > 1:
            chosen = getattr(place, name)
            choices = [("all", place.to("runs", **{name: ""}), not chosen)]
            choices += [(visible(one, 40), place.to("runs", **{name: one}), one == chosen) for one in values[:30]]
            made.append(pills(name, choices))
    return made


def _row(
    context: Context,
    entry: RunEntry,
    answer: Diagnosis | WorkbenchError | None,
    place: Place,
    base: tuple[RunEntry, float] | None,
) -> Component:
    # Another scenario or device is another question: its tok/s is neither better nor worse.
    pinned, speed = base if base else (entry, None)
    alike = entry.id != pinned.id and (entry.scenario, entry.device) == (pinned.scenario, pinned.device)

    page: PageName = "live" if entry.state == "open" else "overview"
    name = link(visible(entry.name, 80), place.to(page, run=entry.id, variant=""))
    cells = [
        html.Td(entry.created.replace("T", " ").removesuffix("+00:00")),
        html.Td(html.Bdi(visible(entry.scenario, 60))),
        html.Td(html.Bdi(visible(entry.device, 40))),
        html.Td(html.Span(entry.state, className=f"state {entry.state}")),
        *_numbers(context, entry, answer, speed if alike else None),
        html.Td(_actions(entry, place), className="actions"),
    ]
    for cell, title in zip(cells[:-1], HEAD[1:], strict=False):
        setattr(cell, "data-title", "" if getattr(cell, "colSpan", None) else title)
    kind = "pinned-row" if entry.id == place.baseline else ""
    return html.Tr([html.Th(name, scope="row"), *cells], className=kind)


def _numbers(
    context: Context, entry: RunEntry, answer: Diagnosis | WorkbenchError | None, base: float | None
) -> list[Component]:
    if entry.error or isinstance(answer, WorkbenchError):
        text = context.said(entry.error or str(answer))
        return [html.Td(html.Bdi(visible(text, 200)), colSpan=4, className="muted")]
    if answer is None:
        text = "running" if entry.state == "open" else "reading …"
        return [html.Td(text, colSpan=4, className="muted")]
    best = fastest(answer)
    speed: list[Any] = [f"{significant(best.tok_s.value)} ", tag(best.tok_s.tag)]
    if base:
        change = best.tok_s.value / base - 1
        kind = "better" if change >= 0 else "worse"
        speed.append(html.Small(f"{change:+.1%} against the baseline", className=kind))
    share = best.roof_share
    return [
        html.Td(html.Bdi(visible(best.name, 40))),
        html.Td(html.Span(speed, className="value"), className="number"),
        html.Td(significant(best.accept_length.value, 3), className="number"),
        html.Td(percent(share.value) if share else "not known", className="number"),
    ]


def _actions(entry: RunEntry, place: Place) -> Children:
    if entry.state in ("open", "damaged"):
        return []
    if entry.id == place.baseline:
        return [link("unpin", place.to("runs", baseline=""))]
    made = [link("pin as baseline", place.to("runs", baseline=entry.id))]
    if place.baseline:
        made.append(link("compare", place.to("compare", run=entry.id, variant="")))
    return made

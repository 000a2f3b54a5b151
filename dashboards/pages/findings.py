"""Findings: what is wrong, on what evidence, what it is worth, and what to try."""

from collections.abc import Sequence

from dash import Dash, html
from dash.development.base_component import Component

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import heading, link, message, quantity, section, tag, variant_pills
from workbench.dashboards.place import PageName, Place
from workbench.diagnose.attached import attached
from workbench.diagnose.finding import Evidence, Finding, ranked
from workbench.diagnose.findings import find
from workbench.diagnose.numbers import significant
from workbench.errors import WorkbenchError
from workbench.reports.labels import visible
from workbench.timeline.kernel_rows import kernel_span
from workbench.trace.bundle import Bundle
from workbench.trace.schema import TABLES

NAME: PageName = "findings"
TITLE = "Findings"
LINKS = 5
ROW_NAMES = {"kernels": "kernel", "steps": "step", "host": "call"}


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the findings of the run, of one variant where the place names it."""
    bundle = context.bundle(place)
    names = context.catalogue.run(place.run).variants
    found = _found(context, place, bundle, names)
    parts: Children = [heading("Findings")]
    if len(names) > 1:
        parts += variant_pills(place, ("", *names), place.variant)
    shown = [one for one in found if place.variant in ("", one.variant)]
    if not shown:
        return [*parts, message("No finding: no detector saw a loss or a doubt it could name.", "muted")]
    return [*parts, section("", [_finding(one, place, bundle) for one in shown])]


def register(app: Dash, context: Context) -> None:
    """The page has no callbacks."""


def _found(context: Context, place: Place, bundle: Bundle, names: Sequence[str]) -> Sequence[Finding]:
    if bundle.manifest.source == "attach":
        return attached(bundle).findings
    if bundle.manifest.source != "run":  # no tok/s without instruments, so no diagnosis, but what is seen can be named
        return ranked([finding for name in names for finding in find(bundle, name)])
    variants = context.catalogue.diagnosis(place.run).variants
    return ranked([finding for variant in variants for finding in variant.findings])


def _finding(one: Finding, place: Place, bundle: Bundle) -> Component:
    worth = [html.P([html.Strong("Worth: "), *quantity(one.recoverable, 3)])] if one.recoverable else []
    where = [html.P([html.Span("at "), html.Code(visible(one.location, 200))])] if one.location else []
    evidence = [html.Li(_evidence(row, one, place, bundle)) for row in one.evidence]
    return html.Div(
        [
            html.H3([html.Span(one.severity, className=f"severity {one.severity}"), html.Bdi(visible(one.title, 120))]),
            html.P(html.Bdi(visible(one.sentence, 800))),
            *worth,
            html.P([html.Strong("Try: "), html.Bdi(visible(one.remedy, 800))]),
            *where,
            html.Details([html.Summary(f"Evidence ({len(evidence)})"), html.Ul(evidence)], open=len(evidence) <= 3),
            html.Small(
                f"{one.page} · variant {visible(one.variant, 60)} · confidence {one.confidence}"
                + (f" · cause {one.cause}" if one.cause else "")
            ),
        ],
        className="finding",
    )


def _evidence(row: Evidence, one: Finding, place: Place, bundle: Bundle) -> Children:
    value = row.quantity
    made: Children = [
        html.Bdi(f"{visible(row.what, 200)}: {significant(value.value)} {visible(value.unit, 30)} "),
        tag(value.tag),
    ]
    for key in row.ids[:LINKS]:
        if span := _span(bundle, one.variant, row.table, key):
            room = max(span[1] - span[0], 1000)
            kernel = key if row.table == "kernels" else None
            there = place.to("timeline", variant=one.variant).at(span[0] - room, span[1] + room, kernel)
            made += [html.Span(" "), link(f"{ROW_NAMES[row.table]} {key}", there)]
    return made


def _span(bundle: Bundle, variant: str, table: str, key: int) -> tuple[int, int] | None:
    """Return start and end of the row that evidence points at; None where it has no time of its own."""
    if table == "kernels":
        try:
            return kernel_span(bundle, variant, key)
        except WorkbenchError:
            return None
    if table not in ROW_NAMES:
        return None
    # Names of the schema, not of the bundle.
    sql = f"SELECT start_ns, end_ns FROM {table} WHERE {TABLES[table].key[0]} = ?"  # noqa: S608
    rows = bundle.query(sql, [key]).to_pylist()
    return (rows[0]["start_ns"], rows[0]["end_ns"]) if rows else None

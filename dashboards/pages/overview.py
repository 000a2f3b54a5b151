"""One run's answer: how fast, how far from the roof, what is in the way; and how far to trust it."""

import math

from dash import Dash, html
from dash.development.base_component import Component

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import heading, link, message, report_section, section, tag
from workbench.dashboards.place import PageName, Place
from workbench.dashboards.trace_overview import trace_overview
from workbench.diagnose.summary import Diagnosis
from workbench.errors import WorkbenchError
from workbench.reports import attached_page, page
from workbench.reports.attached_page import is_attached
from workbench.reports.labels import visible
from workbench.runs.delta import compare_runs
from workbench.trace.bundle import Bundle

NAME: PageName = "overview"
TITLE = "Overview"
ELSEWHERE = frozenset(
    {"acceptance", "comparison", "speculation", "findings", "roofline", "timeline", "kernels", "ladder"}
)
"""Sections of the report that are pages of their own here."""


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the overview of the place's run."""
    bundle = context.bundle(place)
    if is_attached(bundle):
        return _watched(bundle, place, browser)
    if bundle.manifest.source != "run":
        return trace_overview(bundle, place)
    diagnosis = context.catalogue.diagnosis(place.run)
    found = page.gather(bundle, diagnosis)
    parts: Children = [heading(page.answer(diagnosis))]
    parts += [message(text) for text in page.warnings(found)]
    parts += _against_baseline(context, place, diagnosis)
    for one in page.sections(found, ELSEWHERE):
        parts.append(report_section(one, browser))
        if one.id == "causes":
            parts.append(_moments(context, place, bundle))
    return parts


def register(app: Dash, context: Context) -> None:
    """The page has no callbacks."""


def _watched(bundle: Bundle, place: Place, browser: Browser) -> Children:
    """Return the overview of a server that was watched from outside: the report's page, findings apart."""
    watched = attached_page.gather(bundle)
    parts: Children = [heading(attached_page.answer(watched))]
    parts += [message(text) for text in attached_page.warnings(watched)]
    found = [html.Li([f"{one.title}, {one.gain} ", tag(one.tag)]) for one in attached_page.top(watched)]
    parts.append(section("", [*([html.Ul(found)] if found else []), link("All findings", place.to("findings"))]))
    parts += [report_section(one, browser) for one in attached_page.sections(watched) if one.id not in ELSEWHERE]
    return parts


def _against_baseline(context: Context, place: Place, diagnosis: Diagnosis) -> Children:
    if not place.baseline or place.baseline == place.run:
        return []
    try:
        delta = compare_runs(context.catalogue.diagnosis(place.baseline), diagnosis)
    except WorkbenchError as error:
        return [message(f"The baseline cannot be compared with: {visible(context.said(error), 300)}")]
    words = [f"{visible(one.head.name, 40)} {math.expm1(one.log_speed):+.1%}" for one in delta.variants]
    text = f"tok/s against the baseline: {', '.join(words)}. " if words else "The baseline has no variant of this run. "
    return [section("", [text, link("Compare", place.to("compare"))])]


def _moments(context: Context, place: Place, bundle: Bundle) -> Component:
    """Return links to where to look closer."""
    made: Children = []
    for name in context.catalogue.run(place.run).variants:
        made.append(link(f"timeline of {visible(name, 40)}", place.to("timeline", variant=name), kind="pill"))
    return section("Look closer", made)

"""Speculation: how far drafts survive, what a draft token costs, and whether it pays."""

from dash import Dash

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import heading, message, report_section
from workbench.dashboards.place import PageName, Place
from workbench.reports import page

NAME: PageName = "speculation"
TITLE = "Speculation"
SECTIONS = ("acceptance", "comparison", "speculation")
ELSEWHERE = (
    "speed", "roofline", "causes", "timeline", "kernels", "ladder", "findings", "step-times", "bytes", "quality",
    "environment", "limits",
)  # fmt: skip
"""Sections of the report that are not made for this page."""


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return what the report says of speculation."""
    found = page.gather(context.bundle(place), context.catalogue.diagnosis(place.run))
    parts: Children = [heading("Speculation: acceptance, and whether it pays")]
    if not any(variant.positions for variant in found.diagnosis.variants):
        parts.append(message("No variant of this run drafts.", "muted"))
    return parts + [report_section(one, browser) for one in page.sections(found, ELSEWHERE) if one.id in SECTIONS]


def register(app: Dash, context: Context) -> None:
    """The page has no callbacks."""

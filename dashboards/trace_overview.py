"""What can be said of an ingested trace: its verdict first, then busy and idle, steps and gaps as far as it allows."""

from dash import html

from workbench.dashboards.context import Children
from workbench.dashboards.parts import heading, link, message, section, table
from workbench.dashboards.place import Place
from workbench.diagnose.busy import CATEGORIES
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.overview import Overview, overview
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Table
from workbench.trace.bundle import Bundle


def trace_overview(bundle: Bundle, place: Place) -> Children:
    """Return the overview of an ingested ``bundle``."""
    found = overview(bundle)
    parts: Children = [heading(f"Ingested trace of {visible(found.device) or 'an unknown device'}")]
    parts.append(message("Its steps ran with a profiler on, so there is no tok/s to state: times are the traced ones."))
    lines = [visible(line, 400) for line in found.verdict.lines()]
    notes = [visible(text, 300) for text in found.notes]
    said = lines or ["Nothing is wrong with this trace as far as can be told from it."]
    parts.append(section("Verdict", [html.Ul([html.Li(html.Bdi(line)) for line in said])]))
    parts.append(section("How it was read", [html.Ul([html.Li(html.Bdi(note)) for note in notes])]))
    if found.busy:
        parts.append(section("Busy and idle", table(_busy(found))))
    if found.steps:
        parts.append(section("Steps, as traced", table(_steps(found))))
    for cause in found.gaps:
        place_of_gap = place.at(cause.gap.start_ns - cause.gap.ns, cause.gap.end_ns + cause.gap.ns)
        text = visible(cause.sentence(), 600)
        parts.append(section("", [message(text, "plain"), link("See it on the timeline", place_of_gap)]))
    return parts


def _busy(found: Overview) -> Table:
    columns = (
        Column("Device"),
        *(Column(name, "ms", numeric=True) for name in CATEGORIES),
        Column("Busy", "%", numeric=True),
    )
    rows = tuple(
        (
            Cell(str(one.device)),
            *(Cell(significant(ns / 1e6)) for ns in one.by_category),
            Cell(percent(one.busy_ns / one.window_ns) if one.window_ns else "–"),
        )
        for one in found.busy
    )
    return Table("By interval union, first to last activity of any device; measured.", columns, (Group(rows),))


def _steps(found: Overview) -> Table:
    columns = (
        Column("Device"),
        Column("Steps", numeric=True),
        Column("Median", "ms", numeric=True),
        Column("Shortest", "ms", numeric=True),
        Column("Longest", "ms", numeric=True),
    )
    rows = tuple(
        (
            Cell(str(one.device)),
            Cell(f"{one.steps:,}"),
            *(Cell(significant(value.value)) for value in (one.median, one.shortest, one.longest)),
        )
        for one in found.steps
    )
    return Table("With the profiler on; measured.", columns, (Group(rows),))

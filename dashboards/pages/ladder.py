"""The ladder: variants in the order of the scenario, each rung against the one before."""

from dash import Dash, html

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import graph, heading, legend, message, section, table
from workbench.dashboards.place import PageName, Place
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.summary import Diagnosis
from workbench.reports.figures import speed_figure, step_time_figure
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Table

NAME: PageName = "ladder"
TITLE = "Ladder"


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the ladder of the run."""
    diagnosis = context.catalogue.diagnosis(place.run)
    parts: Children = [heading("Ladder: what each rung gained")]
    if len(diagnosis.variants) < 2:
        parts.append(message("This run has one variant: a ladder needs two.", "muted"))
    steps = step_time_figure(diagnosis)
    steps["layout"]["showlegend"] = False
    names = list(dict.fromkeys(cause.name for variant in diagnosis.variants for cause in variant.accounting.causes))
    parts.append(section("Rungs", table(_table(diagnosis))))
    parts.append(section("Speed", [graph(speed_figure(diagnosis), browser, alt="Bars of tok/s by rung.")]))
    drawn = [legend(names), graph(steps, browser, alt="Step time of each rung by cause.")]
    parts.append(section("Step time by cause", [html.Figure(drawn)]))
    return parts


def register(app: Dash, context: Context) -> None:
    """The page has no callbacks."""


def _table(diagnosis: Diagnosis) -> Table:
    rows = []
    before = None
    first = diagnosis.variants[0]
    for variant in diagnosis.variants:
        gain = f"{variant.tok_s.value / before.tok_s.value - 1:+.1%}" if before else "–"
        losses = [cause for cause in variant.accounting.causes if cause.name != "floor" and cause.total_ns]
        largest = max(losses, key=lambda cause: cause.total_ns, default=None)
        rows.append(
            (
                Cell(visible(variant.name, 60), note=f"drafter: {visible(variant.drafter, 40)}"),
                Cell(significant(variant.tok_s.value), variant.tok_s.tag),
                Cell(gain),
                Cell(f"{significant(variant.tok_s.value / first.tok_s.value, 3)}×"),
                Cell(significant(variant.step_p50.value), variant.step_p50.tag),
                Cell(percent(variant.roof_share.value) if variant.roof_share else "not known"),
                Cell(f"{largest.name}, {percent(variant.accounting.share(largest), 2)}" if largest else "none")
                if largest is None
                else Cell(
                    f"{largest.name}, {percent(variant.accounting.share(largest), 2)}", largest.tag, colour=largest.name
                ),
            )
        )
        before = variant
    columns = (
        Column("Rung"),
        Column("Speed", "tok/s", numeric=True),
        Column("Against the rung before", numeric=True),
        Column("Against the first", numeric=True),
        Column("Step, p50", "ms", numeric=True),
        Column("Of the roof", numeric=True),
        Column("Largest loss left"),
    )
    return Table("In the order of the scenario; batch 1, prefill left out.", columns, (Group(tuple(rows)),), "cards")

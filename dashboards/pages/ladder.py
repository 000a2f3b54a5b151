"""The ladder: variants in the order of the scenario, each rung against the one before."""

from dash import Dash, html

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import graph, heading, legend, message, section, table
from workbench.dashboards.place import PageName, Place
from workbench.diagnose.headline import largest_loss
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.reports.figures import speed_figure, step_time_figure
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Table, number

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
    if diagnosis.ladder:
        intro = (
            "What the rung below said its losses were worth, against what the next rung gained by removing them. This "
            "is how far the accounting can be believed."
        )
        parts.append(section("Predicted and measured", table(_predictions(diagnosis)), intro))
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
        rows.append(
            (
                Cell(visible(variant.name, 60), note=f"drafter: {visible(variant.drafter, 40)}"),
                Cell(significant(variant.tok_s.value), variant.tok_s.tag),
                Cell(gain),
                Cell(f"{significant(variant.tok_s.value / first.tok_s.value, 3)}×"),
                Cell(significant(variant.step_p50.value), variant.step_p50.tag),
                Cell(percent(variant.roof_share.value) if variant.roof_share else "not known"),
                _loss(variant),
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


def _loss(variant: VariantSummary) -> Cell:
    largest = largest_loss(variant.accounting)
    if largest is None:
        return Cell("none")
    return Cell(f"{largest.name}, {percent(variant.accounting.share(largest), 2)}", largest.tag, colour=largest.name)


def _predictions(diagnosis: Diagnosis) -> Table:
    rows = tuple(
        (
            Cell(visible(step.higher, 60), note=f"from {visible(step.lower, 60)}"),
            number(step.now),
            number(step.predicted, note=visible(step.why, 160))
            if step.predicted
            else Cell("–", note=visible(step.why, 160)),
            number(step.measured),
            Cell(f"{step.error:+.1%}" if step.error is not None else "–"),
            Cell(", ".join(f"{visible(name, 30)} {ns / 1e3:,.1f} µs" for name, ns in step.removed if ns) or "nothing"),
        )
        for step in diagnosis.ladder
    )
    columns = (
        Column("To rung"),
        Column("Below", "tok/s", numeric=True),
        Column("Predicted", "tok/s", numeric=True),
        Column("Measured", "tok/s", numeric=True),
        Column("Predicted over measured", numeric=True),
        Column("Removed per step"),
    )
    return Table("", columns, (Group(rows),), "cards")

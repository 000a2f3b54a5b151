"""Two runs side by side: the pinned baseline and this run, as a difference."""

import math
from typing import Any

from dash import Dash

from workbench.dashboards.context import Browser, Children, Context
from workbench.dashboards.parts import graph, heading, link, message, section, table
from workbench.dashboards.place import PageName, Place
from workbench.diagnose.numbers import significant
from workbench.reports.figures import BAR_PIXELS
from workbench.reports.labels import figure_labels, figure_text, visible
from workbench.reports.palette import cause_colour
from workbench.reports.table import Cell, Column, Group, Table
from workbench.runs.delta import RunDelta, VariantDelta, compare_runs

NAME: PageName = "compare"
TITLE = "Compare"


def render(context: Context, place: Place, browser: Browser) -> Children:
    """Return the difference between the pinned baseline and the place's run."""
    if not place.baseline:
        text = "No baseline is pinned: pin one in the list of runs, then open another run and compare."
        return [heading("Compare"), message(text, "muted"), link("List of runs", place.to("runs"))]
    base, head = (context.catalogue.run(run) for run in (place.baseline, place.run))
    parts: Children = [heading(f"{visible(head.name, 60)} against {visible(base.name, 60)}")]
    if base.id == head.id:
        return [*parts, message("This is the baseline itself: choose another run.", "muted")]
    found = compare_runs(context.catalogue.diagnosis(base.id), context.catalogue.diagnosis(head.id))
    parts.append(
        message("One launch a side has no estimate of its noise. To decide on a change: workbench gate.", "muted")
    )
    if base.device != head.device:
        parts.append(message(f"Different devices: {visible(base.device, 40)} and {visible(head.device, 40)}."))
    if found.variants:
        parts.append(section("Speed, and through what", table(_table(found))))
        parts.append(section("Step time by cause, difference", [graph(delta_figure(found), browser)]))
        parts += [section(visible(one.head.name, 60), table(_causes(one))) for one in found.variants]
    for names, whose in ((found.only_base, "the baseline"), (found.only_head, "this run")):
        if names:
            parts.append(message(f"Only in {whose}: {', '.join(visible(name, 40) for name in names)}.", "muted"))
    return parts


def register(app: Dash, context: Context) -> None:
    """The page has no callbacks."""


def _table(found: RunDelta) -> Table:
    rows = tuple(
        (
            Cell(visible(one.head.name, 60)),
            Cell(significant(one.base.tok_s.value), one.base.tok_s.tag),
            Cell(significant(one.head.tok_s.value), one.head.tok_s.tag),
            Cell(_change(one.log_speed)),
            Cell(
                _change(one.log_accept), note=f"{one.base.accept_length.value:.2f} → {one.head.accept_length.value:.2f}"
            ),
            Cell(_change(one.log_step), note="a shorter step is above 0"),
        )
        for one in found.variants
    )
    columns = (
        Column("Variant"),
        Column("Baseline", "tok/s", numeric=True),
        Column("This run", "tok/s", numeric=True),
        Column("Change", numeric=True),
        Column("by accept length", numeric=True),
        Column("by step time", numeric=True),
    )
    caption = "The two parts multiply to the change, exactly."
    return Table(caption, columns, (Group(rows),), "cards")


def _change(log: float) -> str:
    return f"{math.expm1(log):+.2%}" if math.isfinite(log) else "not known"


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+' if value > 0 else ''}{significant(abs(value), 3)}"


def _causes(one: VariantDelta) -> Table:
    rows = tuple(
        (
            Cell(cause.name, colour=cause.name),
            Cell(significant(cause.base_ns / 1e6)),
            Cell(significant(cause.head_ns / 1e6)),
            Cell(_signed(cause.change_ns / 1e6)),
        )
        for cause in one.causes
    )
    columns = (
        Column("Cause"),
        Column("Baseline", "ms per step", numeric=True),
        Column("This run", "ms per step", numeric=True),
        Column("Difference", "ms per step", numeric=True),
    )
    return Table("The largest difference first; the differences add up to that of the step.", columns, (Group(rows),))


def delta_figure(found: RunDelta) -> dict[str, Any]:
    """Return one stacked bar a variant: what each cause takes more (right) or less (left) per step, in ms."""
    labels = figure_labels([one.head.name for one in found.variants])
    names = list(dict.fromkeys(cause.name for one in found.variants for cause in one.causes))
    data = []
    for name in names:
        changes = [next((c.change_ns / 1e6 for c in one.causes if c.name == name), 0.0) for one in found.variants]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": figure_text(name),
                "y": list(range(len(labels))),
                "x": changes,
                "marker": {"color": cause_colour(name)},
                "hovertext": [
                    f"{label}: {figure_text(name)}<br>{change:+.4f} ms per step"
                    for label, change in zip(labels, changes, strict=True)
                ],
                "hoverinfo": "text",
            }
        )
    return {
        "data": data,
        "layout": {
            "height": 150 + BAR_PIXELS * len(labels),
            "barmode": "relative",
            "dragmode": False,
            "bargap": 0.3,
            "xaxis": {"title": {"text": "difference (ms per step; right: slower)"}, "zeroline": True},
            "yaxis": {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5]},
        },
    }

"""The ladder: what each rung was predicted to win from the one below it, beside what it won."""

from collections.abc import Sequence
from typing import Any

from workbench.diagnose.ladder import LadderStep
from workbench.diagnose.numbers import significant
from workbench.reports.figures import BAR_PIXELS, Figure
from workbench.reports.labels import figure_labels, figure_text, visible
from workbench.reports.palette import VARIANTS
from workbench.reports.table import Cell, Column, Group, Table, number


def ladder_table(steps: Sequence[LadderStep]) -> Table:
    """Return one row a pair of neighbouring rungs."""
    return Table(
        "Predicted: tok/s of the lower rung with the losses gone that the higher one is there to remove (modelled); "
        "its lower bound removes half of them. The error is the accounting's own, on this machine and in this run.",
        (
            Column("From"),
            Column("To"),
            Column("Before", "tok/s", numeric=True),
            Column("Measured", "tok/s", numeric=True),
            Column("Predicted", "tok/s", numeric=True),
            Column("Error", "%", numeric=True),
            Column("Removed, µs per step", remark=True),
        ),
        (
            Group(
                tuple(
                    (
                        Cell(visible(step.lower)),
                        Cell(visible(step.higher)),
                        number(step.now, 3),
                        number(step.measured, 3),
                        number(step.predicted, 3) if step.predicted else Cell("–"),
                        Cell(f"{100 * step.error:+.1f}" if step.error is not None else "–"),
                        Cell(_removed(step)),
                    )
                    for step in steps
                )
            ),
        ),
        phone="cards",
    )


def _removed(step: LadderStep) -> str:
    if step.predicted is None:
        return f"not predicted: {visible(step.why, 200)}"
    parts = [f"{name} {significant(ns / 1e3, 3)}" for name, ns in step.removed if ns]
    removed = ", ".join(parts) or "nothing: this pair of rungs removes no cause of the list"
    return f"{removed}; they differ in more: {step.differs}" if step.differs else removed


def ladder_figure(steps: Sequence[LadderStep]) -> Figure:
    """Return measured and predicted tok/s of each pair's higher rung as bars beside each other."""
    labels = figure_labels([step.higher for step in steps])
    below = figure_labels([step.lower for step in steps])
    places = list(range(len(steps)))

    def bars(name: str, values: list[float | None], colour: str, shape: str) -> dict[str, Any]:
        return {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": places,
            "x": values,
            "marker": {
                "color": colour,
                "pattern": {"shape": shape, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)"},
            },
            "hovertext": [
                f"{low} to {high}<br>{significant(value, 3) if value else 'not known'} tok/s, {figure_text(name)}"
                for low, high, value in zip(below, labels, values, strict=True)
            ],
            "hoverinfo": "text",
        }

    data = [
        bars("before (measured)", [step.now.value for step in steps], "#7d828c", ""),
        bars(
            "predicted (modelled)",
            [step.predicted.value if step.predicted else None for step in steps],
            VARIANTS[3],
            "x",
        ),
        bars("measured", [step.measured.value for step in steps], VARIANTS[2], ""),
    ]
    layout = {
        "height": 100 + round(1.3 * BAR_PIXELS) * len(steps),
        "barmode": "group",
        "bargap": 0.25,
        "dragmode": False,
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": "speed of the higher rung (tok/s)"}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": places,
            "ticktext": labels,
            "range": [len(steps) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "ticklabelstandoff": 6,
        },
    }
    return {"data": data, "layout": layout}

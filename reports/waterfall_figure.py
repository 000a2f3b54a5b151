"""The step waterfall: from the floor, cause by cause, up to the wall time of an average step."""

from typing import Any

from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.summary import VariantSummary
from workbench.quantity import Tag
from workbench.reports.figures import Figure
from workbench.reports.labels import figure_text
from workbench.reports.palette import cause_colour
from workbench.reports.plotly_config import pattern

ROW_PIXELS = 26
STEP_COLOUR = "#5d6675"


def waterfall_figure(variant: VariantSummary) -> Figure:
    """Return one bar a cause, each beginning where the one before ended; the last is the whole step."""
    accounting = variant.accounting
    causes = [cause for cause in accounting.causes if cause.total_ns]
    times = [cause.total_ns / accounting.steps / 1e6 for cause in causes]
    wall = accounting.wall_ns / accounting.steps / 1e6
    bases, reach = [], 0.0
    for time in times:
        bases.append(round(reach, 6))
        reach += time
    labels = [*(figure_text(cause.name) for cause in causes), "step"]
    data = [
        _bar(
            place,
            base,
            time,
            cause_colour(cause.name),
            cause.tag,
            f"{figure_text(cause.name)}<br>{significant(time)} ms per step ({cause.tag}), "
            f"{percent(accounting.share(cause))}",
        )
        for place, (cause, base, time) in enumerate(zip(causes, bases, times, strict=True))
    ]
    whole = f"the whole step: {significant(wall)} ms (measured)"
    data.append(_bar(len(causes), 0.0, wall, STEP_COLOUR, "measured", whole))
    layout: dict[str, Any] = {
        "height": 80 + ROW_PIXELS * len(labels),
        "dragmode": False,
        "barmode": "overlay",
        "showlegend": False,
        "bargap": 0.25,
        "margin": {"r": 72},
        "xaxis": {"title": {"text": "time of an average step (ms)"}, "range": [0, 1.02 * wall]},
        "yaxis": {
            "tickvals": list(range(len(labels))),
            "ticktext": labels,
            "range": [len(labels) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "ticklabelstandoff": 6,
        },
    }
    return {"data": data, "layout": layout}


def _bar(place: int, base: float, time: float, colour: str, tag: Tag, hover: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "y": [place],
        "base": [base],
        "x": [round(time, 6)],
        "marker": {"color": colour, "pattern": pattern([tag]), "line": {"width": 0}},
        "text": [f"{significant(time, 3)} ms"],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertext": [hover],
        "hoverinfo": "text",
    }

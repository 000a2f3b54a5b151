"""Figures of an ingested trace: what each device did with its time, and the same step by step."""

from collections.abc import Sequence
from typing import Any

from workbench.diagnose.busy import CATEGORIES, Busy
from workbench.diagnose.numbers import percent, significant
from workbench.reports.figures import BAR_PIXELS, Figure
from workbench.reports.palette import cause_colour

COLOURS = {
    "compute": "compute",
    "collective": "collective",
    "memcpy": "draft",
    "memset": "tail",
    "idle": "unexplained",
}
"""Category of time: the cause whose colour it has."""

MAX_DEVICES = 16
MAX_STEPS = 400


def busy_figure(rows: Sequence[Busy]) -> Figure:
    """Return one stacked bar a device: its window by category, in ms. At most MAX_DEVICES are drawn."""
    drawn = rows[:MAX_DEVICES]
    data = [_bar(name, index, drawn, horizontal=True) for index, name in enumerate(CATEGORIES)]
    for trace in data:
        trace["y"] = list(range(len(drawn)))
    layout: dict[str, Any] = {
        "barmode": "stack",
        "height": 110 + BAR_PIXELS * len(drawn),
        "dragmode": False,
        "showlegend": False,
        "bargap": 0.28,
        "xaxis": {"title": {"text": "time of the trace (ms)"}},
        "yaxis": {
            "tickvals": list(range(len(drawn))),
            "ticktext": [f"device {one.device}" for one in drawn],
            "range": [len(drawn) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "ticklabelstandoff": 6,
        },
    }
    return {"data": data, "layout": layout}


def step_figure(rows: Sequence[Busy]) -> Figure:
    """Return one stacked bar a step of one device, in the order they ran. At most MAX_STEPS are drawn."""
    drawn = rows[:MAX_STEPS]
    data = [_bar(name, index, drawn, horizontal=False) for index, name in enumerate(CATEGORIES)]
    for trace in data:
        trace["x"] = list(range(1, len(drawn) + 1))
    layout = {
        "barmode": "stack",
        "height": 300,
        "dragmode": False,
        "showlegend": False,
        "bargap": 0.15,
        "xaxis": {"title": {"text": "step"}, "showgrid": False, "tickformat": "d"},
        "yaxis": {"title": {"text": "time as traced (ms)"}},
    }
    if len(drawn) <= 10:
        layout["xaxis"] |= {"dtick": 1}  # type: ignore[operator]
    return {"data": data, "layout": layout}


def _bar(name: str, index: int, rows: Sequence[Busy], *, horizontal: bool) -> dict[str, Any]:
    times = [one.by_category[index] / 1e6 for one in rows]
    shares = [percent(one.by_category[index] / one.window_ns) if one.window_ns else "–" for one in rows]
    return {
        "type": "bar",
        "orientation": "h" if horizontal else "v",
        "name": name,
        "x" if horizontal else "y": times,
        "marker": {"color": cause_colour(COLOURS[name]), "line": {"width": 0}},
        "hovertext": [
            f"{name}<br>{significant(time)} ms (measured), {share}" for time, share in zip(times, shares, strict=True)
        ],
        "hoverinfo": "text",
    }

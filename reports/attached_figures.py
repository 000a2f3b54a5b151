"""Figures of a watched server: memory traffic sample by sample over some steps, and over all bursts."""

from typing import Any

from workbench.diagnose.attached_traffic import Traffic
from workbench.diagnose.numbers import significant
from workbench.quantity import Tag
from workbench.reports.figures import Figure
from workbench.reports.palette import CAUSES, VARIANTS
from workbench.reports.plotly_config import DASHES

ROOF_COLOUR = CAUSES["cpu-sync"]
MARK = CAUSES["unexplained"]


def zoom_figure(traffic: Traffic, roof_tag: Tag) -> Figure:
    """Return traffic over some tens of milliseconds, as sampled, under the roof; dotted: where a step begins."""
    zoom = traffic.zoom
    end = float(zoom.ms[-1]) + zoom.interval_us / 1e3
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "read and written (measured)",
            "x": [round(at, 4) for at in zoom.ms.tolist()],
            "y": [round(rate, 1) for rate in zoom.rate.tolist()],
            "line": {"color": VARIANTS[0], "width": 1, "shape": "hv"},
            "fill": "tozeroy",
            "hovertemplate": "%{y:,.0f} GB/s at %{x:.2f} ms<extra></extra>",
        },
        *_levels(traffic, [0.0, round(end, 4)], roof_tag),
    ]
    layout = _layout(f"ms, from {significant(zoom.at_s, 3)} s after the watch began", [0, end])
    layout["shapes"] = [_mark(at) for at in zoom.steps_ms.tolist()]
    return {"data": data, "layout": layout}


def bursts_figure(traffic: Traffic, roof_tag: Tag) -> Figure:
    """Return mean traffic of each bin, burst beside burst, the pauses between them left out."""
    data: list[dict[str, Any]] = []
    marks, at = [], 0.0
    for number, burst in enumerate(traffic.bursts, 1):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "read and written (measured)",
                "showlegend": number == 1,
                "x": [round(at + one, 5) for one in burst.s.tolist()],
                "y": [round(rate, 1) for rate in burst.rate.tolist()],
                "line": {"color": VARIANTS[0], "width": 1.5, "shape": "hvh"},
                "hovertemplate": f"burst {number}, {significant(burst.at_s, 3)} s after the watch began<br>"
                "%{y:,.0f} GB/s<extra></extra>",
            }
        )
        marks.append(at)
        at += burst.seconds
    data += _levels(traffic, [0.0, round(at, 5)], roof_tag)
    layout = _layout("s of counters read, burst beside burst", [0, at])
    layout["shapes"] = [_mark(one) for one in marks[1:]]
    return {"data": data, "layout": layout}


def _levels(traffic: Traffic, ends: list[float], roof_tag: Tag) -> list[dict[str, Any]]:
    """Return the mean over all bursts and the roof as lines across the figure."""
    lines = [("mean over all bursts (measured)", traffic.mean, VARIANTS[2], "dash")]
    if traffic.roof:
        lines.append((f"roof ({roof_tag})", traffic.roof, ROOF_COLOUR, DASHES[roof_tag]))
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{name}: {significant(level)} GB/s",
            "x": ends,
            "y": [round(level, 1)] * 2,
            "line": {"color": colour, "width": 1.5, "dash": dash},
            "hoverinfo": "skip",
        }
        for name, level, colour, dash in lines
    ]


def _mark(at: float) -> dict[str, Any]:
    place = {"type": "line", "xref": "x", "yref": "paper", "x0": round(at, 5), "x1": round(at, 5), "y0": 0, "y1": 1}
    return place | {"line": {"color": MARK, "width": 1, "dash": "dot"}}


def _layout(title: str, span: list[float]) -> dict[str, Any]:
    return {
        "height": 320,
        "dragmode": False,
        "xaxis": {"title": {"text": title}, "range": span, "zeroline": False, "showgrid": False},
        "yaxis": {"title": {"text": "device memory (GB/s)"}, "rangemode": "tozero"},
    }

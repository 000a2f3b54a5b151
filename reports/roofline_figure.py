"""The roofline as a figure: achieved bandwidth over bytes per accepted token, both logarithmic.

A point's area goes with its time. Diagonals join points of equal tok/s, the quotient of the axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from workbench.diagnose.numbers import byte_text, significant
from workbench.diagnose.roofline import Point, Roofline
from workbench.reports.figures import Figure
from workbench.reports.labels import figure_text, visible
from workbench.reports.palette import CAUSES, VARIANTS

KINDS = {"step": "step", "phase": "phase of the step", "kernel": "kernel", "copy": "copy"}
COLOURS = {"step": VARIANTS[0], "phase": VARIANTS[2], "kernel": VARIANTS[1], "copy": VARIANTS[5]}
SYMBOLS = {"step": "diamond", "phase": "square", "kernel": "circle", "copy": "triangle-up"}
ROOF_DASHES = {"datasheet": "dot", "measured": "solid", "clock-adjusted": "dash"}
IMPOSSIBLE = CAUSES["cpu-sync"]
MAX_POINTS = 300
SMALLEST, LARGEST = 9.0, 38.0


def roofline_figure(found: Roofline) -> Figure:
    """Return the figure; only the longest MAX_POINTS points are drawn. Points without a token count are left out."""
    points = [point for point in found.points if point.bytes_per_token and point.achieved.value > 0][:MAX_POINTS]
    xs = [point.bytes_per_token.value for point in points if point.bytes_per_token]
    ys = [point.achieved.value for point in points] + [roof.bandwidth.value for roof in found.roofs]
    if not xs:
        xs = [1.0, 10.0]
    left, right = min(xs) / 3, max(xs) * 3
    data = _roofs(found, left, right)
    longest = max((point.total_ns for point in points), default=1)
    for kind, word in KINDS.items():
        own = [point for point in points if point.kind == kind]
        if own:
            data.append(_points(own, word, longest))
    low, high = (min(ys) / 2, max(ys) * 2) if ys else (1.0, 10.0)
    rates = _token_rates(left, right, low, high)
    x_axis = {"title": {"text": "bytes per accepted token (log)"}} | _ticks(left, right, _bytes)
    y_axis = {"title": {"text": "achieved (GB/s, log)"}} | _ticks(low, high, lambda tick: f"{tick:,.10g}")
    return {
        "data": rates + data,
        "layout": {
            "height": 460,
            "dragmode": False,
            "hovermode": "closest",
            "xaxis": x_axis,
            "yaxis": y_axis,
        },
    }


def _roofs(found: Roofline, left: float, right: float) -> list[dict[str, Any]]:
    # Every vertex can be hovered, so a roof has many.
    steps = [left * (right / left) ** (index / 60) for index in range(61)]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{roof.name} roof, {significant(roof.bandwidth.value, 4)} GB/s ({roof.bandwidth.tag})",
            "x": steps,
            "y": [roof.bandwidth.value] * len(steps),
            "line": {"dash": ROOF_DASHES[roof.name], "width": 2, "color": "#7d828c"},
            "hovertext": f"{roof.name} roof: {significant(roof.bandwidth.value, 4)} GB/s ({roof.bandwidth.tag})<br>"
            f"{figure_text(visible(roof.bandwidth.note, 160))}",
            "hoverinfo": "text",
        }
        for roof in found.roofs
    ]


def _points(points: Sequence[Point], word: str, longest: int) -> dict[str, Any]:
    kind = points[0].kind
    return {
        "type": "scatter",
        "mode": "markers+text" if kind in ("step", "phase") else "markers",
        "name": word,
        "x": [point.bytes_per_token.value for point in points if point.bytes_per_token],
        "y": [point.achieved.value for point in points],
        "text": [figure_text(visible(point.name, 40)) for point in points],
        "textposition": "top center" if kind == "step" else "bottom center",
        "customdata": [list(point.ids) for point in points],
        "marker": {
            "size": [SMALLEST + (LARGEST - SMALLEST) * math.sqrt(point.total_ns / longest) for point in points],
            "symbol": ["x" if point.impossible else SYMBOLS[kind] for point in points],
            "color": [IMPOSSIBLE if point.impossible else COLOURS[kind] for point in points],
            "opacity": 0.8,
            "line": {"width": 1, "color": "#ffffff"},
        },
        "hovertext": [_hover(point) for point in points],
        "hoverinfo": "text",
    }


def _hover(point: Point) -> str:
    per_token = point.bytes_per_token
    lines = [
        figure_text(visible(point.name, 90)),
        f"{significant(point.achieved.value, 4)} GB/s ({point.achieved.tag})",
        f"{byte_text(point.bytes_per_call.value)} each of {point.calls:,}, {significant(point.total_ns / 1e6)} ms",
        f"{byte_text(per_token.value)} per accepted token" if per_token else "",
        figure_text(visible(point.achieved.note, 120)),
        figure_text(point.verdict()),
    ]
    return "<br>".join(line for line in lines if line)


def _token_rates(left: float, right: float, low: float, high: float) -> list[dict[str, Any]]:
    """Return diagonals of equal tok/s: GB/s over bytes per token."""
    slowest, fastest = math.log10(low * 1e9 / right), math.log10(high * 1e9 / left)
    made = []
    for power in range(math.ceil(slowest), math.floor(fastest) + 1):
        rate = 10.0**power
        start, stop = max(left, low * 1e9 / rate), min(right, high * 1e9 / rate)
        if start < stop:
            made.append(
                {
                    "type": "scatter",
                    "mode": "lines+text",
                    "showlegend": False,
                    "text": ["", f"{rate:,.0f} tok/s" if power >= 0 else f"{rate:g} tok/s"],
                    "textposition": "bottom left",
                    "textfont": {"size": 10, "color": "#7d828c"},
                    "x": [start, stop],
                    "y": [start * rate / 1e9, stop * rate / 1e9],
                    "line": {"width": 1, "color": "rgba(125,130,140,0.35)"},
                    "hovertext": f"{rate:,.0f} tok/s" if power >= 0 else f"{rate:g} tok/s",
                    "hoverinfo": "text",
                }
            )
    return made


def _ticks(low: float, high: float, text: Callable[[float], str]) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at 1, 2 and 5, or at the decades where there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) < 6 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [text(tick) for tick in ticks],
    }


def _bytes(tick: float) -> str:
    number, _, unit = byte_text(tick).partition(" ")
    return f"{float(number.replace(',', '')):g} {unit}"

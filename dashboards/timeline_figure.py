"""One window of a timeline as a plotly figure: a row a track on one time axis, SVG only.

WebGL traces compile their shaders from strings, which the page's content security policy refuses; a window holds few
enough marks for SVG. Times on the axis are ns since the run began, so that they stay exact as floating point numbers.
"""

import math
from typing import Any

from workbench.dashboards.timeline_rows import MUTED, PASSES, UNITS, draw_row, faint, row_height
from workbench.reports.labels import figure_text, visible
from workbench.reports.palette import CAUSES
from workbench.timeline.stretches import PassBand
from workbench.timeline.tracks import Timeline
from workbench.timeline.window import Row, Window

Figure = dict[str, Any]

LABEL_PIXELS = 18
AXIS_PIXELS = 60
MAX_BANDS, LETTER_PIXELS = 60, 6.4


def timeline_figure(
    timeline: Timeline, window: Window, selected: tuple[int, int] | None = None, width: int = 1200
) -> Figure:
    """Return the figure of ``window``. ``selected``: start and end in ns of what to point at. ``width``: of the figure,
    pixels, by which labels of passes make way for each other."""
    zero = timeline.start_ns
    heights = [row_height(row) for row in window.rows]
    total = sum(heights) + LABEL_PIXELS * len(heights)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": total + AXIS_PIXELS,
        "margin": {"l": 12, "r": 12, "t": 4, "b": 48},
        "barmode": "overlay",
        "bargap": 0,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
        "xaxis": _time_axis(window, zero),
        "annotations": [],
        "shapes": [],
    }
    passes = _passes(timeline, window)
    _mark_passes(layout, passes, window, zero, width)
    top = 0
    for index, (row, height) in enumerate(zip(window.rows, heights, strict=True)):
        name = "y" if index == 0 else f"y{index + 1}"
        upper = 1 - (top + LABEL_PIXELS) / total
        lower = 1 - (top + LABEL_PIXELS + height) / total
        traces, axis, remark = draw_row(row, zero, passes)
        data += [trace | {"yaxis": name, "xaxis": "x"} for trace in traces]
        layout[f"yaxis{index + 1 if index else ''}"] = {
            "domain": [max(0.0, lower), min(1.0, upper)],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "automargin": False,
            "anchor": "x",
        } | axis
        layout["annotations"].append(_label(row, remark, upper))
        top += LABEL_PIXELS + height
    if selected:
        layout["shapes"].append(_pointer(selected, zero))
    return {"data": data, "layout": layout}


def _label(row: Row, remark: str, upper: float) -> dict[str, Any]:
    text = f"{figure_text(visible(row.track.label, 60))}  {remark}".strip()
    return {
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": upper,
        "xanchor": "left",
        "yanchor": "bottom",
        "text": text,
        "showarrow": False,
        "font": {"size": 11},
    }


def _passes(timeline: Timeline, window: Window) -> tuple[PassBand, ...]:
    """Return when passes ran within the window; nothing where the window lies within one, or they are too many."""
    found = [band for band in timeline.bands if band.start_ns < window.end_ns and band.end_ns > window.start_ns]
    within = len(found) == 1 and found[0].start_ns <= window.start_ns and found[0].end_ns >= window.end_ns
    return () if within or len(found) > MAX_BANDS else tuple(found)


def _mark_passes(layout: dict[str, Any], bands: tuple[PassBand, ...], window: Window, zero: int, width: int) -> None:
    """Lay a band behind every row while a pass ran, with its name above; names that would meet stand on two lines."""
    span = window.end_ns - window.start_ns
    lines: list[float] = []
    for band in bands:
        colour = PASSES.get(f"{band.run_pass} step", MUTED)
        left, right = max(band.start_ns, window.start_ns), min(band.end_ns, window.end_ns)
        layout["shapes"].append(
            {
                "type": "rect",
                "layer": "below",
                "xref": "x",
                "yref": "paper",
                "x0": left - zero,
                "x1": right - zero,
                "y0": 0,
                "y1": 1,
                "fillcolor": faint(colour, 0.13),
                "line": {"width": 1, "color": faint(colour, 0.5)},
            }
        )
        text = f"{band.run_pass}, {band.steps:,} steps"
        at, needs = (left - window.start_ns) / span * width, LETTER_PIXELS * len(text)
        at = max(0.0, min(at, width - needs))
        line = next((index for index, end in enumerate(lines) if end <= at), len(lines))
        lines[line : line + 1] = [at + needs]
        layout["annotations"].append(
            {
                "xref": "x",
                "yref": "paper",
                "x": round(window.start_ns - zero + at / width * span),
                "y": 1,
                "yshift": LABEL_PIXELS * line,
                "xanchor": "left",
                "yanchor": "bottom",
                "text": figure_text(visible(text, 60)),
                "showarrow": False,
                "font": {"size": 11, "color": colour},
            }
        )
    layout["margin"]["t"] += LABEL_PIXELS * len(lines)
    layout["height"] += LABEL_PIXELS * len(lines)


def _pointer(selected: tuple[int, int], zero: int) -> dict[str, Any]:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": selected[0] - zero,
        "x1": selected[1] - zero,
        "y0": 0,
        "y1": 1,
        "fillcolor": "rgba(208,112,46,0.18)",
        "line": {"width": 1, "color": CAUSES["host-bound"]},
    }


def _time_axis(window: Window, zero: int) -> dict[str, Any]:
    """Return the axis with ticks counted from the window's left edge, in the unit that fits its width."""
    begin, end = window.start_ns - zero, window.end_ns - zero
    width = end - begin
    unit, power = next(((unit, power) for unit, power in UNITS if width >= 2 * 10**power), UNITS[-1])
    raw = width / 6
    magnitude = 10 ** math.floor(math.log10(raw))
    step = max(1, round(next(factor for factor in (1, 2, 5, 10) if factor * magnitude >= raw) * magnitude))
    ticks = list(range(0, width + 1, step))
    decimals = max(0, power - math.floor(math.log10(step)))
    title = f"{unit} after {(begin / 1e9):,.9f} s of the run"
    return {
        "range": [begin, end],
        "tickvals": [begin + tick for tick in ticks],
        "ticktext": [f"{tick / 10**power:,.{decimals}f}" for tick in ticks],
        "title": {"text": title, "font": {"size": 11}},
        "showgrid": True,
        "zeroline": False,
        "automargin": False,
        "anchor": "free",
        "position": 0,
    }

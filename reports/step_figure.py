"""One step as a figure: phases, counters, CTAs, kernels, idle time, calls and waits on one axis of time.

A row holds at most ``cells`` marks: spans shorter than a cell are drawn together with their like in the same cell, and
counters show the least and the most of a cell. So the figure has a bound whatever the step ran.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.diagnose.columns import Floats
from workbench.diagnose.kernel_classes import short_name
from workbench.diagnose.numbers import significant
from workbench.diagnose.step_picture import SMALL, Row, StepPicture
from workbench.diagnose.step_signals import LaneShares, Signal
from workbench.diagnose.steps import Ints
from workbench.reports.figures import Figure
from workbench.reports.labels import figure_text, visible
from workbench.reports.palette import CAUSES, VARIANTS, cause_colour

WHY: Mapping[str, str] = {
    "warps waiting for memory, a scheduler": "barrier-wait",
    "instructions a cycle, an SM": "instruction-bound",
}
"""Counters that say why the SMs take their time, and the causes whose colours they are drawn in."""

COLOURS: Mapping[str, str] = {
    "product": "floor",
    "other": "instruction-bound",
    SMALL: "small-kernels",
    "copy": "over-fetch",
    "quantise": "serialised",
    "sampling": "verify-and-sampling",
    "collective": "collective",
    "draft": "draft",
    "forward": "compute",
    "verify": "verify-and-sampling",
    "call": "host-bound",
    "operator": "compute",
    "wait": "cpu-sync",
    "spill": "spill",
}
"""What a span is, and the cause whose colour it has. Gaps are named by causes and have theirs."""

LABEL_PIXELS = 20
SPAN_PIXELS, GRAPH_PIXELS = 20, 58
AXIS_PIXELS = 52
NAMED = 14
"""Kernel names that get their own name in the hover; the others are named by what they are for."""

CELLS, FEWER_CELLS = 900, 200
MUTED = "#7d828c"
HBM, WARPS = VARIANTS[2], VARIANTS[3]
UNLABELLED: dict[str, Any] = {"showticklabels": False, "range": [0.5, -0.5]}

Drawn = tuple[str, int, list[dict[str, Any]], dict[str, Any]]
"""Label, height in pixels, traces, settings of the y axis."""


def step_figure(picture: StepPicture, roof_gb_per_s: float | None = None, *, cells: int = CELLS) -> Figure:
    """Return the figure of ``picture``; ``roof_gb_per_s`` is drawn across the row of memory reads."""
    drawn = _rows(picture, roof_gb_per_s, cells)
    total = sum(height + LABEL_PIXELS for _, height, _, _ in drawn)
    wall_us = picture.wall_ns / 1e3
    layout: dict[str, Any] = {
        "height": total + AXIS_PIXELS,
        "margin": {"l": 8, "r": 8, "t": 2, "b": 44},
        "barmode": "overlay",
        "bargap": 0,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "xaxis": {
            "title": {"text": "µs since the step began"},
            "range": [0, wall_us],
            "zeroline": False,
            "anchor": "free",
            "position": 0,
            "automargin": False,
            "nticks": 6,
            "tickformat": ",d",
        },
        "annotations": [],
    }
    data: list[dict[str, Any]] = []
    top = 0
    for index, (label, height, traces, axis) in enumerate(drawn):
        name = f"y{index + 1 if index else ''}"
        upper, lower = (1 - (top + LABEL_PIXELS + part) / total for part in (0, height))
        data += [trace | {"xaxis": "x", "yaxis": name} for trace in traces]
        layout[f"yaxis{index + 1 if index else ''}"] = {
            "domain": [max(0.0, round(lower, 6)), min(1.0, round(upper, 6))],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "automargin": False,
            "anchor": "x",
        } | axis
        layout["annotations"].append(_label(label, upper))
        top += LABEL_PIXELS + height
    return {"data": data, "layout": layout}


def groups(picture: StepPicture) -> tuple[str, ...]:
    """Return what the marks of the figure are, for its legend, in the order of the rows."""
    names: dict[str, None] = {}
    for row in picture.rows:
        if row.key in ("kernels", "gaps", "spills"):
            names |= dict.fromkeys(row.groups[index] for index in sorted(set(row.group.tolist())))
    return tuple(names)


def _label(text: str, upper: float) -> dict[str, Any]:
    return {
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": round(upper, 6),
        "xanchor": "left",
        "yanchor": "bottom",
        "text": figure_text(visible(text, 90)),
        "showarrow": False,
        "font": {"size": 11},
    }


def _rows(picture: StepPicture, roof: float | None, cells: int) -> list[Drawn]:
    by_name = {one.name: one for one in picture.signals}
    rows = [_spans(row, picture.wall_ns, cells) for row in picture.rows if row.key == "phases"]
    if "HBM read" in by_name:
        rows.append(_memory(by_name["HBM read"], by_name.get("HBM write"), roof, picture.wall_ns, cells))
    if "CTAs per SM" in by_name:
        rows.append(_counter(by_name["CTAs per SM"], picture.wall_ns, cells, VARIANTS[0]))
    if "resident warps" in by_name:
        rows.append(_counter(by_name["resident warps"], picture.wall_ns, cells, WARPS))
    for name, cause in WHY.items():
        if name in by_name:
            rows.append(_counter(by_name[name], picture.wall_ns, cells, cause_colour(cause)))
    if picture.lanes is not None:
        rows.append(_lanes(picture.lanes))
    rows += [_spans(row, picture.wall_ns, cells) for row in picture.rows if row.key != "phases"]
    return rows


def _spans(row: Row, wall_ns: int, cells: int) -> Drawn:
    label = f"{row.label} ({row.remark})" if row.remark else row.label
    if not len(row):
        return label, 3, [], UNLABELLED
    length = row.end - row.start
    cell = max(1, wall_ns // cells)
    alone = (length >= cell) | (len(row) <= cells)
    traces = []
    shown = {int(code) for code in _longest(row, length)} if len(row.names) > 1 else {0}
    for group in sorted(set(row.group.tolist())):
        colour = cause_colour(COLOURS.get(row.groups[group], row.groups[group]))
        own = alone & (row.group == group)
        for code in sorted(set(row.code[own].tolist())):
            if code in shown:
                at = np.flatnonzero(own & (row.code == code))
                name = figure_text(visible(short_name(row.names[code]), 60))
                traces.append(_bars(row.start[at], length[at], colour, f"{name}<br>%{{x:.2f}} µs"))
        rest = np.flatnonzero(own & ~np.isin(row.code, list(shown)))
        if len(rest):
            what = figure_text(row.groups[group])
            traces.append(_bars(row.start[rest], length[rest], colour, f"{what}<br>%{{x:.2f}} µs"))
        short = np.flatnonzero(~alone & (row.group == group))
        if len(short):
            traces.append(_together(row, short, length, cell, colour, figure_text(row.groups[group])))
    return label, SPAN_PIXELS, traces, UNLABELLED


def _longest(row: Row, length: Ints) -> Ints:
    spent = np.bincount(row.code, length, len(row.names))
    return np.argsort(-spent, kind="stable")[:NAMED]


def _us(ns: Any) -> list[float]:
    return [round(value / 1e3, 2) for value in np.asarray(ns).tolist()]


def _bars(start: Ints, length: Ints, colour: str, hover: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "base": _us(start),
        "x": _us(length),
        "y": [0] * len(start),
        "width": 0.9,
        # A border of its own colour, or a span thinner than a pixel would not be seen.
        "marker": {"color": colour, "line": {"color": colour, "width": 0.6}},
        "hovertemplate": f"{hover}<extra></extra>",
    }


def _together(row: Row, rows: Ints, length: Ints, cell: int, colour: str, what: str) -> dict[str, Any]:
    """Return one bar a cell for spans that are shorter than it: from the first's start to the last's end."""
    at, first = np.unique(row.start[rows] // cell, return_index=True)
    place = np.searchsorted(at, row.start[rows] // cell)
    start = row.start[rows][first]
    end = np.zeros(len(at), np.int64)
    np.maximum.at(end, place, row.end[rows])
    busy = np.bincount(place, length[rows], len(at))
    count = np.bincount(place, minlength=len(at))
    made = _bars(start, end - start, colour, f"%{{customdata[0]}} × {what}<br>%{{customdata[1]}} µs of it")
    return made | {"customdata": [[int(n), us] for n, us in zip(count.tolist(), _us(busy), strict=True)]}


def _stairs(signal: Signal, wall_ns: int, cells: int) -> tuple[list[float], list[float]]:
    """Return the signal as a line; where it has more samples than ``cells``, the most and the least of each cell."""
    start, end, value = signal.start, signal.end, signal.value
    order = np.argsort(start, kind="stable")
    start, end, value = start[order], end[order], value[order]
    if len(start) > cells:
        at = start * cells // max(wall_ns, 1)
        keep: list[int] = []
        for own in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at)) + 1):
            keep += sorted({int(own[value[own].argmax()]), int(own[value[own].argmin()])})
        start, end, value = start[keep], end[keep], value[keep]
    x = [*_us(start), *_us(end[-1:])]
    y = [float(f"{one:.4g}") for one in value.tolist()]
    return x, [*y, *y[-1:]]


def _line(x: list[float], y: list[float], colour: str, hover: str, *, fill: bool = True) -> dict[str, Any]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    trace = {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": {"shape": "hv", "width": 1.2, "color": colour},
        "hovertemplate": f"{hover}<extra></extra>",
    }
    return trace | ({"fill": "tozeroy", "fillcolor": f"rgba({red},{green},{blue},0.3)"} if fill else {})


def _scale(top: float) -> dict[str, Any]:
    return {
        "range": [0, 1.08 * max(top, 1e-9)],
        "nticks": 3,
        "ticklabelposition": "inside",
        "showgrid": True,
        "tickfont": {"size": 9, "color": MUTED},
    }


def _own(signal: Signal) -> str:
    return f"{signal.run_pass} step {signal.step_id}, {significant(signal.own_wall_ns / 1e6, 3)} ms"


def _memory(read: Signal, write: Signal | None, roof: float | None, wall_ns: int, cells: int) -> Drawn:
    x, y = _stairs(read, wall_ns, cells)
    traces = [_line(x, y, HBM, "HBM read: %{y:,.0f} GB/s")]
    top = max(y, default=0.0)
    label = f"HBM read, GB/s ({_own(read)})"
    if write is not None and float(write.value.max(initial=0)) > 0.02 * top:
        traces.append(_line(*_stairs(write, wall_ns, cells), CAUSES["spill"], "HBM write: %{y:,.0f} GB/s", fill=False))
        label = f"HBM read, write in red, GB/s ({_own(read)})"
    if roof:
        top = max(top, roof)
        line = _line([0, round(wall_ns / 1e3, 2)], [round(roof, 1)] * 2, MUTED, "measured roof", fill=False)
        traces.append(line | {"line": {"width": 1, "dash": "dot", "color": MUTED}})
    return label, GRAPH_PIXELS, traces, _scale(top)


def _counter(signal: Signal, wall_ns: int, cells: int, colour: str) -> Drawn:
    x, y = _stairs(signal, wall_ns, cells)
    name = figure_text(signal.name)
    label = f"{signal.name}, share" if signal.unit.startswith("share") else signal.name
    traces = [_line(x, y, colour, f"{name}: %{{y:.3~g}}")]
    return f"{label} ({_own(signal)})", GRAPH_PIXELS * 2 // 3, traces, _scale(max(y, default=0.0))


def _lanes(lanes: LaneShares) -> Drawn:
    x = _us(lanes.edges[:-1])

    def area(values: Floats, colour: str, what: str) -> dict[str, Any]:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "lanes",
            "x": x,
            "y": [round(value, 3) for value in values.tolist()],
            "line": {"width": 0, "shape": "hv", "color": colour},
            "fillcolor": f"rgba({red},{green},{blue},0.75)",
            "hovertemplate": f"{what}: %{{y:.0%}} of the CTAs<extra></extra>",
        }

    traces = [
        area(lanes.computing, CAUSES["floor"], "computing"),
        area(lanes.other, CAUSES["instruction-bound"], "in a task, not computing"),
        area(lanes.waiting, CAUSES["barrier-wait"], "waiting"),
    ]
    label = f"{lanes.ctas} CTAs: green compute, blue other work, grey wait"
    axis = {"range": [0, 1.05], "tickvals": [0, 0.5, 1], "tickformat": ".0%", "ticklabelposition": "inside"}
    return label, GRAPH_PIXELS, traces, axis | {"showgrid": True, "tickfont": {"size": 9, "color": MUTED}}

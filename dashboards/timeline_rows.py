"""How one row of the timeline is drawn: its traces, its axis, its height and what is said beside its label."""

import zlib
from typing import Any

import numpy as np

from workbench.diagnose.numbers import significant
from workbench.reports.labels import figure_text, visible
from workbench.reports.palette import CAUSES, VARIANTS
from workbench.timeline.stretches import PassBand
from workbench.timeline.track import LaneTrack, SampleTrack, SpanTrack
from workbench.timeline.window import Band, Binned, Each, Gaps, Row, Shares, Values

SPAN_PIXELS, LANE_PIXELS, GRAPH_PIXELS, EMPTY_PIXELS = 24, 15, 56, 4
PHASES = {"draft": CAUSES["draft"], "forward": CAUSES["compute"], "verify": CAUSES["verify-and-sampling"]}
PASSES = {
    "clean step": CAUSES["floor"],
    "sampled step": CAUSES["instruction-bound"],
    "laned step": CAUSES["serialised"],
    "traced step": CAUSES["host-bound"],
}
MUTED = "#7d828c"
GAP, WAIT, SPILL, SAMPLE = CAUSES["launch-gap"], CAUSES["cpu-sync"], CAUSES["spill"], VARIANTS[0]
UNITS = (("s", 9), ("ms", 6), ("µs", 3), ("ns", 0))
NAMES = (*VARIANTS, "#4a8fd0", "#7f8c2b", "#8a5f4a", "#5a63b8")


def duration_text(ns: float) -> str:
    """Return a time with the unit that fits: ``12.40 µs``."""
    for unit, power in UNITS:
        if abs(ns) >= 10**power:
            return f"{significant(ns / 10**power)} {unit}"
    return f"{ns:.0f} ns"


def row_height(row: Row) -> int:
    """Return the height of ``row`` in pixels, without its label."""
    content = row.content
    if isinstance(content, Each):
        if not len(content.start):
            return EMPTY_PIXELS
        return SPAN_PIXELS if not row_is_nested(row) else LANE_PIXELS * (int(content.depth.max(initial=0)) + 1)
    empty = isinstance(content, Values | Band) and not len(content.start)
    return SPAN_PIXELS if isinstance(content, Gaps) or empty else GRAPH_PIXELS


def row_is_nested(row: Row) -> bool:
    """Return whether the row's spans are drawn on several lanes."""
    return isinstance(row.track, SpanTrack) and row.track.nested


Drawn = tuple[list[dict[str, Any]], dict[str, Any], str]
"""Traces, settings of the y axis, and a remark beside the label."""

_NO_TICKS: dict[str, Any] = {"showticklabels": False, "range": [0, 1]}


def draw_row(row: Row, zero: int, passes: tuple[PassBand, ...]) -> Drawn:
    """Return the drawing of ``row``; times from ``zero``, ns. ``passes`` colour the row of steps."""
    content = row.content
    if isinstance(row.track, LaneTrack):
        return _shares(row.track, content, zero)
    if isinstance(row.track, SampleTrack):
        return _samples(row.track, content, zero)
    if isinstance(content, Each):
        return _each(row.track, content, zero)
    if isinstance(content, Gaps):
        return _gaps(content, zero)
    if isinstance(content, Binned):
        if row.track.gaps:
            return _binned_gaps(content, zero)
        return _busy(row.track, content, zero, passes if row.track.key == "steps" else ())
    raise AssertionError(f"{row.track.key}: {type(content).__name__} is no content of a span track")


def _colour(track: SpanTrack, name: str) -> str:
    if track.key == "steps":
        return PASSES.get(name, NAMES[0])
    if track.key == "phases":
        return PHASES.get(name, NAMES[0])
    if track.group == "waits":
        return WAIT
    if track.key == "spills":
        return SPILL
    return NAMES[zlib.crc32(name.encode("utf-8", "replace")) % len(NAMES)]


def _each(track: SpanTrack, content: Each, zero: int) -> Drawn:
    names = [track.names[code] if code < len(track.names) else "" for code in content.codes.tolist()]
    colours = [_colour(track, name) for name in names]
    lengths = (content.end - content.start).tolist()
    deepest = int(content.depth.max(initial=0)) if track.nested else 0
    trace = {
        "type": "bar",
        "orientation": "h",
        "base": (content.start - zero).tolist(),
        "x": lengths,
        "y": content.depth.tolist() if track.nested else [0] * len(lengths),
        "width": 0.86,
        # A border of its own colour, or a span thinner than a pixel would not be seen.
        "marker": {"color": colours, "line": {"color": colours, "width": 1}},
        "customdata": [[track.table, key] for key in content.ids.tolist()],
        "hovertext": [
            f"{figure_text(visible(name, 90))}<br>{duration_text(length)}"
            for name, length in zip(names, lengths, strict=True)
        ],
        "hoverinfo": "text",
    }
    remarks = [track.remark] if track.remark else []
    remarks += [f"{content.hidden:,} inner calls not drawn"] if content.hidden else []
    remark = f"({'; '.join(remarks)})" if remarks else ""
    if not lengths:
        return [], _NO_TICKS, remark
    return [trace], {"showticklabels": False, "range": [deepest + 0.5, -0.5]}, remark


def _gaps(content: Gaps, zero: int) -> Drawn:
    lengths = (content.end - content.start).tolist()
    trace = {
        "type": "bar",
        "orientation": "h",
        "base": (content.start - zero).tolist(),
        "x": lengths,
        "y": [0] * len(lengths),
        "width": 0.86,
        "marker": {"color": GAP, "line": {"color": GAP, "width": 1}},
        "customdata": [["gap", start] for start in content.start.tolist()],
        "hovertext": [f"nothing ran for {duration_text(length)}" for length in lengths],
        "hoverinfo": "text",
    }
    longest = f"longest {duration_text(max(lengths))}" if lengths else "none"
    return [trace], {"showticklabels": False, "range": [0.5, -0.5]}, f"({longest})"


def _filled(x: list[int], y: list[float], colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": {"shape": "hv", "width": 1, "color": colour},
        "fill": "tozeroy",
        "fillcolor": faint(colour),
    }


def faint(colour: str, alpha: float = 0.35) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _busy(track: SpanTrack, content: Binned, zero: int, passes: tuple[PassBand, ...]) -> Drawn:
    bins, edges = content.bins, content.edges - zero
    share = bins.busy_ns / np.diff(content.edges)
    colour = WAIT if track.group == "waits" else SPILL if track.key == "spills" else NAMES[0]
    said = {
        "customdata": np.stack([bins.started, bins.longest_ns / 1e9], axis=1).tolist(),
        "hovertemplate": "%{y:.1%} busy<br>%{customdata[0]:,} begin here<br>"
        "longest: %{customdata[1]:.4s}s<extra></extra>",
    }
    remarks = [track.remark] if track.remark else []
    remark = f"({'; '.join([*remarks, 'share of time', f'{int(bins.started.sum()):,} spans'])})"
    traces = []
    # A colour a pass; what is in none, as where a run has no passes, has the row's own.
    outside = np.ones(len(share), bool)
    for name in dict.fromkeys(band.run_pass for band in passes):
        inside = np.zeros(len(share), bool)
        for band in passes:
            if band.run_pass == name:
                inside |= (content.edges[1:] > band.start_ns) & (content.edges[:-1] < band.end_ns)
        outside &= ~inside
        own = np.where(inside, share, 0.0)
        traces.append(_filled(edges.tolist(), [*own.tolist(), float(own[-1])], PASSES.get(f"{name} step", colour)))
    own = np.where(outside, share, 0.0)
    if own.any() or not traces:
        traces.append(_filled(edges.tolist(), [*own.tolist(), float(own[-1])], colour))
    return [trace | said for trace in traces], {"range": [0, 1.05], "showticklabels": False, "zeroline": True}, remark


def _shares(track: LaneTrack, content: object, zero: int) -> Drawn:
    if not isinstance(content, Shares):
        raise AssertionError(f"{track.key}: {type(content).__name__} is no content of lanes")
    bins, x = content.bins, (content.edges[:-1] - zero).tolist()
    parts = (
        (bins.computing, CAUSES["floor"], "computing"),
        (bins.other, CAUSES["instruction-bound"], "in a task, not computing"),
        (bins.waiting, CAUSES["barrier-wait"], "waiting"),
    )
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "lanes",
            "x": x,
            "y": [round(value, 4) for value in values.tolist()],
            "line": {"width": 0, "shape": "hv", "color": colour},
            "fillcolor": faint(colour, 0.75),
            "hovertemplate": f"{what}: %{{y:.0%}} of the CTAs<extra></extra>",
        }
        for values, colour, what in parts
    ]
    axis: dict[str, Any] = {"range": [0, 1.05], "tickvals": [0, 0.5, 1], "tickformat": ".0%"}
    axis |= {"ticklabelposition": "inside", "showgrid": True, "tickfont": {"size": 9, "color": MUTED}}
    return traces if bins.there.any() else [], axis, "(laned steps: green compute, blue other work, grey wait)"


def _binned_gaps(content: Binned, zero: int) -> Drawn:
    gap = content.bins.gap_ns
    # Logarithmic, by hand: a bin without a gap has no logarithm.
    y = np.log10(np.maximum(gap, 1))
    trace = _filled((content.edges - zero).tolist(), [*y.tolist(), float(y[-1])], GAP) | {
        "customdata": (gap / 1e9).tolist(),
        "hovertemplate": "longest gap: %{customdata:.4s}s<extra></extra>",
    }
    top = max(float(y.max()), 4.0)
    marks = [power for power in (3, 6, 9) if power <= top]
    axis = {
        "range": [2, top * 1.04],
        "tickvals": marks,
        "ticktext": [{3: "1 µs", 6: "1 ms", 9: "1 s"}[power] for power in marks],
        "ticklabelposition": "inside",
        "showgrid": True,
        "tickfont": {"size": 9, "color": MUTED},
    }
    return [trace], axis, f"(longest in each bin, log; longest {duration_text(int(gap.max()))})"


def _samples(track: SampleTrack, content: object, zero: int) -> Drawn:
    unit = figure_text(visible(track.unit, 20))
    axis = {
        "rangemode": "tozero",
        "nticks": 3,
        "ticklabelposition": "inside",
        "showgrid": True,
        "tickfont": {"size": 9, "color": MUTED},
    }
    if isinstance(content, Values):
        if not len(content.start):
            return [], _NO_TICKS, f"({unit}; no sample here)"
        instant = bool((content.end == content.start).all())
        x, y = _stairs(content, zero, instant)
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if instant else "lines",
            "marker": {"size": 4, "color": SAMPLE},
            "x": x,
            "y": y,
            "line": {"shape": "linear" if instant else "hv", "width": 1.5, "color": SAMPLE},
            "hovertemplate": f"%{{y:.4~g}} {unit}<extra></extra>",
        }
        return [trace], axis, f"({unit})"
    if isinstance(content, Band):
        if not len(content.start):
            return [], _NO_TICKS, f"({unit}; no sample here)"
        return _band(content, zero, unit), axis, f"({unit}; least to greatest in each bin)"
    raise AssertionError(f"{track.key}: {type(content).__name__} is no content of a counter")


def _stairs(content: Values, zero: int, instant: bool) -> tuple[list[int | None], list[float | None]]:
    """Return the corners of the line; it breaks where nothing was sampled for a time."""
    start, end, value = (content.start - zero).tolist(), (content.end - zero).tolist(), content.value.tolist()
    if instant:
        return start, value
    x: list[int | None] = []
    y: list[float | None] = []
    for index, (begin, stop, one) in enumerate(zip(start, end, value, strict=True)):
        x.append(begin)
        y.append(one)
        if index + 1 == len(start) or start[index + 1] > stop:
            x += [stop, None]
            y += [one, None]
    return x[:-1], y[:-1]


def _band(content: Band, zero: int, unit: str) -> list[dict[str, Any]]:
    """Return the area between least and greatest, as an outline around each stretch of bins without a hole."""
    x: list[int | None] = []
    y: list[float | None] = []
    hover: list[str] = []
    breaks = np.flatnonzero(content.start[1:] != content.end[:-1]) + 1
    for own in np.split(np.arange(len(content.start)), breaks):
        start, end = (content.start[own] - zero).tolist(), (content.end[own] - zero).tolist()
        low, high = content.low[own].tolist(), content.high[own].tolist()
        there = [corner for left, right in zip(start, end, strict=True) for corner in (left, right)]
        x += [*there, *reversed(there), there[0], None]
        y += [value for value in high for _ in (0, 1)]
        y += [value for value in reversed(low) for _ in (0, 1)]
        y += [high[0], None]
        words = [f"{least:.4g} to {most:.4g} {unit}" for least, most in zip(low, high, strict=True)]
        hover += [word for word in words for _ in (0, 1)]
        hover += [word for word in reversed(words) for _ in (0, 1)]
        hover += [words[0], ""]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": x,
            "y": y,
            "line": {"width": 1, "color": SAMPLE},
            "fill": "toself",
            "fillcolor": faint(SAMPLE),
            "hoveron": "points",
            "hovertext": hover,
            "hoverinfo": "text",
        }
    ]

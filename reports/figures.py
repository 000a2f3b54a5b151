"""Figures of a report, as plain plotly figures: dicts of ``data`` and ``layout`` without colours of a theme.

They take what ``workbench.diagnose`` found and only draw it. Bars are hatched, lines dashed by the tag of their numbers
(``workbench.reports.plotly_config``). Variants sit at integer positions, so that no two names can merge. No markup but
``<br>``: plotly.js sets ``<b>`` as a style attribute, which the report's content security policy refuses.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.diagnose.distribution import quantile_curve, timeline
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.speculation import BreakEven
from workbench.diagnose.steps import Steps
from workbench.diagnose.summary import Diagnosis
from workbench.quantity import Quantity
from workbench.reports.labels import figure_labels, figure_text
from workbench.reports.palette import cause_colour, variant_colour
from workbench.reports.plotly_config import DASHES, pattern

Figure = dict[str, Any]

BAR_PIXELS = 44
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")


def step_time_figure(diagnosis: Diagnosis) -> Figure:
    """Return one stacked bar a variant: its causes in ms per step, which add up to the mean step time."""
    labels = figure_labels([variant.name for variant in diagnosis.variants])
    names = list(dict.fromkeys(cause.name for variant in diagnosis.variants for cause in variant.accounting.causes))
    data: list[dict[str, Any]] = []
    for name in names:
        found = [
            (position, variant.accounting, cause)
            for position, variant in enumerate(diagnosis.variants)
            for cause in variant.accounting.causes
            if cause.name == name
        ]
        times = [cause.total_ns / accounting.steps / 1e6 for _, accounting, cause in found]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": figure_text(name),
                "y": [position for position, _, _ in found],
                "x": times,
                "text": [significant(time, 3) for time in times],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": "#ffffff"},
                "constraintext": "inside",
                "marker": {
                    "color": cause_colour(name),
                    "line": {"width": 0},
                    "pattern": pattern([cause.tag for _, _, cause in found]),
                },
                "hovertext": [
                    f"{labels[position]}: {figure_text(name)}<br>{significant(time)} ms per step ({cause.tag}), "
                    f"{percent(accounting.share(cause))} of the step"
                    for (position, accounting, cause), time in zip(found, times, strict=True)
                ],
                "hoverinfo": "text",
            }
        )
    totals = [variant.accounting.wall_ns / variant.accounting.steps / 1e6 for variant in diagnosis.variants]
    layout = _bars(labels, "time of an average step (ms)")
    layout |= {
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "uniformtext": {"mode": "hide", "minsize": 10},
        "annotations": [
            {
                "x": total,
                "y": position,
                "text": f"{significant(total)} ms",
                "font": {"weight": "bold"},
                "showarrow": False,
                "xanchor": "left",
                "xshift": 4,
            }
            for position, total in enumerate(totals)
        ],
    }
    layout["xaxis"]["range"] = [0, 1.02 * max(totals)]
    layout["margin"] = {"r": 80}  # room for the totals at any width
    return {"data": data, "layout": layout}


def speed_figure(diagnosis: Diagnosis) -> Figure:
    """Return tok/s, one bar a variant."""
    figure = _quantity_bars(diagnosis, [variant.tok_s for variant in diagnosis.variants], "speed (tok/s)")
    figure["layout"]["xaxis"]["range"] = [0, 1.2 * max(variant.tok_s.value for variant in diagnosis.variants)]
    return figure


def accept_length_figure(diagnosis: Diagnosis, against_plain: Mapping[str, BreakEven | None]) -> Figure:
    """Return accept length with its interval, one bar a variant, and a mark at the break-even accept length."""
    lengths = [variant.accept_length for variant in diagnosis.variants]
    figure = _quantity_bars(diagnosis, lengths, "accept length (tokens/step)")
    for bar, length in zip(figure["data"], lengths, strict=True):
        if length.low is not None and length.high is not None and length.low < length.high:
            bar["error_x"] = {
                "type": "data",
                "symmetric": False,
                "array": [length.high - length.value],
                "arrayminus": [length.value - length.low],
                "thickness": 1.5,
            }
    marks = [
        (position, entry)
        for position, variant in enumerate(diagnosis.variants)
        if (entry := against_plain[variant.name]) is not None
    ]
    reach = [value for length in lengths for value in (length.value, length.high) if value is not None]
    if marks:
        needed = [entry.needed.value for _, entry in marks]
        reach += needed
        figure["data"].append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "break-even",
                "showlegend": False,
                "x": needed,
                "y": [position for position, _ in marks],
                "marker": {"symbol": "line-ns-open", "size": 30, "line": {"width": 3}, "color": "#c0392b"},
                "hovertext": [f"break-even at {significant(value, 3)} tokens/step (measured)" for value in needed],
                "hoverinfo": "text",
            }
        )
    figure["layout"]["xaxis"]["range"] = [0, 1.2 * max(reach)]
    return figure


def acceptance_figure(diagnosis: Diagnosis) -> Figure:
    """Return the survival of drafts by position, one line a drafting variant."""
    labels = figure_labels([variant.name for variant in diagnosis.variants])
    data: list[dict[str, Any]] = []
    for index, (variant, label) in enumerate(zip(diagnosis.variants, labels, strict=True)):
        if variant.positions:
            tag = variant.accept_length.tag
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{label} ({tag})",
                    "x": [at.position for at in variant.positions],
                    "y": [100 * at.rate for at in variant.positions],
                    "line": {"color": variant_colour(index), "dash": DASHES[tag], "width": 2},
                    "marker": {"symbol": MARKERS[index % len(MARKERS)], "size": 8},
                    "hovertext": [
                        f"{label}, draft position {at.position}<br>{percent(at.rate)} survive ({tag}): "
                        f"{at.accepted:,} of {at.reached:,} steps"
                        for at in variant.positions
                    ],
                    "hoverinfo": "text",
                }
            )
    deepest = max((len(variant.positions) for variant in diagnosis.variants), default=0)
    layout = _layout(340, "draft position", "drafts that survive (%)")
    layout["xaxis"] |= {"dtick": 1 if deepest <= 20 else None, "range": [0.7, deepest + 0.3]}
    layout["yaxis"]["range"] = [0, 104]
    return {"data": data, "layout": layout}


def step_spread_figure(steps: Mapping[str, Steps]) -> Figure:
    """Return the distribution of step times: the share of steps at or below each time, one line a variant."""
    data: list[dict[str, Any]] = []
    for index, (label, one) in enumerate(zip(figure_labels(list(steps)), steps.values(), strict=True)):
        times, shares = quantile_curve(one)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{label} (measured)",
                "x": times,
                "y": [100 * share for share in shares],
                "line": {"color": variant_colour(index), "width": 2, "shape": "hv"},
                "hovertemplate": "%{y:.1f} % of the steps take at most %{x:.3f} ms<extra>%{fullData.name}</extra>",
            }
        )
    layout = _layout(340, "step time (ms, log)", "steps at or below (%)")
    layout["xaxis"] |= _log_ticks([time for trace in data for time in (trace["x"][0], trace["x"][-1])])
    layout["yaxis"] |= {"range": [0, 101], "dtick": 25}
    return {"data": data, "layout": layout}


def step_order_figure(steps: Mapping[str, Steps]) -> Figure:
    """Return step times in the order they ran, s since each variant's first step; extremes survive the thinning."""
    data: list[dict[str, Any]] = []
    for index, (label, one) in enumerate(zip(figure_labels(list(steps)), steps.values(), strict=True)):
        starts, times = timeline(one)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{label} (measured)",
                "x": starts,
                "y": times,
                "marker": {"color": variant_colour(index), "symbol": MARKERS[index % len(MARKERS)], "size": 4},
                "hovertemplate": "%{y:.3f} ms at %{x:.2f} s<extra>%{fullData.name}</extra>",
            }
        )
    layout = _layout(320, "time since the variant's first step (s)", "step time (ms, log)")
    layout["yaxis"] |= _log_ticks([time for trace in data for time in trace["y"]])
    return {"data": data, "layout": layout}


def _quantity_bars(diagnosis: Diagnosis, quantities: Sequence[Quantity], title: str) -> Figure:
    labels = figure_labels([variant.name for variant in diagnosis.variants])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "showlegend": False,
            "x": [quantity.value],
            "y": [index],
            "text": [f"{significant(quantity.value, 3)} ({quantity.tag})"],
            "textposition": "inside",
            "insidetextanchor": "start",
            "textangle": 0,
            "textfont": {"color": "#ffffff"},
            "marker": {"color": variant_colour(index), "pattern": pattern([quantity.tag])},
            "hovertext": [
                f"{label}<br>{significant(quantity.value)} {quantity.unit} ({quantity.tag})<br>"
                f"{figure_text(quantity.note)}"
            ],
            "hoverinfo": "text",
        }
        for index, (label, quantity) in enumerate(zip(labels, quantities, strict=True))
    ]
    return {"data": data, "layout": _bars(labels, title)}


def _bars(labels: Sequence[str], title: str) -> dict[str, Any]:
    """Return the layout of horizontal bars, the first variant on top."""
    layout = _layout(110 + BAR_PIXELS * len(labels), title, "")
    layout["bargap"] = 0.28
    layout["yaxis"] = {
        "tickvals": list(range(len(labels))),
        "ticktext": list(labels),
        "range": [len(labels) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
        "ticklabelstandoff": 6,
    }
    return layout


def _layout(height: int, x: str, y: str) -> dict[str, Any]:
    # No drag mode: on a phone the page must scroll when a finger lands on a figure.
    layout: dict[str, Any] = {"height": height, "dragmode": False, "xaxis": {"title": {"text": x}}, "yaxis": {}}
    if y:
        layout["yaxis"] = {"title": {"text": y}}
    return layout


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis over ``values`` with ticks at 1, 2 and 5: plotly's own fail below a decade."""
    positive = [value for value in values if value > 0]
    if not positive:
        return {}
    low, high = min(positive), max(positive)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    narrow = high / low < 5
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if narrow else (1, 2, 5)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return {
        "type": "log",
        "range": [math.log10(low / 1.08), math.log10(high * 1.08)],
        "tickvals": ticks,
        "ticktext": [significant(tick, 2).rstrip("0").rstrip(".") if tick < 10 else f"{tick:,.0f}" for tick in ticks],
        "minor": {"showgrid": False},
    }

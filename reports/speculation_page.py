"""What the page says of speculation: cost of a draft token, depths, iso-throughput lines, what precision costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.diagnose.headline import fastest
from workbench.diagnose.iso_throughput import IsoGrid
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.prompt_jackknife import Interval
from workbench.diagnose.speculation_view import SpeculationView
from workbench.diagnose.summary import Diagnosis
from workbench.reports.blocks import Block, FigureBlock, FoldBlock, Section, TableBlock, TextBlock
from workbench.reports.figures import MARKERS, Figure
from workbench.reports.labels import figure_labels, figure_text, visible
from workbench.reports.palette import variant_colour
from workbench.reports.table import Cell, Column, Group, Table

LINES = 5


def speculation_section(
    diagnosis: Diagnosis, views: Mapping[str, SpeculationView | None], grid: IsoGrid | None
) -> Section | None:
    """Return the section; None where no variant drafts and no step's bytes are known."""
    found = [view for view in views.values() if view is not None]
    blocks: list[Block] = []
    if found:
        blocks.append(TableBlock(_cost_table(found)))
        blocks += [
            TextBlock(f"{visible(view.variant)}: no cost of a draft token, since {view.missing}.", "muted")
            for view in found
            if view.missing
        ]
        best = fastest(diagnosis).name
        deep = sorted((view for view in found if view.depths), key=lambda view: view.variant != best)
        if deep:
            blocks.append(TableBlock(_depth_table(deep[0])))
            rest = tuple(TableBlock(_depth_table(view)) for view in deep[1:])
            blocks += [FoldBlock(f"Depths of {len(rest)} more variants", rest)] if rest else []
    trades = [view for view in found if view.trade]
    if trades:
        blocks.append(TableBlock(_trade_table(trades)))
    if grid is not None and grid.points:
        blocks.append(
            FigureBlock(
                "iso-throughput",
                iso_figure(diagnosis, grid),
                f"Lines of equal tok/s for steps of {significant(grid.bytes_per_step / 1e9, 3)} GB, those of the "
                "fastest variant; a variant whose steps read more or less lies off them by the ratio of the bytes. "
                "Right: kernels closer to the roof. Up: more tokens a step. All modelled but the points.",
                "Accept length against achieved bandwidth, with lines of equal tok/s and a point a variant.",
            )
        )
    if not blocks:
        return None
    intro = "Another draft token costs time in every step and pays only where it is accepted often enough."
    return Section("speculation", "What speculation costs and gives", intro, tuple(blocks))


def _interval(value: Interval, digits: int = 3) -> Cell:
    note = ""
    if value.low is not None and value.high is not None:
        note = f"[{significant(value.low, digits)},\u00a0{significant(value.high, digits)}]"
    return Cell(significant(value.value, digits), "estimated", note)


def _cost_table(views: Sequence[SpeculationView]) -> Table:
    rows = []
    for view in views:
        cost, depths = view.cost, view.depths
        if cost is None:
            continue
        now = depths.rows[-1] if depths else None
        rows.append(
            (
                Cell(visible(view.variant), note=visible(cost.note, 160)),
                _interval(cost.fit.plain),
                _interval(cost.fit.fixed) if cost.fit.separate else Cell("–", note="not told apart"),
                _interval(cost.fit.per_token),
                Cell(significant(now.break_even, 3), "estimated", f"at depth {now.depth}") if now else Cell("–"),
                Cell(significant(now.accept_length, 3), note="by position") if now else Cell("–"),
                Cell(str(depths.best.depth), "estimated", f"{significant(depths.best.tok_s, 3)} tok/s")
                if depths
                else Cell("–"),
            )
        )
    return Table(
        "Step time = plain + fixed (once it drafts) + per draft token. In brackets: 95 % interval over prompts. "
        "Best depth: most tok/s of all depths up to the deepest seen, 0 is plain decoding.",
        (
            Column("Variant"),
            Column("Plain step", "ms", numeric=True),
            Column("Fixed", "ms", numeric=True),
            Column("Per draft token", "ms", numeric=True),
            Column("Break-even", "tokens/step", numeric=True),
            Column("Accept length", "tokens/step", numeric=True),
            Column("Best depth", "drafts", numeric=True),
        ),
        (Group(tuple(rows)),),
        phone="cards",
    )


def _depth_table(view: SpeculationView) -> Table:
    depths = view.depths
    assert depths is not None  # noqa: S101 - the caller has looked
    rows = tuple(
        (
            Cell(f"{row.depth}{' (best)' if row == depths.best else ''}"),
            Cell(significant(row.accept_length, 3)),
            Cell(significant(row.break_even, 3)),
            Cell(significant(row.step_ms, 3)),
            Cell(significant(row.tok_s, 3), "estimated"),
        )
        for row in depths.rows
    )
    return Table(
        f"{visible(view.variant)} by draft depth: measured acceptance by position over the fitted step time.",
        (
            Column("Drafts"),
            Column("Accept length", numeric=True),
            Column("Break-even", numeric=True),
            Column("Step", "ms", numeric=True),
            Column("Speed", "tok/s", numeric=True),
        ),
        (Group(rows),),
    )


def _trade_table(views: Sequence[SpeculationView]) -> Table:
    rows = []
    for view in views:
        found = view.trade
        assert found is not None  # noqa: S101 - the caller has looked
        trade = found.trade
        rows.append(
            (
                Cell(visible(view.variant), note=f"against {visible(found.reference)}, {found.prompts} prompts"),
                Cell(percent(trade.bytes_saved) if trade.bytes_saved is not None else "–", "modelled"),
                _interval(found.accept_ratio),
                Cell(significant(trade.speed_ratio, 3), "measured"),
                Cell(significant(trade.net_ratio, 3), "measured"),
                Cell(significant(trade.break_even, 3), "measured"),
            )
        )
    return Table(
        "What a lower precision saves and what it costs in acceptance, against the same model in more bytes. Net above "
        "1 is faster. Break-even: the accept length at which it is as fast.",
        (
            Column("Variant"),
            Column("Bytes saved", numeric=True),
            Column("Accept length", "ratio", numeric=True),
            Column("Steps/s", "ratio", numeric=True),
            Column("Net tok/s", "ratio", numeric=True),
            Column("Break-even", "tokens/step", numeric=True),
        ),
        (Group(tuple(rows)),),
        phone="cards",
    )


def iso_figure(diagnosis: Diagnosis, grid: IsoGrid) -> Figure:
    """Return lines of equal tok/s over achieved bandwidth and accept length, and one point a variant."""
    low, top = grid.accept_lengths[0], grid.accept_lengths[-1]
    roof = grid.roof_gb_per_s
    # Far below the roof, an axis that reached it would put every point onto its left edge.
    most = 2.5 * max(point.gb_per_s for point in grid.points)
    right = 1.06 * roof if most > 0.5 * roof else most
    fastest_rate = top * min(right, roof) * 1e9 / grid.bytes_per_step
    rates = _round_rates(fastest_rate)
    data: list[dict[str, Any]] = []
    for rate in rates:
        product = rate * grid.bytes_per_step / 1e9
        xs, ys = [], []
        for index in range(61):
            length = low + (top - low) * index / 60
            if product / length <= min(right, roof):
                xs.append(round(product / length, 2))
                ys.append(round(length, 3))
        if len(xs) > 1:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+text",
                    "showlegend": False,
                    "x": xs,
                    "y": ys,
                    "text": [*[""] * (len(xs) - 1), f"{rate:,.0f}"],
                    "textposition": "bottom right",
                    "textfont": {"size": 10, "color": "#7d828c"},
                    "line": {"width": 1, "color": "rgba(125,130,140,0.5)"},
                    "hovertemplate": f"{rate:,.0f} tok/s<extra></extra>",
                }
            )
    names = [variant.name for variant in diagnosis.variants]
    labels = figure_labels(names)
    for point in grid.points:
        index = names.index(point.name)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": labels[index],
                "x": [round(point.gb_per_s, 2)],
                "y": [round(point.accept_length, 3)],
                "marker": {"size": 12, "symbol": MARKERS[index % len(MARKERS)], "color": variant_colour(index)},
                "hovertemplate": f"{labels[index]}<br>{significant(point.tok_s, 3)} tok/s, accept length %{{y:.2f}}, "
                "%{x:,.0f} GB/s<extra></extra>",
            }
        )
    layout: dict[str, Any] = {
        "height": 400,
        "dragmode": False,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "bytes of a step over its time (GB/s)"}, "range": [0, right]},
        "yaxis": {"title": {"text": "accept length (tokens/step)"}, "range": [0.8, top + 0.2]},
    }
    if right > roof:
        line = {"type": "line", "x0": roof, "x1": roof, "y0": 0, "y1": 1, "yref": "paper"}
        layout["shapes"] = [line | {"line": {"width": 2, "color": "#7d828c"}}]
        note = {"x": roof, "y": 1, "yref": "paper", "text": figure_text("measured roof"), "showarrow": False}
        layout["annotations"] = [note | {"xanchor": "right", "yanchor": "top", "font": {"size": 11}}]
    return {"data": data, "layout": layout}


def _round_rates(most: float) -> list[float]:
    """Return up to LINES rates of 1, 2 or 5 times a power of ten, the fastest below ``most``."""
    rates = [factor * 10.0**power for power in range(-3, 9) for factor in (1, 2, 5)]
    return [rate for rate in rates if rate < most][-LINES:]

"""The page of a comparison: the same parts as a report's, as differences from a pinned baseline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.comparison.compare import RunComparison, VariantComparison
from workbench.diagnose.facts import Facts
from workbench.diagnose.numbers import significant
from workbench.diagnose.step_picture import step_pictures
from workbench.diagnose.summary import VariantSummary
from workbench.gate.fingerprint import Difference
from workbench.reports import compare_text
from workbench.reports.blocks import Block, FigureBlock, FigureRow, FoldBlock, Section, TableBlock, TextBlock
from workbench.reports.device_sections import drawn, known_roofline
from workbench.reports.figures import MARKERS, Figure
from workbench.reports.labels import figure_labels, figure_text, visible
from workbench.reports.palette import VARIANTS, cause_colour
from workbench.reports.plotly_config import DASHES, pattern
from workbench.reports.roofline_figure import roofline_figure
from workbench.reports.step_figure import FEWER_CELLS, groups, step_figure
from workbench.reports.table import Cell, Column, Group, Row, Table
from workbench.trace.bundle import Bundle

BASE, HEAD = "baseline", "this run"
ROW_PIXELS = 26
MAX_FACTS = 60


@dataclass(frozen=True, slots=True)
class Compared:
    """Everything the page is made of."""

    base: Bundle
    head: Bundle
    found: RunComparison


def title(compared: Compared) -> str:
    """Return the title of the page."""
    name = str(compared.head.manifest.scenario.get("name", ""))
    return f"Comparison: {visible(name)}" if name else "Comparison"


def answer(compared: Compared) -> str:
    """Return the one sentence: what happened to the fastest variant, and through what."""
    text = visible(compare_text.sentence(compared.found.variants[0]), 600)
    return text.replace(" %", "\u00a0%").replace(" tok/s", "\u00a0tok/s") + "."


def warnings(compared: Compared) -> tuple[str, ...]:
    """Return what a reader must know first: another machine, an unfinished run."""
    found = []
    if compared.found.machine:
        names = ", ".join(one.name for one in compared.found.machine[:5])
        found.append(f"The environments differ in {len(compared.found.machine)} facts ({visible(names)}): see below.")
    for whose, bundle in ((BASE, compared.base), (HEAD, compared.head)):
        if bundle.manifest.state != "sealed":
            found.append(f"The bundle of the {whose} is {bundle.manifest.state}.")
    return tuple(found)


def sections(compared: Compared) -> tuple[Section, ...]:
    """Return the sections of the page in reading order."""
    made = (_speed, _causes, _steps, _roofs, _kernels, _acceptance, _findings, _environment)
    return tuple(section for section in (make(compared) for make in made) if section is not None)


def _speed(compared: Compared) -> Section:
    found = compared.found
    rows = tuple(
        (
            Cell(visible(one.name), note=f"paired by {one.sides.pairing}, {one.sides.units} units"),
            Cell(compare_text.side_text(one.sides.base), one.base.tok_s.tag),
            Cell(compare_text.side_text(one.sides.head), one.head.tok_s.tag),
            Cell(compare_text.change_text(one.speed)),
            Cell(compare_text.change_text(one.length) if one.length.log or one.length.significant else "="),
            Cell(compare_text.change_text(one.rate)),
        )
        for one in found.variants
    )
    columns = (
        Column("Variant"),
        Column("Baseline", "tok/s", numeric=True),
        Column("This run", "tok/s", numeric=True),
        Column("Change of tok/s"),
        Column("through accept length"),
        Column("through steps per second"),
    )
    caption = (
        "± and brackets: 95 % intervals. ~: not significant, the interval holds no change. The two parts multiply to "
        "the change, exactly."
    )
    blocks: list[Block] = [TableBlock(Table(caption, columns, (Group(rows),), "cards"))]
    blocks += [
        TextBlock(f"{visible(text[:1].upper() + text[1:], 400)}.", "muted") for text in compare_text.notes(found)
    ]
    return Section("speed", "How much faster or slower", "", tuple(blocks))


def _causes(compared: Compared) -> Section:
    first, *others = compared.found.variants
    blocks = _cause_blocks(first, 0)
    inner = [block for place, one in enumerate(others, 1) for block in _cause_blocks(one, place)]
    if inner:
        blocks.append(FoldBlock(f"{len(others)} more variants", tuple(inner)))
    intro = (
        "The step time of an average step by cause, and what each difference did to tok/s. The parts of tok/s multiply "
        "to the change, exactly; below 0 it cost speed."
    )
    return Section("causes", "Through what", intro, tuple(blocks))


def _cause_blocks(one: VariantComparison, place: int) -> list[Block]:
    name = visible(one.name)
    rows: list[Row] = []
    if one.length_all:
        length = compare_text.percent_text(one.length_all)
        before, after = (significant(side.accept_length.value, 3) for side in (one.base, one.head))
        rows.append((Cell("accept length"), Cell(before), Cell(after), Cell("tokens/step"), Cell(length)))
    for cells, cause in zip(compare_text.cause_rows(one), [*one.causes, None], strict=True):
        colour = cause.name if cause else ""
        tag = cause.tag if cause else "measured"
        rows.append(
            (Cell(cells[0], colour=colour), Cell(cells[1]), Cell(cells[2], tag), Cell(cells[3]), Cell(cells[4]))
        )
    table = Table(
        f"{name}: ms of an average step, and the part of the change of tok/s.",
        (
            Column("Cause"),
            Column("Baseline", "ms", numeric=True),
            Column("This run", "ms", numeric=True),
            Column("Difference", "ms", numeric=True),
            Column("Part of tok/s", numeric=True),
        ),
        (Group(tuple(rows[:-1]), total=rows[-1]),),
    )
    figure = FigureBlock(
        f"chain-{place}",
        chain_figure(one),
        f"{name}: from no change to the change of tok/s. Right: faster. Hatched: estimated.",
        "Bars of what each cause did to tok/s; the table below holds the numbers.",
    )
    return [figure, TableBlock(table)]


def chain_figure(one: VariantComparison) -> Figure:
    """Return a waterfall from 0 to ln(tok/s head / base) in percent of log, one bar a part, the last the whole."""
    parts: list[tuple[str, float, str, Any]] = []
    if one.length_all:
        parts.append(("accept length", one.length_all, VARIANTS[3], one.head.accept_length.tag))
    kept = [cause for cause in one.causes if abs(cause.log) >= 0.0005]
    parts += [(cause.name, cause.log, cause_colour(cause.name), cause.tag) for cause in kept]
    left = one.rate_all - sum(cause.log for cause in kept)
    if abs(left) >= 0.0005:
        parts.append(("the others", left, "#7d828c", "estimated"))
    total = one.length_all + one.rate_all
    data, reach, edges = [], 0.0, [0.0, total]
    for place, (name, log, colour, tag) in enumerate([*parts, ("tok/s", total, "#5d6675", "measured")]):
        base = 0.0 if place == len(parts) else reach
        reach = base + log
        edges += [base, reach]
        text = compare_text.percent_text(log)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": [place],
                "base": [round(100 * base, 4)],
                "x": [round(100 * log, 4)],
                "marker": {"color": colour, "pattern": pattern([tag]), "line": {"width": 0}},
                "text": [text],
                "textposition": "outside",
                "cliponaxis": False,
                "hovertext": [f"{figure_text(name)}: {text} of tok/s ({tag})"],
                "hoverinfo": "text",
            }
        )
    labels = [*(figure_text(part[0]) for part in parts), "tok/s"]
    low, high = 100 * min(edges), 100 * max(edges)
    room = max(0.18 * (high - low), 0.5)
    layout: dict[str, Any] = {
        "height": 84 + ROW_PIXELS * len(labels),
        "barmode": "overlay",
        "bargap": 0.25,
        "dragmode": False,
        "showlegend": False,
        "xaxis": {"title": {"text": "part of ln tok/s (× 100)"}, "range": [low - room, high + room], "zeroline": True},
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


def _sides(compared: Compared, one: VariantComparison) -> tuple[tuple[str, Bundle, VariantSummary], ...]:
    return ((BASE, compared.base, one.base), (HEAD, compared.head, one.head))


def _steps(compared: Compared) -> Section | None:
    one = compared.found.variants[0]
    blocks: list[Block] = []
    for word, bundle, side in _sides(compared, one):
        facts = Facts(bundle, side.name)
        roof = facts.floor.bytes_per_s / 1e9 if facts.floor and "cpu" not in facts.device else None
        for picture in step_pictures(facts)[:1]:
            wall = significant(picture.wall_ns / 1e6)
            text = f"{word}, {visible(side.name)}: the median {picture.run_pass} step, {wall} ms"
            blocks.append(TextBlock(text[:1].upper() + text[1:], "lead"))
            blocks.append(
                FigureBlock(
                    f"step-{word.replace(' ', '-')}",
                    step_figure(picture, roof, cells=FEWER_CELLS),
                    f"Step {picture.step_id}. Each row names the pass it comes from.",
                    "Rows of one step over time: phases, memory traffic, CTAs, kernels, idle time, calls and waits.",
                    groups(picture),
                )
            )
    if not blocks:
        return None
    return Section("timeline", "One step of each", "The axes differ: each step has its own length.", tuple(blocks))


def _roofs(compared: Compared) -> Section | None:
    one = compared.found.variants[0]
    figures = []
    for word, bundle, side in _sides(compared, one):
        found = known_roofline(Facts(bundle, side.name), side)
        if found.points:
            figures.append(
                FigureBlock(
                    f"roofline-{word.replace(' ', '-')}",
                    roofline_figure(drawn(found)),
                    f"{word}, {visible(side.name)}.",
                    "Points of bandwidth over bytes per accepted token under the roofs.",
                )
            )
    return Section("roofline", "Rooflines", "", (FigureRow(tuple(figures)),)) if figures else None


def _kernels(compared: Compared) -> Section | None:
    blocks: list[Block] = []
    for place, one in enumerate(compared.found.variants):
        rows = compare_text.moved_rows(one)
        if not rows:
            continue
        left = len(one.moved) - len(rows)
        more = f" {left} smaller changes are left out." if left else ""
        table = Table(
            f"{visible(one.name)}: µs a step, those of the clean step.{more}",
            (
                Column("Kernel or operator"),
                Column("Where"),
                Column("Baseline", "µs", numeric=True),
                Column("This run", "µs", numeric=True),
                Column("Difference", "µs", numeric=True),
                Column("Calls", "per step", numeric=True),
            ),
            (Group(tuple(tuple(Cell(visible(cell, 80)) for cell in row) for row in rows)),),
            "cards",
        )
        blocks.append(TableBlock(table, "" if place == 0 else visible(one.name)))
    return Section("kernels", "Kernels that moved", "", tuple(blocks)) if blocks else None


def _acceptance(compared: Compared) -> Section | None:
    drafting = [one for one in compared.found.variants if one.base.positions or one.head.positions]
    if not drafting:
        return None
    shown = drafting[:4]
    left = len(drafting) - len(shown)
    figure = FigureBlock(
        "survival",
        acceptance_figure(shown),
        "Dashed: the baseline." + (f" {left} more variants draft and are not drawn." if left else ""),
        "Share of surviving drafts by position, a solid and a dashed line a variant.",
    )
    rows = tuple(
        (
            Cell(visible(one.name)),
            Cell(significant(one.base.accept_length.value, 3), one.base.accept_length.tag),
            Cell(significant(one.head.accept_length.value, 3), one.head.accept_length.tag),
            Cell(compare_text.change_text(one.length) if one.length.log or one.length.significant else "="),
        )
        for one in drafting
    )
    columns = (
        Column("Variant"),
        Column("Baseline", "tokens/step", numeric=True),
        Column("This run", "tokens/step", numeric=True),
        Column("Change"),
    )
    table = Table("Accept length, the bonus token included.", columns, (Group(rows),), "cards")
    return Section("acceptance", "Acceptance", "", (figure, TableBlock(table)))


def acceptance_figure(variants: Sequence[VariantComparison]) -> Figure:
    """Return survival by draft position: solid this run, dashed the baseline."""
    labels = figure_labels([one.head.name for one in variants])
    data: list[dict[str, Any]] = []
    for index, (one, label) in enumerate(zip(variants, labels, strict=True)):
        for side, word, dash in ((one.base, BASE, DASHES["estimated"]), (one.head, HEAD, DASHES["measured"])):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{label}, {word}",
                    "x": [at.position for at in side.positions],
                    "y": [round(100 * at.rate, 3) for at in side.positions],
                    "line": {"color": VARIANTS[index % len(VARIANTS)], "dash": dash, "width": 2},
                    "marker": {"symbol": MARKERS[index % len(MARKERS)], "size": 7},
                    "hovertemplate": "position %{x}: %{y:.1f} %<extra>%{fullData.name}</extra>",
                }
            )
    layout = {
        "height": 320,
        "dragmode": False,
        "xaxis": {"title": {"text": "draft position"}, "dtick": 1},
        "yaxis": {"title": {"text": "drafts that survive (%)"}, "range": [0, 104]},
    }
    return {"data": data, "layout": layout}


def _findings(compared: Compared) -> Section:
    groups_ = []
    for one in compared.found.variants:
        rows = tuple(
            (
                Cell(visible(change.title), note=change.id),
                Cell(change.change),
                Cell(compare_text.gain_text(change.base_gain)),
                Cell(compare_text.gain_text(change.head_gain)),
            )
            for change in one.findings
        )
        if rows:
            groups_.append(Group(rows, visible(one.name)))
    if not groups_:
        return Section("findings", "Findings", "", (TextBlock("Neither run has a finding."),))
    table = Table(
        "What each finding would give back if its loss were gone; a dash: not known, or not found.",
        (
            Column("Finding"),
            Column("Since the baseline"),
            Column("Baseline", "tok/s", numeric=True),
            Column("This run", "tok/s", numeric=True),
        ),
        tuple(groups_),
    )
    return Section("findings", "Findings that appeared, vanished, stayed", "", (TableBlock(table),))


def _environment(compared: Compared) -> Section:
    found = compared.found
    blocks: list[Block] = []
    named = {
        "created (UTC)": [bundle.manifest.created for bundle in (compared.base, compared.head)],
        "scenario": [str(bundle.manifest.scenario.get("name", "")) for bundle in (compared.base, compared.head)],
        "workbench": [bundle.manifest.tool_version for bundle in (compared.base, compared.head)],
    }
    rows = [(Cell(name), Cell(visible(pair[0])), Cell(visible(pair[1]))) for name, pair in named.items()]
    columns = (Column("Fact"), Column("Baseline"), Column("This run"))
    blocks.append(TableBlock(Table("Which runs these are.", columns, (Group(tuple(rows)),))))
    if found.machine:
        blocks.append(TableBlock(Table("Facts in which the machines differ.", columns, (_differences(found.machine),))))
    else:
        blocks.append(TextBlock("No recorded fact of machine or software differs."))
    settings = [Group(_differences(one.settings).rows, visible(one.name)) for one in found.variants if one.settings]
    if settings:
        blocks.append(TableBlock(Table("Settings in which the variants differ.", columns, tuple(settings))))
    return Section("environment", "What differs around it", "", tuple(blocks))


def _differences(found: Sequence[Difference]) -> Group:
    return Group(
        tuple(
            (Cell(visible(one.name)), Cell(visible(str(one.base), 200)), Cell(visible(str(one.head), 200)))
            for one in found[:MAX_FACTS]
        )
    )

"""Sections on what the device did: roofline, one step in full, kernels. The fastest variant open, the others folded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.diagnose.facts import Facts
from workbench.diagnose.kernel_account import counted_points, kernel_account
from workbench.diagnose.load_split import PROFILED
from workbench.diagnose.numbers import byte_text, percent, significant
from workbench.diagnose.roofline import Point, Roofline, roofline
from workbench.diagnose.step_picture import StepPicture, step_pictures
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.reports.blocks import Block, FigureBlock, FoldBlock, Section, TableBlock, TextBlock
from workbench.reports.kernel_tables import kernel_table, kernels_sentence
from workbench.reports.labels import visible
from workbench.reports.roofline_figure import roofline_figure
from workbench.reports.step_figure import CELLS, FEWER_CELLS, groups, step_figure
from workbench.reports.table import Cell, Column, Group, Table, number

Variants = Sequence[VariantSummary]
ByName = Mapping[str, Facts]

POINTS = 12
LEAST = 1e-3
"""Bytes of a point, of those of the largest one, below which it stands in the table alone."""
FIRST_KERNELS, MORE_KERNELS = 15, 85
OTHER_KERNELS = 12


def roofline_section(diagnosis: Diagnosis, best: VariantSummary, others: Variants, facts: ByName) -> Section | None:
    """Return the rooflines; None where no variant has a point."""
    found = {variant.name: known_roofline(facts[variant.name], variant) for variant in (best, *others)}
    if not any(one.points for one in found.values()):
        return None
    blocks = _roofline_blocks(diagnosis, best, found[best.name])
    rest = [one for one in others if found[one.name].points]
    inner = [block for one in rest for block in _roofline_blocks(diagnosis, one, found[one.name])]
    if inner:
        blocks.append(FoldBlock(f"Rooflines of {len(rest)} more variants", tuple(inner)))
    intro = (
        "Bandwidth reached against bytes per accepted token; their quotient is tok/s. The roofs: the data sheet's "
        "bandwidth, what reading reached on this very device, and that at the memory clock of the run."
    )
    return Section("roofline", "Roofline", intro, tuple(blocks))


def known_roofline(facts: Facts, variant: VariantSummary) -> Roofline:
    """Return the roofline with kernels whose bytes follow from the sampled pass."""
    found = roofline(facts.bundle, variant)
    extra = counted_points(facts, found)
    if not extra:
        return found
    ns = sum(point.total_ns for point in extra)
    points = tuple(sorted((*found.points, *extra), key=lambda point: (-point.total_ns, point.name)))
    unknown = found.unknown_kernels - len(extra)
    return replace(found, points=points, unknown_kernels=unknown, unknown_ns=max(0, found.unknown_ns - ns))


def _roofline_blocks(diagnosis: Diagnosis, variant: VariantSummary, found: Roofline) -> list[Block]:
    impossible = [point for point in found.points if point.impossible]
    caption = f"{visible(variant.name)}. The area of a point goes with its time; diagonals join equal tok/s."
    figure = FigureBlock(
        f"roofline-{diagnosis.variants.index(variant)}",
        roofline_figure(drawn(found)),
        f"{caption} A red cross lies above a roof and is impossible." if impossible else caption,
        "Points of bandwidth over bytes per accepted token under the roofs; the table below holds the numbers.",
    )
    blocks: list[Block] = [figure]
    blocks += [TextBlock(f"{visible(point.name, 60)}: {point.verdict()}.", "warning") for point in impossible[:3]]
    blocks.append(TableBlock(_points_table(found), f"The points of {visible(variant.name)} in numbers"))
    if found.unknown_kernels > 0:
        unknown = f"{found.unknown_kernels} kernels by name, {significant(found.unknown_ns / 1e6, 3)} ms of the trace"
        why = "whose bytes nothing counted: they are shorter than samples resolve, or nothing was sampled"
        blocks.append(TextBlock(f"Not in the picture: {unknown}, {why}.", "muted"))
    return blocks


def drawn(found: Roofline) -> Roofline:
    """Return the roofline without points of next to no bytes, which would stretch the axes over ten decades."""
    most = max((point.bytes_per_token.value for point in found.points if point.bytes_per_token), default=0.0)
    kept = tuple(
        point
        for point in found.points
        if point.impossible or (point.bytes_per_token and point.bytes_per_token.value >= LEAST * most)
    )
    return replace(found, points=kept)


def _points_table(found: Roofline) -> Table:
    shown = found.points[:POINTS]
    left = len(found.points) - len(shown)

    def row(point: Point) -> tuple[Cell, ...]:
        share = _roof_share(found, point)
        return (
            Cell(visible(point.name, 60), note=f"{point.kind}, {point.run_pass} pass"),
            Cell(f"{point.calls:,}"),
            Cell(significant(point.total_ns / 1e6)),
            Cell(byte_text(point.bytes_per_call.value), point.bytes_per_call.tag),
            number(point.achieved),
            Cell(percent(share) if share is not None else "–"),
            Cell(point.verdict() or visible(point.achieved.note, 120)),
        )

    roofs = ", ".join(
        f"{roof.name} {significant(roof.bandwidth.value)} GB/s ({roof.bandwidth.tag})" for roof in found.roofs
    )
    more = f" {left} shorter points are left out." if left else ""
    return Table(
        f"Roofs: {roofs or 'none known'}.{more}",
        (
            Column("What"),
            Column("Times", numeric=True),
            Column("Time", "ms", numeric=True),
            Column("Bytes each", numeric=True),
            Column("Reached", "GB/s", numeric=True),
            Column("Of the measured roof", numeric=True),
            Column("How it is known", remark=True),
        ),
        (Group(tuple(map(row, shown))),),
        phone="cards",
    )


def _roof_share(found: Roofline, point: Point) -> float | None:
    measured = next((roof for roof in found.roofs if roof.name == "measured"), None)
    return point.achieved.value / measured.bandwidth.value if measured else None


def timeline_section(diagnosis: Diagnosis, best: VariantSummary, others: Variants, facts: ByName) -> Section | None:
    """Return the median and the worst step of every variant."""
    blocks = _step_blocks(diagnosis, best, facts[best.name], CELLS)
    if not blocks:
        return None
    rest = [(one, _step_blocks(diagnosis, one, facts[one.name], FEWER_CELLS)) for one in others]
    rest = [(one, inner) for one, inner in rest if inner]
    blocks += [FoldBlock(f"Steps of {visible(one.name)}", tuple(inner)) for one, inner in rest]
    intro = (
        "All signals of one step on one axis. No two instruments run in the same step, so each row names the pass and "
        "the step it comes from; counters and stamps are brought onto the traced step by when the device begins and "
        "ends work. A traced step is longer than a real one: read the order and the proportions, not the totals."
    )
    return Section("timeline", "One step in full", intro, tuple(blocks))


def _step_blocks(diagnosis: Diagnosis, variant: VariantSummary, facts: Facts, cells: int) -> list[Block]:
    measured = facts.floor.bytes_per_s / 1e9 if facts.floor and "cpu" not in facts.device else None
    blocks: list[Block] = []
    place = diagnosis.variants.index(variant)
    pictures = step_pictures(facts)
    for picture in pictures:
        blocks.append(TextBlock(_step_title(picture), "lead"))
        blocks.append(
            FigureBlock(
                f"step-{place}-{picture.which}",
                step_figure(picture, measured, cells=cells),
                _step_caption(picture, measured, cells),
                "Rows of one step over time: phases, memory traffic, CTAs, kernels, idle time, calls and waits.",
                groups(picture),
            )
        )
    if blocks:
        missing = dict.fromkeys(text for picture in pictures for text in picture.missing)
        blocks += [TextBlock(f"Not shown: {visible(text, 300)}.", "muted") for text in missing]
    return blocks


def _step_title(picture: StepPicture) -> str:
    length = f", accept length {picture.committed}" if picture.committed >= 0 else ""
    drafted = f" from {picture.drafted} drafts" if picture.drafted > 0 else ""
    return (
        f"{visible(picture.variant)}, {picture.which} {picture.run_pass} step: "
        f"{significant(picture.wall_ns / 1e6)} ms{length}{drafted}"
    )


def _step_caption(picture: StepPicture, roof: float | None, cells: int) -> str:
    parts = [f"Step {picture.step_id} of the {picture.run_pass} pass."]
    if picture.clean_wall_ns and picture.run_pass in PROFILED:
        stretch = picture.wall_ns / picture.clean_wall_ns
        parts.append(
            f"The median clean step takes {significant(picture.clean_wall_ns / 1e6)} ms, so this one is "
            f"{significant(stretch, 3)} times as long."
        )
    if roof and picture.signals:
        parts.append(f"Dotted: the measured roof, {significant(roof)} GB/s.")
    if picture.lanes is not None:
        own = f"step {picture.lanes.step_id}, {significant(picture.lanes.own_wall_ns / 1e6)} ms"
        parts.append(f"What the CTAs do is from the laned pass, {own}, with stamps compiled in.")
    if any(len(row) > cells for row in picture.rows):
        parts.append(f"Spans shorter than {significant(picture.wall_ns / cells / 1e3, 2)} µs are drawn together.")
    return " ".join(parts)


def kernel_section(diagnosis: Diagnosis, best: VariantSummary, others: Variants, facts: ByName) -> Section | None:
    """Return the kernel tables; None where no kernel was traced."""
    rows = kernel_account(facts[best.name], roofline(facts[best.name].bundle, best))
    blocks: list[Block] = []
    if rows:
        first, more = rows[:FIRST_KERNELS], rows[FIRST_KERNELS : FIRST_KERNELS + MORE_KERNELS]
        blocks.append(TextBlock(f"{visible(best.name)}: {kernels_sentence(rows)}", "lead"))
        blocks.append(TableBlock(kernel_table(first)))
        if more:
            left = len(rows) - len(first) - len(more)
            unseen = f"{left} more are in the bundle." if left else ""
            blocks.append(TableBlock(kernel_table(more, unseen), f"{len(more)} shorter kernels"))
    for variant in others:
        own = kernel_account(facts[variant.name], roofline(facts[variant.name].bundle, variant))
        if own:
            shown = own[:OTHER_KERNELS]
            unseen = f"{len(own) - len(shown)} shorter kernels are left out." if len(own) > len(shown) else ""
            inner: tuple[Block, ...] = (TextBlock(kernels_sentence(own)), TableBlock(kernel_table(shown, unseen)))
            blocks.append(FoldBlock(f"Kernels of {visible(variant.name)}", inner))
    if not blocks:
        return None
    return Section("kernels", "Kernels", "", tuple(blocks))

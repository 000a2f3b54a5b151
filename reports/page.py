"""What stands on the page of a report, in order: sections of texts, figures and tables."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from workbench.diagnose.byte_model import byte_classes
from workbench.diagnose.distribution import StepTimes, step_times
from workbench.diagnose.facts import Facts
from workbench.diagnose.headline import fastest, headline
from workbench.diagnose.numbers import percent
from workbench.diagnose.quality import instrument_costs, limits
from workbench.diagnose.speculation import BreakEven, break_even
from workbench.diagnose.speculation_view import iso_view, speculation_view
from workbench.diagnose.steps import Steps, load_steps
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.reports import device_sections, figures, ingested_tables, quality_tables, tables
from workbench.reports.blocks import (
    Block,
    FigureBlock,
    FigureRow,
    FoldBlock,
    Section,
    SourceBlock,
    TableBlock,
    TextBlock,
)
from workbench.reports.finding_blocks import TopFinding, finding_blocks, top_findings
from workbench.reports.labels import visible
from workbench.reports.ladder_tables import ladder_figure, ladder_table
from workbench.reports.speculation_page import speculation_section
from workbench.reports.waterfall_figure import waterfall_figure
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict, verdict

SOURCE_LIMIT = 200_000
"""Characters of the scenario that a report prints."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything a page is made of: the bundle, its diagnosis, and by variant what is derived from both."""

    bundle: Bundle
    diagnosis: Diagnosis
    against_plain: dict[str, BreakEven | None]
    steps: dict[str, Steps]
    times: dict[str, StepTimes]
    verdict: Verdict
    facts: dict[str, Facts]

    @property
    def best(self) -> VariantSummary:
        """The variant that the page is about in the first place: the fastest."""
        return fastest(self.diagnosis)

    @property
    def others(self) -> tuple[VariantSummary, ...]:
        """All other variants, in the order of the scenario."""
        return tuple(variant for variant in self.diagnosis.variants if variant is not self.best)


def gather(bundle: Bundle, diagnosis: Diagnosis) -> Findings:
    """Read from ``bundle`` what a page shows beside its diagnosis."""
    names = [variant.name for variant in diagnosis.variants]
    steps = {name: load_steps(bundle, name) for name in names}
    judged = verdict(bundle)
    return Findings(
        bundle,
        diagnosis,
        {name: break_even(bundle, name) for name in names},
        steps,
        {name: step_times(one) for name, one in steps.items()},
        judged,
        {name: Facts(bundle, name, judged) for name in names},
    )


def title(diagnosis: Diagnosis) -> str:
    """Return the title of the page."""
    return f"Decode report: {visible(diagnosis.scenario)}" if diagnosis.scenario else "Decode report"


def answer(diagnosis: Diagnosis) -> str:
    """Return the one sentence that answers how fast, how far from the roof and what is in the way."""
    return headline(diagnosis, name=visible).replace(" %", "\u00a0%").replace(" tok/s", "\u00a0tok/s")


def warnings(findings: Findings) -> tuple[str, ...]:
    """Return what a reader must know before any number: an unfinished run, lost data, variants without a step."""
    manifest = findings.bundle.manifest
    found = []
    if manifest.state == "failed":
        found.append(f"The run failed: {visible(manifest.failure, 400) or 'no reason given'}. Numbers cover what ran.")
    elif manifest.state == "salvaged":
        found.append("The run was cut off and its bundle salvaged. Numbers cover what was saved.")
    if findings.diagnosis.failed:
        names = ", ".join(map(visible, findings.diagnosis.failed))
        found.append(f"Without a single measured step, and left out: {names}.")
    severe = sorted({row["probe"] for row in findings.bundle.table("losses").to_pylist() if row["severity"] != "info"})
    if severe:
        found.append(f"Records were lost ({', '.join(map(visible, severe))}): see data quality.")
    doubts = [one for one in findings.best.findings if one.severity == "critical" and one.recoverable is None]
    found += [f"{visible(one.title)}. {visible(one.sentence, 400)}" for one in doubts]
    return tuple(found)


def top(findings: Findings) -> tuple[TopFinding, ...]:
    """Return what is in the way of the fastest variant: the findings that would give most back."""
    return top_findings(findings.diagnosis, findings.best)


def sections(findings: Findings, leave_out: Collection[str] = ()) -> tuple[Section, ...]:
    """Return the sections of the page in reading order; those with nothing to say are left out.

    ``leave_out``: ids of sections that are not wanted; what they take to make is saved.
    """
    made = (make(findings) for name, make in _SECTIONS.items() if name not in leave_out)
    return tuple(section for section in made if section is not None)


def _speed(findings: Findings) -> Section:
    table = tables.headline_table(findings.diagnosis, findings.against_plain)
    return Section("speed", "How fast, and how far from the roof", "", (TableBlock(table),))


def _causes(findings: Findings) -> Section:
    diagnosis = findings.diagnosis
    drawn = figures.step_time_figure(diagnosis)
    drawn["layout"]["showlegend"] = False
    marks = "Solid: measured. Hatched: estimated. Crossed: modelled."
    figure = FigureBlock(
        "step-time",
        drawn,
        marks,
        "Stacked bars of the step time by cause, one a variant; the table below holds the numbers.",
        tuple(dict.fromkeys(cause.name for variant in diagnosis.variants for cause in variant.accounting.causes)),
    )
    best, others = findings.best, findings.others

    def waterfall(variant: VariantSummary) -> FigureBlock:
        return FigureBlock(
            f"waterfall-{diagnosis.variants.index(variant)}",
            waterfall_figure(variant),
            f"{visible(variant.name)}, from the floor to the wall time of an average step. {marks}",
            "Bars of the causes, each beginning where the one before ended; the table below holds the numbers.",
        )

    blocks: list[Block] = [waterfall(best), TableBlock(tables.cause_table(diagnosis, (best,)))]
    if others:
        rest: list[Block] = []
        for variant in others:
            rest += [waterfall(variant), TableBlock(tables.cause_table(diagnosis, (variant,)))]
        blocks = [figure, *blocks, FoldBlock(_more("Waterfalls and causes", others), tuple(rest))]
    intro = (
        "The wall time of an average step, split into causes that add up to it. Times come from the clean pass, in "
        "which no instrument ran; what happened inside the verify forward is known as a share of the traced pass."
    )
    return Section("causes", "Where the time goes", intro, tuple(blocks))


def _more(what: str, others: Collection[Any]) -> str:
    return f"{what} of {len(others)} more variant{'s' * (len(others) != 1)}"


def _roofline(findings: Findings) -> Section | None:
    return device_sections.roofline_section(findings.diagnosis, findings.best, findings.others, findings.facts)


def _timeline(findings: Findings) -> Section | None:
    return device_sections.timeline_section(findings.diagnosis, findings.best, findings.others, findings.facts)


def _kernels(findings: Findings) -> Section | None:
    return device_sections.kernel_section(findings.diagnosis, findings.best, findings.others, findings.facts)


def _speculation(findings: Findings) -> Section | None:
    views = {name: speculation_view(facts) for name, facts in findings.facts.items()}
    best = findings.best
    floor = findings.facts[best.name].floor
    grid = iso_view(findings.diagnosis, best, floor.bytes_per_s / 1e9) if floor else None
    return speculation_section(findings.diagnosis, views, grid)


def _ladder(findings: Findings) -> Section | None:
    steps = findings.diagnosis.ladder
    if not steps:
        return None
    figure = FigureBlock(
        "ladder-speeds",
        ladder_figure(steps),
        "One row a rung: the rung below, what removing its losses promised, what this rung reached.",
        "Bars of tok/s before, predicted and measured, one row a rung; the table below holds the numbers.",
    )
    intro = (
        "If the accounting is right, a rung without the losses that the next one removes is as fast as the next one."
    )
    return Section(
        "ladder", "The ladder: predicted and measured gain", intro, (figure, TableBlock(ladder_table(steps)))
    )


def _found(findings: Findings) -> Section:
    diagnosis, best = findings.diagnosis, findings.best
    blocks: list[Block] = list(finding_blocks(diagnosis, best))
    if not blocks:
        blocks.append(TextBlock("No finding: nothing stands out above the noise and above 2 % of the tok/s."))
    if len(diagnosis.variants) > 1:
        blocks.insert(0, TextBlock(f"Of {visible(best.name)}, the fastest variant.", "lead"))
    for variant in findings.others:
        own = finding_blocks(diagnosis, variant)
        if own:
            blocks.append(FoldBlock(f"{visible(variant.name)}: {len(own)} finding{'s' * (len(own) != 1)}", own))
    intro = "What each loss would give back if it were gone, the most first. Gains of two findings do not add up."
    return Section("findings", "Findings", intro, tuple(blocks))


def _acceptance(findings: Findings) -> Section | None:
    diagnosis = findings.diagnosis
    if not any(variant.positions for variant in diagnosis.variants):
        return None
    figure = FigureBlock(
        "survival",
        figures.acceptance_figure(diagnosis),
        "A draft survives at a position when it and all before it were accepted.",
        "Share of surviving drafts by position, one line a drafting variant; the table below holds the numbers.",
    )
    table = TableBlock(tables.position_table(diagnosis.variants), "Numbers by position")
    return Section("acceptance", "Acceptance by draft position", "", (figure, table))


def _comparison(findings: Findings) -> Section:
    diagnosis, against = findings.diagnosis, findings.against_plain
    row = FigureRow(
        (
            FigureBlock(
                "speeds", figures.speed_figure(diagnosis), "Committed tokens over step time.", "Bars of tok/s."
            ),
            FigureBlock(
                "accept-lengths",
                figures.accept_length_figure(diagnosis, against),
                "Whisker: 95 % interval over prompts. Red mark: break-even accept length.",
                "Bars of accept length with intervals, marked at the break-even accept length.",
            ),
        )
    )
    blocks: tuple[Block, ...] = (row,)
    if any(against.values()):
        blocks += (TableBlock(tables.break_even_table(against)),)
    else:
        blocks += (TextBlock("No variant here can be compared with a plain twin: same settings, no drafter."),)
    intro = "Speculation pays when the accept length it reaches is above the ratio of the step times."
    return Section("comparison", "Speed across variants, and break-even", intro, blocks)


def _step_times(findings: Findings) -> Section:
    blocks: tuple[Block, ...] = (
        FigureBlock(
            "step-spread",
            figures.step_spread_figure(findings.steps),
            "A steep line: all steps alike. A long shoulder at the top: a few slow steps.",
            "Distribution of step times, one line a variant; the table below holds the percentiles.",
        ),
        TableBlock(tables.step_time_table(findings.times)),
    )
    uneven = {name: entry for name, entry in findings.times.items() if entry.uneven}
    if uneven:
        words = "; ".join(f"{visible(name)}: {percent(entry.slowest_tenth.value)}" for name, entry in uneven.items())
        blocks += (
            TextBlock(
                f"A few slow steps carry much of the time ({words} in the slowest tenth), so the mean, and "
                "tok/s with it, says little about a typical step. When they ran:",
                "warning",
            ),
            FigureBlock(
                "step-order",
                figures.step_order_figure({name: findings.steps[name] for name in uneven}),
                "Slow steps in one stretch point at the machine; spread evenly, at the pipeline.",
                "Step times in the order they ran.",
            ),
        )
    return Section("step-times", "Step times", "", blocks)


def _bytes(findings: Findings) -> Section | None:
    best = fastest(findings.diagnosis).name
    found = [(variant.name, byte_classes(findings.bundle, variant.name)) for variant in findings.diagnosis.variants]
    blocks = [
        TableBlock(tables.byte_table(name, classes), folded="" if name == best else visible(name))
        for name, classes in sorted(found, key=lambda entry: entry[0] != best)
        if classes
    ]
    if not blocks:
        return None
    roofs = findings.bundle.table("roofs").to_pylist()
    texts = [
        TextBlock(
            f"Roof of {visible(roof['device'])}, {visible(roof['name'])}: {roof['bytes_per_s'] / 1e9:,.1f} GB/s "
            f"({roof['tag']}: {visible(roof['note'], 300)})."
        )
        for roof in roofs
    ]
    intro = (
        "What a step reads by tensor class; these bytes over the roof are the floor. Steps that touch fewer experts or "
        "draft nothing read less, so the average in the first table may differ."
    )
    return Section("bytes", "Byte model", intro, (*texts, *blocks))


def _quality(findings: Findings) -> Section:
    bundle = findings.bundle
    manifest = bundle.manifest
    losses = bundle.table("losses").to_pylist()
    blocks: list[Block] = [TextBlock(f"Bundle: {manifest.state}. Schema version {manifest.schema_version}.")]
    blocks += [TextBlock(visible(note, 400)) for note in manifest.notes]
    judged = findings.verdict
    if judged.checks:
        worst = {"error": "not to be trusted as it is", "warning": "usable, with doubts", "info": "sound"}
        blocks.append(TextBlock(f"Verdict on the trace: {worst[judged.severity]}.", "lead"))
        blocks.append(TableBlock(ingested_tables.verdict_table(judged)))
        if judged.refusals:
            caption = "Times in this report come from the clean pass: what the trace cannot say is not taken from it."
            refusals = replace(ingested_tables.refusals_table(judged), caption=caption)
            blocks.append(TableBlock(refusals, "What the trace alone may not be asked"))
    else:
        blocks.append(TextBlock("Verdict on the trace: nothing is wrong with it.", "lead"))
    severe = [row for row in losses if row["severity"] != "info"]
    mild = [row for row in losses if row["severity"] == "info"]
    blocks.append(TableBlock(quality_tables.losses_table(severe)) if severe else TextBlock("No record was lost."))
    if mild:
        blocks.append(TableBlock(quality_tables.losses_table(mild), "Left out on purpose, or counted around"))
    costs = instrument_costs(bundle)
    blocks.append(
        TableBlock(quality_tables.cost_table(costs))
        if costs
        else TextBlock("What the instruments cost is not known: no step was both traced and run clean.")
    )
    if manifest.clock.sources:
        worst_ns = max(source.residual_ns for source in manifest.clock.sources)
        folded = f"Clock residuals: {len(manifest.clock.sources)} clocks, at most {worst_ns / 1e3:,.1f} µs apart"
        blocks.append(TableBlock(quality_tables.clock_table(manifest.clock), folded))
    blocks.append(TableBlock(quality_tables.rows_table(manifest.rows), "Rows by table"))
    return Section("quality", "Data quality", "", tuple(blocks))


def _limits(findings: Findings) -> Section:
    found = limits(findings.bundle)
    blocks: tuple[Block, ...] = (
        (TableBlock(quality_tables.limits_table(found)),) if found else (TextBlock("The run states no limit."),)
    )
    return Section("limits", "What could not be measured here", "", blocks)


def _environment(findings: Findings) -> Section:
    manifest = findings.bundle.manifest
    run = {
        "run": {
            "command": " ".join(manifest.command),
            "created (UTC)": manifest.created,
            "finished (UTC)": manifest.finished,
            "scenario sha256": manifest.scenario_sha256,
            "workbench": manifest.tool_version,
        },
        "device": manifest.device,
    }
    env = {row["key"]: row["value"] for row in findings.bundle.table("env").to_pylist()}
    table = quality_tables.facts_table("Where and how it ran.", run, manifest.environment, env)
    blocks = (
        TableBlock(table, "Environment"),
        SourceBlock("Scenario, all settings resolved", _scenario(manifest.scenario)),
    )
    return Section("environment", "Environment and scenario", "", blocks)


_SECTIONS: dict[str, Callable[[Findings], Section | None]] = {
    "speed": _speed,
    "roofline": _roofline,
    "causes": _causes,
    "timeline": _timeline,
    "kernels": _kernels,
    "acceptance": _acceptance,
    "comparison": _comparison,
    "speculation": _speculation,
    "ladder": _ladder,
    "findings": _found,
    "step-times": _step_times,
    "bytes": _bytes,
    "quality": _quality,
    "environment": _environment,
    "limits": _limits,
}
"""In reading order."""


def _scenario(scenario: dict[str, Any]) -> str:
    text = json.dumps(scenario, indent=2, sort_keys=True, ensure_ascii=False)
    return visible(text, SOURCE_LIMIT, keep="\n")

"""Findings as blocks of a page: the sentence, what it would give back, what to try, the rows of evidence."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.diagnose.finding import Finding
from workbench.diagnose.numbers import significant
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.quantity import Quantity, Tag
from workbench.reports.blocks import FindingBlock
from workbench.reports.labels import visible
from workbench.reports.table import Cell, Column, Group, Table

TOP = 3
IDS = 4
TEXT = 600


@dataclass(frozen=True, slots=True)
class TopFinding:
    """A line of the first screen: what is in the way, what it would give back, and where it stands in the page."""

    anchor: str
    title: str
    gain: str
    tag: Tag
    sentence: str


def top_findings(diagnosis: Diagnosis, variant: VariantSummary) -> tuple[TopFinding, ...]:
    """Return the findings of ``variant`` that would give most back."""
    return top_of(variant.findings, diagnosis.variants.index(variant))


def top_of(findings: Sequence[Finding], place: int = 0) -> tuple[TopFinding, ...]:
    """Return those of ``findings`` that would give most back. ``place``: that of their variant in the page."""
    found: list[TopFinding] = []
    for number, one in enumerate(findings):
        if one.recoverable is not None and one.recoverable.value > 0 and len(found) < TOP:
            gain, tag = gain_text(one.recoverable), one.recoverable.tag
            found.append(TopFinding(_anchor(place, number), visible(one.title), gain, tag, visible(one.sentence, TEXT)))
    return tuple(found)


def finding_blocks(diagnosis: Diagnosis, variant: VariantSummary) -> tuple[FindingBlock, ...]:
    """Return every finding of ``variant`` in its order."""
    return blocks_of(variant.findings, diagnosis.variants.index(variant))


def blocks_of(findings: Sequence[Finding], place: int = 0) -> tuple[FindingBlock, ...]:
    """Return ``findings`` as blocks. ``place``: that of their variant in the page."""
    return tuple(_block(_anchor(place, number), one) for number, one in enumerate(findings))


def gain_text(gain: Quantity) -> str:
    """Return what a finding would win, with its bounds: ``+48.5 tok/s (35.5 to 48.8)``."""
    bounds = ""
    if gain.low is not None and gain.high is not None:
        bounds = f" ({significant(gain.low, 3)} to {significant(gain.high, 3)})"
    return f"+{significant(gain.value, 3)}\u00a0{gain.unit}{bounds}"


def _anchor(place: int, number: int) -> str:
    return f"finding-{place}-{number}"


def _block(anchor: str, one: Finding) -> FindingBlock:
    facts = [one.id, f"confidence {one.confidence}"]
    facts += [f"cause {one.cause}"] if one.cause else []
    facts += [f"at {visible(one.location, 200)}"] if one.location else []
    facts += [f"explains {', '.join(one.explains)}"] if one.explains else []
    facts.append(one.page)
    return FindingBlock(
        id=anchor,
        severity=one.severity,
        title=visible(one.title),
        sentence=visible(one.sentence, TEXT),
        remedy=visible(one.remedy, TEXT),
        gain=gain_text(one.recoverable) if one.recoverable else "",
        tag=one.recoverable.tag if one.recoverable else "",
        facts=" · ".join(facts),
        evidence=_evidence(one) if one.evidence else None,
    )


def _evidence(one: Finding) -> Table:
    rows = tuple(
        (
            Cell(visible(row.what, 300), note=visible(row.quantity.note, 200)),
            Cell(f"{significant(row.quantity.value, 4)} {visible(row.quantity.unit, 40)}", row.quantity.tag),
            Cell(f"{row.table}{_ids(row.ids)}" if row.table else "–"),
        )
        for row in one.evidence
    )
    columns = (Column("What"), Column("Value", numeric=True), Column("Rows in the bundle"))
    return Table(
        "The rows named are those of the bundle's tables by their key, the most telling first.",
        columns,
        (Group(rows),),
        "cards",
    )


def _ids(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:IDS]))
    return f" {shown}{f' and {len(ids) - IDS} more' if len(ids) > IDS else ''}" if ids else ""

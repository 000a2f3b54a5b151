"""The report's answers as Markdown: the sentence, what is in the way, speed, causes, break-even, ladder, findings.

Of an ingested trace the whole page, since its tables are short.
"""

import re
from collections.abc import Sequence

from workbench.diagnose.headline import fastest, headline
from workbench.diagnose.speculation import break_even
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.reports import attached_page, ingested_page, tables
from workbench.reports.blocks import FindingBlock, Section, TableBlock, TextBlock
from workbench.reports.finding_blocks import gain_text, top_findings
from workbench.reports.labels import visible
from workbench.reports.ladder_tables import ladder_table
from workbench.reports.table import Row, Table
from workbench.trace.bundle import Bundle


def render_markdown(bundle: Bundle, diagnosis: Diagnosis) -> str:
    """Return a short report on ``bundle`` as GitHub-flavoured Markdown. Names from the bundle cannot add markup."""
    against_plain = {variant.name: break_even(bundle, variant.name) for variant in diagnosis.variants}
    parts = [
        f"# {_escape(f'Decode report: {visible(diagnosis.scenario)}' if diagnosis.scenario else 'Decode report')}",
        _escape(headline(diagnosis, name=visible)),
        *_table(tables.headline_table(diagnosis, against_plain)),
        "## Where the time goes",
        *_table(tables.cause_table(diagnosis)),
    ]
    best = fastest(diagnosis)
    parts[2:2] = _top(diagnosis, best)
    if any(against_plain.values()):
        parts += ["## Break-even of speculation", *_table(tables.break_even_table(against_plain))]
    if diagnosis.ladder:
        parts += ["## The ladder: predicted and measured gain", *_table(ladder_table(diagnosis.ladder))]
    parts.append("## Findings")
    for variant in sorted(diagnosis.variants, key=lambda one: one is not best):
        parts += _findings(variant)
    return "\n\n".join(parts) + "\n"


def _top(diagnosis: Diagnosis, best: VariantSummary) -> list[str]:
    lines = [f"- **{_escape(one.title)}**, {_escape(one.gain)} *{one.tag}*" for one in top_findings(diagnosis, best)]
    return ["In the way:", "\n".join(lines)] if lines else []


def _findings(variant: VariantSummary) -> list[str]:
    """Return the findings of one variant as a list, the most first."""
    if not variant.findings:
        return []
    lines = []
    for one in variant.findings:
        gain = f", {_escape(gain_text(one.recoverable))} *{one.recoverable.tag}*" if one.recoverable else ""
        text = f"{_escape(visible(one.sentence, 600))} Try: {_escape(visible(one.remedy, 600))}"
        lines.append(f"- **{_escape(visible(one.title))}** ({one.severity}, `{one.id}`){gain}: {text}")
    return [f"### {_escape(visible(variant.name))}", "\n".join(lines)]


def render_ingested_markdown(bundle: Bundle) -> str:
    """Return the page on an ingested trace as Markdown, without figures and what is folded away."""
    trace = ingested_page.gather(bundle)
    return _page(ingested_page.title(trace), ingested_page.answer(trace), ingested_page.sections(trace))


def render_attached_markdown(bundle: Bundle) -> str:
    """Return the page on a watched server as Markdown, without figures and what is folded away."""
    watched = attached_page.gather(bundle)
    return _page(attached_page.title(watched), attached_page.answer(watched), attached_page.sections(watched))


def _page(title: str, answer: str, sections: Sequence[Section]) -> str:
    parts = [f"# {_escape(title)}", _escape(answer)]
    for section in sections:
        shown: list[str] = []
        for block in section.blocks:
            if isinstance(block, TextBlock):
                shown.append(_escape(block.text))
            elif isinstance(block, TableBlock) and not block.folded:
                shown += _table(block.table)
            elif isinstance(block, FindingBlock):
                gain = f", {_escape(block.gain)} *{block.tag}*" if block.gain else ""
                text = f"{_escape(block.sentence)} Try: {_escape(block.remedy)}"
                shown.append(f"- **{_escape(block.title)}** ({block.severity}){gain}: {text}")
        if shown:
            parts += [f"## {section.title}", *([_escape(section.intro)] if section.intro else []), *shown]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> list[str]:
    """Return the table's groups as Markdown tables, each after its title, and the caption last."""
    heads = [f"{column.title} ({column.unit})" if column.unit else column.title for column in table.columns]
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    parts = []
    for group in table.groups:
        if group.title:
            parts.append(f"### {_escape(group.title)}")
        lines = [_line(heads), _line(rule), *map(_cells, group.rows)]
        if group.total:
            lines.append(_cells(group.total))
        parts.append("\n".join(lines))
    return [*parts, _escape(table.caption)]


def _cells(row: Row) -> str:
    return _line(
        [
            " ".join(
                filter(
                    None,
                    (
                        _escape(cell.text),
                        f"*{cell.tag}*" if cell.tag else "",
                        _escape(cell.note if cell.note.startswith("[") else f"({cell.note})") if cell.note else "",
                    ),
                )
            )
            for cell in row
        ]
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    """Return ``text`` with everything that Markdown or HTML would read as markup made plain."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\u00a0", " ")
    return re.sub(r"([\\`*_\[\]|~#!])", r"\\\1", text)

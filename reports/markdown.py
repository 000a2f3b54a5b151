"""The report's first answers as Markdown: the sentence, the headline table and the causes of the step time.

Of an ingested trace the whole page, since its tables are short.
"""

import re

from workbench.diagnose.headline import headline
from workbench.diagnose.speculation import break_even
from workbench.diagnose.summary import Diagnosis
from workbench.reports import ingested_page, tables
from workbench.reports.blocks import TableBlock, TextBlock
from workbench.reports.labels import visible
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
    return "\n\n".join(parts) + "\n"


def render_ingested_markdown(bundle: Bundle) -> str:
    """Return the page on an ingested trace as Markdown, without figures and what is folded away."""
    trace = ingested_page.gather(bundle)
    parts = [f"# {_escape(ingested_page.title(trace))}", _escape(ingested_page.answer(trace))]
    for section in ingested_page.sections(trace):
        shown: list[str] = []
        for block in section.blocks:
            if isinstance(block, TextBlock):
                shown.append(_escape(block.text))
            elif isinstance(block, TableBlock) and not block.folded:
                shown += _table(block.table)
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

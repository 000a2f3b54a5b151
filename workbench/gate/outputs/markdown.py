"""The result as GitHub-flavoured Markdown, for the summary of a CI step."""

import re
from collections.abc import Sequence

from workbench.gate.outputs import table
from workbench.gate.outputs.terminal import headline
from workbench.gate.result import GateResult, VariantResult
from workbench.gate.wording import cause_sentence, counter_sentence
from workbench.reports.labels import visible

MAX_BYTES = 900 * 1024
"""GitHub drops a step summary over 1 MiB whole, so parts are left out before that, and this says so."""
LEFT_OUT = "\n\n*The rest is left out: the summary would be too large. It is in the JSON output.*\n"


def render(result: GateResult) -> str:
    """Return the result, verdicts first, details folded, at most 900 KiB."""
    lines = [f"- {_text(f'{one.name}: {one.reason}; {table.counter_summary(one)}')}" for one in result.variants]
    parts = [
        f"### {_text(headline(result))}",
        _table(table.verdict_columns(result), table.verdict_rows(result)),
        "\n".join(lines),
        *(f"- **{finding.id}** {_text(finding.sentence)}" for finding in result.findings),
        *(part for variant in result.variants for part in _details(variant)),
        "\n".join(f"- {_text(note)}" for note in result.notes),
    ]
    text, room = "", MAX_BYTES - len(LEFT_OUT.encode())
    for part in filter(None, parts):
        if len(text.encode()) + len(part.encode()) + 2 > room:
            return text + LEFT_OUT
        text += f"{part}\n\n"
    return text


def _details(variant: VariantResult) -> list[str]:
    parts = []
    if rows := table.counter_rows(variant):
        moved = [counter for counter in variant.counters if counter.status in ("worse", "better")]
        lines = "\n".join(f"- {_text(counter_sentence(counter))}" for counter in moved)
        parts.append(
            _folded(f"Counters of {variant.name} that changed", f"{_table(table.COUNTER_COLUMNS, rows)}\n\n{lines}")
        )
    found = variant.attribution
    if found and table.worth_explaining(variant):
        text = f"{_text(cause_sentence(found))}\n\n{_table(table.TERM_COLUMNS, table.term_rows(found))}"
        parts.append(_folded(f"Why {variant.name} changed", text))
    if variant.rejected:
        lines = "\n".join(f"- {_text(f'{one.launch.bundle.name}: {one.reason}')}" for one in variant.rejected)
        parts.append(_folded(f"Launches of {variant.name} that were not used", lines))
    return parts


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{_text(title)}</summary>\n\n{text}\n\n</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_text(cell.strip()) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """Return ``text`` with everything that Markdown or HTML would read as markup made plain."""
    text = visible(text, 2000).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!])", r"\\\1", text)

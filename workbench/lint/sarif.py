"""Findings of the linter as SARIF 2.1.0; each has a place, since a kernel is defined somewhere."""

from pathlib import Path

from workbench.gate.locate import Location
from workbench.gate.outputs.sarif import document
from workbench.gate.outputs.sarif import result as sarif_result
from workbench.lint.result import RULES, LintResult


def render(result: LintResult, root: Path) -> str:
    """Return the findings; paths are relative to ``root`` where they are below it."""
    rules = {f"kernels/{rule}": text for rule, text in RULES.items()}
    results = [
        sarif_result(
            rules,
            f"kernels/{finding.rule}",
            "error",
            f"{finding.row.kernel} ({finding.row.label}) on {finding.row.target}: {finding.sentence}",
            Location(relative(finding.row.file, root), finding.row.line),
        )
        for finding in result.findings
    ]
    return document("workbench kernels lint", rules, results)


def relative(file: str, root: Path) -> str:
    """Return ``file`` as seen from ``root``, with forward slashes; whole where it is elsewhere."""
    path = Path(file).resolve()
    return path.relative_to(root.resolve()).as_posix() if path.is_relative_to(root.resolve()) else path.as_posix()

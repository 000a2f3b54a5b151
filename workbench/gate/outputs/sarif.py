"""Findings with a place in the code as SARIF 2.1.0, which code hosts show beside the line. Numbers do not fit it."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from workbench import __version__
from workbench.gate.locate import Location
from workbench.gate.result import Finding, GateResult
from workbench.reports.labels import visible
from workbench.terminal import json_text

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = {
    "gate/counter": "A counter that carries no noise got worse",
    "gate/time": "Decoding got slower than the floor allows",
}


def render(result: GateResult) -> str:
    """Return the findings whose location is known; a valid file with no result where there is none."""
    located = [(finding, finding.location) for finding in result.findings if finding.location]
    results = [_result(finding, location, advisory=result.advisory) for finding, location in located]
    return document("workbench gate", RULES, results)


def document(tool: str, rules: Mapping[str, str], results: Sequence[dict[str, Any]]) -> str:
    """Return a SARIF file of ``tool`` with one run; ``rules``: id and description; ``results``: by ``result``."""
    listed = [{"id": key, "shortDescription": {"text": text}} for key, text in rules.items()]
    driver = {"name": tool, "version": __version__, "rules": listed}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": list(results)}
    return json_text({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def result(rules: Mapping[str, str], rule: str, level: str, message: str, location: Location) -> dict[str, Any]:
    """Return one result of a document: ``rule`` is a key of ``rules``, ``level`` "error" or "warning"."""
    return {
        "ruleId": rule,
        "ruleIndex": list(rules).index(rule),
        "level": level,
        "message": {"text": visible(message, 2000)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(location.path), "uriBaseId": "%SRCROOT%"},
                    "region": {"startLine": location.line},
                }
            }
        ],
    }


def _result(finding: Finding, location: Location, *, advisory: bool) -> dict[str, Any]:
    level = "warning" if advisory and finding.id == "time" else "error"
    return result(RULES, f"gate/{finding.id}", level, f"{finding.variant}: {finding.sentence}", location)

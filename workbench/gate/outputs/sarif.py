"""Findings with a place in the code as SARIF 2.1.0, which code hosts show beside the line. Numbers do not fit it."""

from typing import Any
from urllib.parse import quote

from workbench import __version__
from workbench.gate.locate import Location
from workbench.gate.result import Finding, GateResult
from workbench.reports.labels import visible
from workbench.terminal import json_text

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
RULES = {
    "counter": "A counter that carries no noise got worse",
    "time": "Decoding got slower than the floor allows",
}


def render(result: GateResult) -> str:
    """Return the findings whose location is known; a valid file with no result where there is none."""
    located = [(finding, finding.location) for finding in result.findings if finding.location]
    results = [_result(finding, location, advisory=result.advisory) for finding, location in located]
    driver = {
        "name": "workbench gate",
        "version": __version__,
        "rules": [{"id": f"gate/{key}", "shortDescription": {"text": text}} for key, text in RULES.items()],
    }
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json_text({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _result(finding: Finding, location: Location, *, advisory: bool) -> dict[str, Any]:
    return {
        "ruleId": f"gate/{finding.id}",
        "ruleIndex": list(RULES).index(finding.id),
        "level": "warning" if advisory and finding.id == "time" else "error",
        "message": {"text": visible(f"{finding.variant}: {finding.sentence}", 2000)},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": quote(location.path), "uriBaseId": "%SRCROOT%"},
                    "region": {"startLine": location.line},
                }
            }
        ],
    }

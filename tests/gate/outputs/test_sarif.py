import json
from collections.abc import Callable

from workbench.gate.findings import Finding
from workbench.gate.locate import Location
from workbench.gate.outputs.sarif import render
from workbench.gate.result import GateResult
from workbench.gate.rule import Verdict

MakeResult = Callable[..., GateResult]


def test_only_findings_with_a_place_are_in_it(failed: GateResult) -> None:
    data = json.loads(render(failed))
    assert data["version"] == "2.1.0"
    (run,) = data["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    (result,) = run["results"]
    assert (result["ruleId"], rules[result["ruleIndex"]], result["level"]) == ("gate/counter", "gate/counter", "error")
    (place,) = result["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "kernels/a%20b.py"
    assert place["physicalLocation"]["region"] == {"startLine": 7}
    assert "\\x1b" in result["message"]["text"]


def test_without_such_a_finding_it_is_valid_and_empty(make_result: MakeResult) -> None:
    (run,) = json.loads(render(make_result([(Verdict.PASS, {})])))["runs"]
    assert run["results"] == []
    assert run["tool"]["driver"]["name"] == "workbench gate"


def test_an_advisory_time_is_a_warning(make_result: MakeResult) -> None:
    found = (Finding("time", "mtp", "slower", (), Location("a.py", 1)),)
    (run,) = json.loads(render(make_result([(Verdict.FAIL, {"findings": found})], advisory=True)))["runs"]
    assert [result["level"] for result in run["results"]] == ["warning"]

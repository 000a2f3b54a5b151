import json
from collections.abc import Callable
from pathlib import Path

from workbench.lint.result import Finding, LintResult, Row, Thresholds
from workbench.lint.sarif import relative, render

MakeRow = Callable[..., Row]


def test_each_finding_has_its_rule_and_its_line(make_row: MakeRow) -> None:
    row = make_row(label="\x1b[31m", file="/src/a b/add.py")
    result = LintResult("3.9.0", Thresholds(), (row,), (Finding("spill", row, "spills"),))
    (run,) = json.loads(render(result, Path("/src")))["runs"]
    assert run["tool"]["driver"]["name"] == "workbench kernels lint"
    (found,) = run["results"]
    assert run["tool"]["driver"]["rules"][found["ruleIndex"]]["id"] == found["ruleId"] == "kernels/spill"
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20b/add.py"
    assert place["region"] == {"startLine": 7}
    assert found["message"]["text"] == "add (\\x1b[31m) on sm_90: spills"


def test_without_a_finding_it_is_valid_and_empty(make_row: MakeRow) -> None:
    (run,) = json.loads(render(LintResult("3.9.0", Thresholds(), (make_row(),)), Path("/")))["runs"]
    assert run["results"] == []


def test_a_file_elsewhere_keeps_its_path() -> None:
    assert relative("/usr/lib/kernel.py", Path("/src")) == "/usr/lib/kernel.py"

import json

from workbench.gate.outputs.json import render
from workbench.gate.result import GateResult


def test_it_is_strict_json_with_a_schema(failed: GateResult) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(render(failed), parse_constant=refuse)
    assert (data["schema"], data["exit_code"], data["outcome"]) == ("workbench.gate/1", 1, "regression")
    (variant,) = data["variants"]
    assert variant["verdict"] == "fail"
    assert variant["counters"][0]["fails"] is True
    assert variant["findings"][0]["location"] == {"path": "kernels/a b.py", "line": 7}
    assert variant["rejected"][0]["bundle"] == "mtp-02-head"

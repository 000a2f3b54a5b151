from collections.abc import Callable
from xml.etree import ElementTree as ET

import pytest

from workbench.gate.outputs.junit import render
from workbench.gate.result import GateResult
from workbench.gate.rule import Verdict

MakeResult = Callable[..., GateResult]


def _suite(result: GateResult) -> ET.Element:
    root = ET.fromstring(render(result))  # noqa: S314 - our own
    assert root.tag == "testsuites"
    (suite,) = root
    return suite


def test_one_case_for_the_time_and_each_counter(failed: GateResult) -> None:
    suite = _suite(failed)
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "2",
        "errors": "0",
        "skipped": "1",
    }
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == ["tok/s", "syncs", "kernels", "bytes", "host operators"]
    assert all(case.get("classname") == "made.mtp" for case in cases.values())
    failure = cases["tok/s"].find("failure")
    assert failure is not None
    assert failure.get("message") == "because"
    assert "mainly host-bound" in str(failure.text)
    assert cases["syncs"].find("failure") is not None
    assert cases["host operators"].find("skipped") is not None
    assert list(cases["bytes"]) == []


@pytest.mark.parametrize(
    ("verdict", "changes", "tag"),
    [
        (Verdict.PASS, {}, "system-out"),
        (Verdict.INCONCLUSIVE, {}, "skipped"),
        (Verdict.INCONCLUSIVE, {"strict": True}, "failure"),
        (Verdict.FAIL, {"advisory": True}, "skipped"),
        (Verdict.UNFIT, {}, "error"),
    ],
)
def test_each_verdict_has_its_element(
    make_result: MakeResult, verdict: Verdict, changes: dict[str, bool], tag: str
) -> None:
    (case,) = _suite(make_result([(verdict, {})], **changes))
    assert [child.tag for child in case] == [tag]
    assert "because" in (case[0].get("message") or case[0].text or "")


def test_counters_only_has_no_case_for_the_time(make_result: MakeResult) -> None:
    assert len(_suite(make_result([(None, {})]))) == 0

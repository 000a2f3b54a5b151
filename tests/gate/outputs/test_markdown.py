import re
from collections.abc import Callable

from workbench.gate.findings import Finding
from workbench.gate.outputs.markdown import LEFT_OUT, MAX_BYTES, render
from workbench.gate.result import GateResult
from workbench.gate.rule import Verdict

MakeResult = Callable[..., GateResult]


def test_verdicts_first_details_folded(failed: GateResult) -> None:
    text = render(failed)
    assert text.startswith("### gate: made: REGRESSION; ")
    assert "| mtp | FAIL, COUNTERS FAIL | 100.0 | 86.96 | -13.0 % |" in text
    assert text.count("<details>") == text.count("</details>") == 3
    assert "- **counter** syncs: 1 → 2 " in text
    assert "- **time** slower" in text


def test_no_name_adds_markup(failed: GateResult) -> None:
    text = render(failed)
    assert not set(text) & {"\x1b", "\x00", "\u202e"}
    assert set(re.findall(r"<[^>]*>", text)) == {"<details>", "</details>", "<summary>", "</summary>"}
    assert not re.search(r"(?<!\\)`", text)
    for line in text.splitlines():
        if line.startswith("|"):
            columns = len(re.findall(r"(?<!\\)\|", line)) - 1
            assert columns in (5, 6, 9), line


def test_it_stays_under_the_limit_and_says_what_is_missing(make_result: MakeResult) -> None:
    many = tuple(Finding("counter", "mtp", "x" * 1900, ()) for _ in range(1000))
    text = render(make_result([(Verdict.FAIL, {"findings": many})]))
    assert len(text.encode()) <= MAX_BYTES
    assert text.endswith(LEFT_OUT)
    assert "| mtp | FAIL |" in text

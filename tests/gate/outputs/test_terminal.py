from collections.abc import Callable

import pytest

from workbench.gate.outputs.terminal import headline, print_result
from workbench.gate.result import GateResult
from workbench.gate.rule import Verdict

MakeResult = Callable[..., GateResult]


def test_verdict_change_counters_and_cause_are_there(failed: GateResult, capsys: pytest.CaptureFixture[str]) -> None:
    print_result(failed)
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("mtp "))
    assert "FAIL, COUNTERS FAIL" in row
    assert "-13.0 %" in row
    assert "because; 1 of 4 exact counters are equal" in text
    assert "mainly host-bound (100 % of the change, estimated)" in text
    assert "mtp-02-head: head ended with -9" in text
    assert any(line.startswith("syncs") and line.endswith("WORSE") for line in text.splitlines())


def test_nothing_reaches_the_terminal_that_it_would_obey(
    failed: GateResult, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(failed)
    text = capsys.readouterr().out
    assert not set(text) & {"\x1b", "\x00", "\u202e"}
    assert "\\x1b[31m" in text


@pytest.mark.parametrize(
    ("verdict", "changes", "words"),
    [
        (Verdict.PASS, {}, "no regression found; "),
        (Verdict.FAIL, {}, "REGRESSION; "),
        (Verdict.FAIL, {"advisory": True}, "no regression found (time is advisory); "),
        (Verdict.INCONCLUSIVE, {"strict": True}, "inconclusive, and --strict; "),
        (Verdict.UNFIT, {}, "the measurement cannot be used; "),
    ],
)
def test_the_headline_says_how_it_ends(
    make_result: MakeResult, verdict: Verdict, changes: dict[str, bool], words: str
) -> None:
    line = headline(make_result([(verdict, {})], **changes))
    assert line.startswith(f"gate: made: {words}")
    assert line.endswith("→ working tree (no commit, changed)")


def test_a_variant_without_pairs_is_a_row_too(make_result: MakeResult, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"pairs": (), "estimate": None, "attribution": None}
    print_result(make_result([(Verdict.UNFIT, nothing)]))
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mtp "))
    assert row.split() == ["mtp", "UNFIT", "-", "-", "-", "-", "-", "0", "-"]

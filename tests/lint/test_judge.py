from collections.abc import Callable
from typing import Any

import pytest

from workbench.lint.baseline import Baseline, pin
from workbench.lint.judge import judge, notes
from workbench.lint.result import Row, Thresholds

MakeRow = Callable[..., Row]


def baseline(*rows: Row, triton: str = "3.9.0") -> Baseline:
    return Baseline(triton, {row.key: pin(row) for row in rows})


@pytest.mark.parametrize(
    ("changes", "thresholds", "rule", "words"),
    [
        (
            {"spill_or_stack_bytes": 8, "spill_store_bytes": 4, "spill_load_bytes": 4},
            {},
            "spill",
            "stores 4 and loads 4",
        ),
        ({"spill_or_stack_bytes": 8}, {}, "spill", "none of it is spilled: it is stack"),
        ({"spill_or_stack_bytes": 8, "spill_store_bytes": None}, {}, "spill", "how much of it is spilled is not known"),
        ({"registers": 65}, {"max_registers": 64}, "registers", "takes 65 registers a thread, 64 allowed"),
        ({"occupancy_limit": 0.25}, {"min_occupancy": 0.5}, "occupancy", "25.0% of an SM's warps, 50.0% wanted"),
        ({"programs_per_sm": 0, "limiter": "shared memory"}, {}, "occupancy", "cannot be launched"),
        ({"error": "ValueError: no"}, {}, "compile", "does not compile: ValueError: no"),
    ],
)
def test_what_is_beyond_a_threshold_fails(
    make_row: MakeRow, changes: dict[str, Any], thresholds: dict[str, Any], rule: str, words: str
) -> None:
    row = make_row(**changes)
    (finding,) = judge([make_row(), row], Thresholds(**thresholds), None)
    assert (finding.rule, finding.row) == (rule, row)
    assert words in finding.sentence


def test_at_a_threshold_is_within(make_row: MakeRow) -> None:
    row = make_row(registers=64, occupancy_limit=0.5, spill_or_stack_bytes=8)
    assert judge([row], Thresholds(64, 8, 0.5), None) == ()


def test_a_stated_reason_allows_spills_and_nothing_else(make_row: MakeRow) -> None:
    row = make_row(spill_or_stack_bytes=8, registers=200, spills="short loop")
    assert [finding.rule for finding in judge([row], Thresholds(64), None)] == ["registers"]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"registers": 33}, "registers"),
        ({"shared_bytes": 1025}, "shared"),
        ({"spill_or_stack_bytes": 4}, "spill"),
        ({"spill_or_stack_bytes": 4, "spills": "a reason"}, "spill"),
        ({"occupancy_limit": 0.9}, "occupancy"),
    ],
)
def test_with_a_baseline_any_rise_fails(make_row: MakeRow, changes: dict[str, Any], rule: str) -> None:
    found = judge([make_row(**changes)], Thresholds(), baseline(make_row()))
    assert [finding.rule for finding in found] == [rule]


def test_what_the_baseline_holds_passes_whatever_it_takes(make_row: MakeRow) -> None:
    row = make_row(spill_or_stack_bytes=400, registers=255)
    assert judge([row], Thresholds(64), baseline(row)) == ()


def test_a_row_that_is_new_meets_the_thresholds(make_row: MakeRow) -> None:
    new = make_row(target="sm_100", spill_or_stack_bytes=400)
    assert [finding.rule for finding in judge([new], Thresholds(), baseline(make_row()))] == ["spill"]


def test_notes_say_what_a_comparison_cannot(make_row: MakeRow) -> None:
    before = baseline(make_row(), make_row(kernel="mul"), triton="3.8.0")
    rows = [make_row(registers=30), make_row(kernel="mul"), make_row(kernel="sub")]
    other, new, better = notes(rows, before, "3.9.0")
    assert "Triton 3.8.0, this is 3.9.0" in other
    assert "1 row is not in the baseline" in new
    assert "sub on sm_90" in new
    assert "1 row is better than the baseline: add on sm_90" in better
    assert notes([make_row()], baseline(make_row()), "3.9.0") == ()


def test_a_kernel_that_is_gone_is_missed_unless_it_was_left_out(make_row: MakeRow) -> None:
    before = baseline(make_row(), make_row(kernel="mul"), make_row(kernel="sub", target="sm_100"))
    assert notes([make_row()], before, "3.9.0") == ("in the baseline and not linted: mul",)
    assert notes([make_row()], before, "3.9.0", partial=True) == ()


def test_better_in_one_and_worse_in_another_is_not_better(make_row: MakeRow) -> None:
    row = make_row(registers=16, shared_bytes=2048)
    assert notes([row], baseline(make_row()), "3.9.0") == ()

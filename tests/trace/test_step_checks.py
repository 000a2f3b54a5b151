"""A run's own steps: what cannot all be true of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.claims import Check
from workbench.trace.manifest import Manifest, VariantRecord
from workbench.trace.step_checks import steps

Row = dict[str, Any]
MS = 1_000_000
HOUR = 3_600 * 10**9


def healthy() -> list[Row]:
    """Two sequences of 20 steps of 4 ms, two tokens each, half a millisecond apart."""
    rows: list[Row] = []
    for sequence in range(2):
        for index in range(20):
            start = (sequence * 100 + index) * 4_500_000
            times = {
                "start_ns": start,
                "draft_end_ns": start,
                "forward_end_ns": start + 4 * MS,
                "end_ns": start + 4 * MS,
            }
            counts = {"context": 10 + 2 * index, "width": 3, "drafted": 2, "accepted": 1, "committed": 2}
            place = {"step_id": len(rows), "sequence_id": sequence, "index": index, "warmup": False}
            rows.append({"variant": "v", "run_pass": "clean"} | place | times | counts)
    return rows


Judge = Callable[..., dict[str, Check]]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def make(rows: list[Row], host: list[Row] | None = None, *, source: str = "run") -> dict[str, Check]:
        manifest = Manifest(source=source, variants=[VariantRecord(name="v")])  # type: ignore[arg-type]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with BundleWriter.create(folder, manifest) as writer:
            writer.append("steps", rows)
            writer.append("host", host or [])
        with Bundle.open(folder) as bundle:
            return {check.id: check for check in steps(bundle)}

    return make


def moved(rows: list[Row], ns: int, *, start: bool = True) -> None:
    for row in rows:
        for name in ("start_ns", "draft_end_ns", "forward_end_ns", "end_ns")[0 if start else 3 :]:
            row[name] += ns


def test_sound_steps_are_silent(judge: Judge) -> None:
    assert judge(healthy()) == {}


def test_a_step_that_is_there_twice(judge: Judge) -> None:
    rows = healthy()
    found = judge([*rows, *(row | {"step_id": 100 + row["step_id"]} for row in rows[5:8])])
    assert set(found) == {"steps-twice"}
    assert found["steps-twice"].count == 3
    assert "step-time" in found["steps-twice"].refuses


@pytest.mark.parametrize("first", [7, 20])
def test_a_clock_that_was_set_back(judge: Judge, first: int) -> None:
    rows = healthy()
    moved(rows, HOUR)
    moved(rows[first:], -HOUR)
    found = judge(rows)
    assert found["steps-out-of-order"].severity == "error"
    assert found["steps-out-of-order"].count == 1


def test_a_clock_that_was_set_forward(judge: Judge) -> None:
    rows = healthy()
    moved(rows[7:], HOUR)
    found = judge(rows)
    assert set(found) == {"clock-jump"}
    assert found["clock-jump"].severity == "warning"
    assert "3600.0 s" in found["clock-jump"].message


def test_a_clock_set_within_a_step(judge: Judge) -> None:
    rows = healthy()
    moved(rows[7:8], HOUR, start=False)
    assert "impossible-step" in judge(rows)


def test_steps_that_are_missing(judge: Judge) -> None:
    found = judge([row for row in healthy() if row["index"] not in (4, 5)])
    assert set(found) == {"steps-missing"}
    assert found["steps-missing"].count == 4
    # The end may be cut off, and warm-up thinned out.
    assert judge([row for row in healthy() if 2 <= row["index"] < 15]) == {}


def test_counts_that_disagree(judge: Judge) -> None:
    rows = healthy()
    rows[3]["committed"] = 3
    assert set(judge(rows)) == {"steps-disagree"}


def test_more_accepted_than_drafted(judge: Judge) -> None:
    rows = healthy()
    rows[3]["accepted"] = 5
    assert set(judge(rows)) == {"accepted-beyond-drafted"}


def test_traced_steps_apart_from_their_host_rows(judge: Judge) -> None:
    rows = [row | {"run_pass": "traced"} for row in healthy()]
    op = {"variant": "v", "host_id": 1, "thread": 1, "name": "aten::mm", "category": "op"}
    assert judge(rows, [op | {"start_ns": 100, "end_ns": 200}]) == {}


def test_traced_steps_on_another_clock(judge: Judge) -> None:
    rows = [row | {"run_pass": "traced"} for row in healthy()]
    op = {"variant": "v", "host_id": 1, "thread": 1, "name": "aten::mm", "category": "op"}
    assert set(judge(rows, [op | {"start_ns": HOUR, "end_ns": HOUR + 5}])) == {"steps-apart"}


def test_found_steps_of_a_foreign_trace_are_not_judged(judge: Judge) -> None:
    rows = healthy()
    rows[3]["committed"] = 3
    assert judge(rows, source="kineto") == {}

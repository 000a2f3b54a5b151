import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.probes import host
from workbench.probes.host import MARKER, MARKS, HostProbe, nest, place_host
from workbench.probes.protocol import Capture, Probe
from workbench.trace.rows import from_rows

SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 6)), max_size=14)


def rows(spans: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    return [
        {"thread": thread, "name": str(number), "start_ns": start, "end_ns": start + length}
        for number, (thread, start, length) in enumerate(spans)
    ]


@given(spans=SPANS)
def test_a_row_s_parent_is_the_innermost_row_that_encloses_it(spans: list[tuple[int, int, int]]) -> None:
    nested = nest(rows(spans))
    assert [row["host_id"] for row in nested] == list(range(len(spans)))
    assert sorted(row["name"] for row in nested) == sorted(str(number) for number in range(len(spans)))
    order = [(row["start_ns"], -row["end_ns"]) for row in nested]
    assert order == sorted(order)
    for at, row in enumerate(nested):
        enclosing = [
            other["host_id"]
            for other in nested[:at]  # what encloses a row begins with it or before, and is longer or as long
            if other["thread"] == row["thread"]
            and other["start_ns"] <= row["start_ns"] < other["end_ns"]
            and row["end_ns"] <= other["end_ns"]
        ]
        assert row["parent_id"] == (enclosing[-1] if enclosing else None)


def test_rows_that_straddle_or_touch_are_not_nested() -> None:
    nested = nest(rows([(0, 0, 10), (0, 8, 4), (0, 9, 1), (0, 12, 0), (1, 2, 3)]))
    assert {row["name"]: row["parent_id"] for row in nested} == {"0": None, "4": None, "1": None, "2": 2, "3": None}


BRACKETS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=2 * MARKS, max_size=2 * MARKS)


@given(brackets=BRACKETS, offset=st.integers(-(10**18), 10**18), drift=st.integers(-500, 500))
def test_the_true_offset_lies_within_the_residual(brackets: list[tuple[int, int]], offset: int, drift: int) -> None:
    """Each bracket is (from its begin to the marker, from the marker to its end); the clock drifts in between."""
    readings, starts = [], []
    for number, (before, after) in enumerate(brackets):
        moment = 10_000 * number + (10**9 if number >= MARKS else 0)
        readings.append((moment - before, moment + after))
        starts.append(moment - offset - (drift if number >= MARKS else 0))
    placed = place_host(readings, reversed(starts))
    offsets = [offset] * MARKS + [offset + drift] * MARKS
    for start, true in zip(starts, offsets, strict=True):
        assert abs(placed.place(start) - start - true) <= placed.residual_ns + 1 + 160_000 * abs(drift) // 10**9
    ends = (brackets[:MARKS], brackets[MARKS:])
    widths = [min(before for before, _ in end) + min(after for _, after in end) for end in ends]
    assert placed.residual_ns <= max(widths) // 2 + 2


def test_lost_markers_are_told() -> None:
    with pytest.raises(InputError, match="3 of 32 clock markers"):
        place_host([(0, 1)] * 2 * MARKS, [1, 2, 3])


@pytest.fixture(scope="module")
def traced() -> tuple[Capture, list[tuple[int, int]]]:
    """What a probe saw of three products of different sizes, and our own readings around each."""
    probe: Probe = HostProbe()
    assert probe.name == "host"
    assert probe.available() is None
    probe.start()
    own = []
    for size in (64, 65, 66):
        x = torch.ones(size, size)
        time.sleep(0.002)
        before = time.perf_counter_ns()
        with probe.annotate(f"product {size}"):
            torch.mm(x, x)
        own.append((before, time.perf_counter_ns()))
    return probe.stop(), own


def test_operators_lie_within_our_own_readings_around_them(traced: tuple[Capture, list[tuple[int, int]]]) -> None:
    capture, own = traced
    products = [row for row in capture.tables["host"] if row["name"] == "aten::mm"]
    assert len(products) == 3
    assert 0 <= capture.residual_ns < 100_000  # some 0.2 us on an idle machine
    assert capture.clocks["host"].residual_ns == capture.residual_ns
    for row, (before, after) in zip(products, own, strict=True):
        assert before - capture.residual_ns <= row["start_ns"] <= row["end_ns"] <= after + capture.residual_ns


def test_annotations_enclose_what_ran_in_them(traced: tuple[Capture, list[tuple[int, int]]]) -> None:
    table = list(traced[0].tables["host"])
    by_id = {row["host_id"]: row for row in table}
    assert [row["name"] for row in table if row["category"] == "annotation"] == [
        "product 64",
        "product 65",
        "product 66",
    ]
    for row in table:
        if row["name"] == "aten::mm":
            assert row["category"] == "op"
            assert by_id[row["parent_id"]]["name"].startswith("product ")
    assert MARKER not in {row["name"] for row in table}


def test_rows_are_rows_of_the_bundle_s_table(traced: tuple[Capture, list[tuple[int, int]]]) -> None:
    table = traced[0].tables["host"]
    assert from_rows("host", [{"variant": "v", **row} for row in table]).num_rows == len(table)


def test_a_probe_that_stopped_leaves_no_profiler_behind() -> None:
    for _ in range(2):
        probe = HostProbe()
        probe.start()
        torch.ones(3, 3).mm(torch.ones(3, 3))
        names = [row["name"] for row in probe.stop().tables["host"]]
        assert names.count("aten::mm") == 1


def test_what_is_lacking_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    missing = HostProbe().available()
    assert missing is not None
    assert (missing.instrument, missing.why) == ("host", "this torch was built without Kineto")
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    missing = HostProbe().available()
    assert missing is not None
    assert missing.why == "torch is not installed"
    assert "pip install" in missing.fix

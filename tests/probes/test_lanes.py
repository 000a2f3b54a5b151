from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from workbench.errors import InputError
from workbench.probes.lanes import LaneSource, LanesProbe, Stamps, lane_table, tick_ns
from workbench.probes.protocol import Probe
from workbench.trace.clocks import Bracket, Fit
from workbench.trace.rows import conform, from_rows

TASKS = ("qkv", "attention", "head")
EPOCH = 1_795_991_560_000_000_000


class Clock:
    """A marker whose device clock is EPOCH ahead of the host's."""

    def sync(self) -> list[Bracket]:
        return [Bracket(EPOCH, -300, 300)]

    def clock(self, since: list[Bracket]) -> Fit:
        assert since == self.sync()
        return Fit(EPOCH, -EPOCH, 0, 150)


def stamps(launch: int = 0) -> Stamps:
    """Two CTAs, three tasks; CTA 1 is slower. In attention, place 1 holds the SM."""
    at = EPOCH + 100_000 * launch
    rows = [
        [(100, 120, 200), (250, 7, 400), (420, 430, 500)],
        [(100, 110, 240), (250, 9, 410), (410, 440, 520)],
    ]
    found = np.array(rows, np.int64) + at
    found[:, 1, 1] = (7, 9)
    return found


def source(read: Any = stamps) -> LaneSource:
    facts = {"device": 0, "grid_x": 2, "block_x": 64, "registers": 128}
    return LaneSource("decode_step", TASKS, read, lambda one: one[:, 1, 1], facts)


def spans(table: pa.Table, kind: str) -> list[tuple[int, str, int, int]]:
    rows = [row for row in table.to_pylist() if row["kind"] == kind]
    return sorted((row["cta"], row["task"], row["start_ns"], row["end_ns"]) for row in rows)


def test_tasks_what_they_compute_and_what_ctas_wait_for() -> None:
    table, dropped = lane_table(stamps(), source(), Fit(EPOCH, -EPOCH), 5)
    assert dropped == 0
    assert spans(table, "task") == [
        (0, "attention", 250, 400),
        (0, "head", 420, 500),
        (0, "qkv", 100, 200),
        (1, "attention", 250, 410),
        (1, "head", 410, 520),
        (1, "qkv", 100, 240),
    ]
    assert spans(table, "compute") == [
        (0, "head", 430, 500),
        (0, "qkv", 120, 200),
        (1, "head", 440, 520),
        (1, "qkv", 110, 240),
    ]
    assert spans(table, "wait") == [(0, "attention", 200, 250), (0, "head", 400, 420), (1, "attention", 240, 250)]
    assert {(row["cta"], row["sm"]) for row in table.to_pylist()} == {(0, 7), (1, 9)}
    starts = table.column("start_ns").to_pylist()
    assert starts == sorted(starts)
    assert set(table.column("kernel_id").to_pylist()) == {5}


def test_stamps_that_are_missing_or_out_of_order_are_counted() -> None:
    found = stamps()
    found[0, 2, 0] = 0
    found[1, 0, 2] = found[1, 0, 0] - 1
    table, dropped = lane_table(found, source(), Fit(EPOCH, -EPOCH), 0)
    assert dropped == 2
    assert [row[:2] for row in spans(table, "task")] == [(0, "attention"), (0, "qkv"), (1, "attention"), (1, "head")]
    assert spans(table, "wait") == [(0, "attention", 200, 250)]


def test_the_step_of_the_stamps_clock_is_what_they_show() -> None:
    assert tick_ns(stamps()) == 10
    assert tick_ns(stamps() * 32) == 320
    assert tick_ns(np.zeros((2, 3, 3), np.int64)) == 0


def test_the_kernel_s_schedule_must_be_known() -> None:
    with pytest.raises(InputError, match="3 records for 2 tasks"):
        lane_table(stamps(), LaneSource("k", ("a", "b"), stamps, lambda one: one[:, 0, 0], {}), Fit(), 0)


def test_a_capture_holds_the_latest_launches_on_the_host_s_clock() -> None:
    launches = iter(range(6))
    probe = LanesProbe(source(lambda: stamps(next(launches))), Clock(), keep=2)  # type: ignore[arg-type]
    assert isinstance(probe.name, str)
    instrument: Probe = probe
    assert instrument.available() is None
    probe.start()
    for _ in range(6):
        with probe.annotate("forward"):
            pass
        probe.collect()
    capture = probe.stop()
    kernels = capture.tables["kernels"]
    assert [row["kernel_id"] for row in kernels] == [0, 1]
    assert [(row["start_ns"], row["end_ns"]) for row in kernels] == [(400_100, 400_520), (500_100, 500_520)]
    assert from_rows("kernels", [{"variant": "v", **row} for row in kernels]).num_rows == 2
    lanes = capture.columns["lanes"]
    assert lanes.num_rows == 2 * 13
    assert conform("lanes", lanes.append_column("variant", pa.array(["v"] * 26))).num_rows == 26
    assert capture.clocks["device"].residual_ns == 150 + 10  # what comparisons disagree about, and the clock's step
    assert capture.losses == []


def test_lost_stamps_are_a_loss() -> None:
    empty = np.zeros((2, 3, 3), np.int64)
    probe = LanesProbe(source(lambda: empty), Clock())  # type: ignore[arg-type]
    probe.start()
    probe.collect()
    capture = probe.stop()
    assert capture.columns == {}
    assert capture.tables["kernels"] == []
    assert [(row["kind"], row["count"]) for row in capture.losses] == [("stamps-missing", 6)]


def test_without_a_step_or_a_marker_there_is_nothing() -> None:
    probe = LanesProbe(source(), Clock())  # type: ignore[arg-type]
    probe.start()
    with pytest.raises(InputError, match="no step ended"):
        probe.stop()
    missing = LanesProbe(source(), None).available()
    assert missing is not None
    assert "cannot be placed" in missing.why

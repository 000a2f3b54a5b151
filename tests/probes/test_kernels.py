import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from workbench.errors import InputError
from workbench.ingest.kineto import read_kineto
from workbench.probes.host import MARKER, MARKS
from workbench.probes.kernels import KernelsProbe, _config, capture_of, with_occupancy
from workbench.probes.marker import KERNELS, PAUSES_NS, STAMP
from workbench.probes.protocol import Capture
from workbench.trace.clocks import Fit
from workbench.trace.rows import conform

RECORDED = Path(__file__).parent.parent / "data" / "sglang0517_qwen3_4layers_dflash_h200.json.gz"
BASE_US = 5_121_989_000_000
"""Where the recorded trace's own times begin."""

STAMPS = len(PAUSES_NS[0])

HOST_OFFSET_NS = 777_000_000_123  # bundle minus trace, host rows
DEVICE_AHEAD_NS = 108_000  # the device's rows read so much too early in the trace
GLOBAL_OFFSET_NS = -1_795_000_000_000_000_000  # bundle minus %globaltimer
DRIFT_PPB = -8_000  # of %globaltimer
Span = tuple[int, int]


class Markers:
    """What the probe does at both ends of a capture, as Kineto and as we would see it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.readings: list[Span] = []
        self.stamps: list[Span] = []
        begins = BASE_US * 1000 + HOST_OFFSET_NS - GLOBAL_OFFSET_NS
        self.clock = Fit(begins, GLOBAL_OFFSET_NS, DRIFT_PPB, 700)

    def global_ns(self, bundle_ns: int) -> int:
        return self.clock.inverse().place(bundle_ns)

    def at(self, trace_ns: int, *, last: bool = False, lost: int = 0) -> None:
        """Marks from ``trace_ns`` on, on the trace's host time line; Kineto loses the first ``lost`` stamps."""
        moment = trace_ns
        for _ in range(MARKS):
            self._event(MARKER, "user_annotation", moment, 900)
            bundle = moment + HOST_OFFSET_NS
            self.readings.append((bundle - 1_500, bundle + 1_100))
            moment += 10_000
        for number, pause in enumerate(PAUSES_NS[last]):
            correlation = 9_000_000 + len(self.stamps)
            self._event("cuLaunchKernelEx", "cuda_driver", moment, 4_000, correlation=correlation)
            true = moment + 6_000
            self.stamps.append(
                (self.global_ns(true + HOST_OFFSET_NS + 400), self.global_ns(true + HOST_OFFSET_NS + 432))
            )
            if number >= lost:
                shape = {"grid": [1, 1, 1], "block": [32, 1, 1], "registers per thread": 16, "shared memory": 0}
                seen = true - DEVICE_AHEAD_NS
                self._event(STAMP, "kernel", seen, 1_300, device=0, stream=7, correlation=correlation, **shape)
            moment += pause

    def _event(self, name: str, category: str, start_ns: int, length_ns: int, **args: Any) -> None:
        times = {"ts": start_ns / 1000, "dur": length_ns / 1000}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": args})


def write(path: Path, events: list[dict[str, Any]], **header: Any) -> Path:
    path.write_text(json.dumps({"baseTimeNanoseconds": 1_790_857_026_000_000_000, **header, "traceEvents": events}))
    return path


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    import gzip

    trace: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return trace


@pytest.fixture(scope="module")
def merged(recorded: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Markers]:
    """The recorded trace of an engine with markers put at both ends."""
    rows = [event for event in recorded["traceEvents"] if event.get("ph") == "X"]
    first = round(min(event["ts"] for event in rows) * 1000)
    last = round(max(event["ts"] + event["dur"] for event in rows) * 1000)
    markers = Markers()
    markers.at(first - 20_000_000)
    markers.at(last + 5_000_000, last=True)
    path = tmp_path_factory.mktemp("trace") / "merged.json"
    header = {key: value for key, value in recorded.items() if key not in ("traceEvents", "baseTimeNanoseconds")}
    return write(path, [*rows, *markers.events], **header), markers


@pytest.fixture(scope="module")
def capture(merged: tuple[Path, Markers]) -> Capture:
    path, markers = merged
    return capture_of(read_kineto(path), markers.readings, markers.stamps, markers.clock)


def test_host_and_device_are_placed_each_by_its_own_clock(capture: Capture, recorded: dict[str, Any]) -> None:
    host, device = capture.clocks["host"], capture.clocks["device"]
    assert host.offset_ns == pytest.approx(HOST_OFFSET_NS, abs=host.residual_ns)
    assert host.residual_ns <= 1_400
    assert device.residual_ns <= 2_000
    kernels = capture.columns["kernels"]
    wanted = sorted(
        round(event["ts"] * 1000)
        for event in recorded["traceEvents"]
        if event.get("cat", "").startswith(("kernel", "gpu_mem"))
    )
    found = kernels.column("start_ns").to_pylist()
    assert len(found) == len(wanted)
    off = [start - (true + HOST_OFFSET_NS + DEVICE_AHEAD_NS) for start, true in zip(found, wanted, strict=True)]
    assert max(map(abs, off)) <= device.residual_ns
    assert capture.residual_ns == max(host.residual_ns, device.residual_ns)


def test_tables_fit_the_schema_without_what_only_the_runner_knows(capture: Capture) -> None:
    assert set(capture.columns) == {"kernels", "host", "syncs"}
    for name, data in capture.columns.items():
        assert not {"variant", "step_id", "phase"} & set(data.column_names)
        variant = data.append_column("variant", pa.array(["v"] * data.num_rows))
        assert conform(name, variant).num_rows == data.num_rows > 0


def test_the_instrument_s_own_rows_are_not_in_the_tables(capture: Capture) -> None:
    assert not KERNELS & set(capture.columns["kernels"].column("name").to_pylist())
    host = capture.columns["host"]
    assert MARKER not in host.column("name").to_pylist()
    assert not [number for number in host.column("correlation").to_pylist() if number and number >= 9_000_000]
    ids = host.column("host_id").to_pylist()
    assert sorted(ids) == list(range(len(ids)))
    assert {parent for parent in host.column("parent_id").to_pylist() if parent is not None} <= set(ids)


def test_every_kernel_has_its_occupancy_limit(capture: Capture) -> None:
    kernels = capture.columns["kernels"].to_pylist()
    for row in kernels:
        if row["kind"] == "kernel":
            assert 0 < row["occupancy_limit"] <= 1
    small = next(row for row in kernels if row["name"] == "compute_position_kernel")
    assert small["occupancy_limit"] == 1.0  # 128 threads of 22 registers: 16 CTAs of 4 warps


def test_local_memory_is_said_to_be_missing(capture: Capture) -> None:
    assert ["local memory" in one.what for one in capture.missing] == [True]


def test_kernels_lost_at_the_head_cost_precision_not_the_capture(tmp_path: Path) -> None:
    markers = Markers()
    markers.at(BASE_US * 1000, lost=STAMPS)
    kernel = {"device": 0, "stream": 7, "correlation": 5, "registers per thread": 200, "shared memory": 0}
    markers._event("work", "kernel", BASE_US * 1000 + 9_000_000, 5_000, **kernel, grid=[1, 1, 1], block=[128, 1, 1])
    markers.at(BASE_US * 1000 + 20_000_000, last=True)
    found = capture_of(
        read_kineto(write(tmp_path / "t.json", markers.events)), markers.readings, markers.stamps, markers.clock
    )
    assert found.clocks["device"].drift_ppb == 0
    (row,) = found.columns["kernels"].to_pylist()
    assert row["start_ns"] == pytest.approx(
        BASE_US * 1000 + 9_000_000 + HOST_OFFSET_NS + DEVICE_AHEAD_NS, abs=found.clocks["device"].residual_ns
    )
    assert row["occupancy_limit"] is None  # the trace names no device


def test_without_stamps_the_residual_is_what_kernels_precede_their_launch_by(tmp_path: Path) -> None:
    markers = Markers()
    markers.at(BASE_US * 1000, lost=STAMPS)
    markers._event("cudaLaunchKernel", "cuda_runtime", BASE_US * 1000 + 9_050_000, 4_000, correlation=5)
    markers._event("work", "kernel", BASE_US * 1000 + 9_000_000, 5_000, device=0, stream=7, correlation=5)
    markers.at(BASE_US * 1000 + 20_000_000, last=True, lost=STAMPS)
    trace = read_kineto(write(tmp_path / "t.json", markers.events))
    found = capture_of(trace, markers.readings, markers.stamps, markers.clock)
    assert found.clocks["device"].residual_ns == found.clocks["host"].residual_ns + 50_000
    assert "no stamps of the marker kernels" in found.missing[-1].why
    assert "no marker kernels were run" in capture_of(trace, markers.readings, [], None).missing[-1].why


def test_no_kernels_is_a_loss_and_not_an_empty_table(tmp_path: Path) -> None:
    markers = Markers()
    markers.at(BASE_US * 1000, lost=STAMPS)
    markers._event("cudaLaunchKernel", "cuda_runtime", BASE_US * 1000 + 9_050_000, 4_000, correlation=5)
    markers.at(BASE_US * 1000 + 20_000_000, last=True, lost=STAMPS)
    found = capture_of(read_kineto(write(tmp_path / "t.json", markers.events)), markers.readings, [], None)
    assert "kernels" not in found.columns
    (loss,) = [row for row in found.losses if row["kind"] == "no-device-rows"]
    assert (loss["severity"], loss["count"]) == ("data_loss", 1 + 2 * STAMPS)


def test_a_trace_without_our_markers_cannot_be_placed(tmp_path: Path) -> None:
    markers = Markers()
    markers.at(BASE_US * 1000)
    trace = read_kineto(write(tmp_path / "t.json", markers.events))
    with pytest.raises(InputError, match="16 of 32 clock markers"):
        capture_of(trace, markers.readings * 2, [], None)


def test_without_host_only_the_launches_stay(merged: tuple[Path, Markers]) -> None:
    path, markers = merged
    found = capture_of(read_kineto(path), markers.readings, markers.stamps, markers.clock, host=False)
    assert set(found.columns["host"].column("category").to_pylist()) == {"runtime"}
    assert found.columns["kernels"].num_rows > 0


def test_occupancy_is_worked_out_only_where_it_is_not_given() -> None:
    rows = {
        "registers": [255, 255, None, 32],
        "shared_bytes": [0, 0, 0, 0],
        "block_x": [256, 256, 256, 2048],
        "block_y": [1, 1, 1, 1],
        "block_z": [1, 1, 1, 1],
        "occupancy_limit": pa.array([None, 0.5, None, None], pa.float64()),
    }
    table = pa.table(rows)
    assert with_occupancy(table, 90).column("occupancy_limit").to_pylist() == [0.125, 0.5, None, None]
    assert with_occupancy(table, 0) is table


def test_what_this_torch_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CPU})
    missing = KernelsProbe().available()
    assert missing is not None
    assert "built without CUPTI" in missing.why
    assert _config() is not None  # torch 2.11 to 2.13 take the option

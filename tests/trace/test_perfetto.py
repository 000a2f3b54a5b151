import gzip
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from workbench.errors import InputError
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest
from workbench.trace.perfetto import write_perfetto
from workbench.trace.track_events import Lanes, TrackEvents

Rows = list[dict[str, object]]


class Reader:
    """The tracks, slices and counter values of a trace, with the names looked up as Perfetto does."""

    def __init__(self, data: bytes) -> None:
        trace = Trace.FromString(data)
        names: dict[str, dict[int, str]] = defaultdict(dict)
        self.tracks: dict[int, Any] = {}
        self.slices: list[dict[str, Any]] = []
        self.counts: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.packets = len(trace.packet)
        events = []
        for order, packet in enumerate(trace.packet):
            for field in ("event_names", "event_categories", "debug_annotation_names"):
                for entry in getattr(packet.interned_data, field):
                    names[field][entry.iid] = entry.name
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            if packet.HasField("track_event"):
                events.append((packet.timestamp, order, packet.track_event))
        stacks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for time, _, event in sorted(events, key=lambda entry: entry[:2]):
            track = event.track_uuid
            assert track in self.tracks
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                args = {
                    names["debug_annotation_names"][arg.name_iid]: getattr(arg, arg.WhichOneof("value"))
                    for arg in event.debug_annotations
                }
                entry = {
                    "track": self.path(track),
                    "start": time,
                    "name": names["event_names"][event.name_iid],
                    "category": names["event_categories"][event.category_iids[0]],
                    "args": args,
                    "flows": list(event.flow_ids),
                    "depth": len(stacks[track]),
                }
                stacks[track].append(entry)
                self.slices.append(entry)
            elif event.type == TrackEvent.TYPE_SLICE_END:
                stacks[track].pop()["end"] = time
            else:
                value = event.counter_value if event.HasField("counter_value") else event.double_counter_value
                self.counts[self.path(track)].append((time, value))
        assert not any(stacks.values())

    def path(self, track: int) -> str:
        descriptor = self.tracks[track]
        return f"{self.path(descriptor.parent_uuid)}/{descriptor.name}" if descriptor.parent_uuid else descriptor.name

    def on(self, path: str) -> list[tuple[int, int, str]]:
        return [(s["start"], s["end"], s["name"]) for s in self.slices if s["track"] == path]


@pytest.fixture
def rich(tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]) -> Bundle:
    """A traced step with operators, one launch of two kernels, a wait and counters, beside a clean one."""
    host = {"variant": "mtp", "thread": 7, "category": "op"}
    kernel = {"variant": "mtp", "kind": "kernel", "device": 0, "stream": 3, "step_id": 1, "phase": "forward"}
    counter = {"source": "nvml", "name": "power", "unit": "W", "device": 0}
    with BundleWriter.create(tmp_path / "rich", manifest) as writer:
        clean, traced = step_rows(2)
        writer.append("steps", [clean, traced | {"run_pass": "traced"}])
        writer.append(
            "host",
            [
                host | {"host_id": 1, "name": "forward", "start_ns": 1000, "end_ns": 1800, "step_id": 1},
                host | {"host_id": 2, "name": "matmul", "start_ns": 1000, "end_ns": 1400, "parent_id": 1},
                host | {"host_id": 3, "name": "crosses", "start_ns": 1700, "end_ns": 1900},
                host
                | {"host_id": 4, "name": "launch", "start_ns": 1100, "end_ns": 1200, "correlation": 9}
                | {"category": "runtime", "parent_id": 2},
                host | {"host_id": 5, "name": "no kernel", "start_ns": 1950, "end_ns": 1950, "correlation": 10},
                host | {"host_id": 6, "variant": "other", "name": "o", "start_ns": 5, "end_ns": 6, "correlation": 9},
            ],
        )
        writer.append(
            "kernels",
            [
                kernel | {"kernel_id": 1, "name": "gemm", "start_ns": 1250, "end_ns": 1500, "correlation": 9},
                kernel
                | {"kernel_id": 2, "name": "early", "start_ns": 1400, "end_ns": 1450, "correlation": 9, "grid_x": 132}
                | {"occupancy_limit": 0.5},
            ],
        )
        writer.append(
            "syncs",
            [{"variant": "mtp", "kind": "stream", "name": "sync", "start_ns": 1600, "end_ns": 1700, "stream": 3}],
        )
        writer.append(
            "counters",
            [
                counter | {"start_ns": 1500, "end_ns": 1600, "value": 350.5},
                counter | {"start_ns": 1400, "end_ns": 1500, "value": 300},
            ],
        )
        writer.append(
            "lanes",
            [
                {"variant": "mtp", "kernel_id": 1, "sm": 4, "cta": 5, "task": "o_proj", "kind": "wait"}
                | {"start_ns": 1300, "end_ns": 1350}
            ],
        )
    return Bundle.open(tmp_path / "rich")


def read(bundle: Bundle, path: Path) -> Reader:
    packets = write_perfetto(bundle, path)
    reader = Reader(path.read_bytes())
    assert reader.packets == packets
    return reader


def test_steps_phases_and_accept_length(rich: Bundle, tmp_path: Path) -> None:
    trace = read(rich, tmp_path / "t.pftrace")
    assert trace.on("mtp · clean/steps") == [(0, 900, "step: 3 of 4")]
    assert trace.on("mtp · traced/steps") == [(1000, 1900, "step: 3 of 4")]
    assert trace.on("mtp · traced/phases") == [(1000, 1100, "draft"), (1100, 1800, "forward"), (1800, 1900, "verify")]
    (step,) = [s for s in trace.slices if s["track"] == "mtp · traced/steps"]
    assert step["args"] == {
        "step_id": 1,
        "sequence_id": 0,
        "index": 1,
        "warmup": False,
        "context": 11,
        "width": 4,
        "drafted": 3,
        "accepted": 2,
        "accept_length": 3,
    }
    assert trace.counts["mtp · traced/accept length"] == [(1000, 3), (1900, 0)]
    assert trace.counts["run/power (nvml, device 0)"] == [(1400, 300), (1500, 350.5)]
    units = {descriptor.name: descriptor.counter.unit_name for descriptor in trace.tracks.values()}
    assert (units["accept length"], units["power (nvml, device 0)"]) == ("tokens", "W")


def test_host_calls_nest_and_what_crosses_gets_a_lane(rich: Bundle, tmp_path: Path) -> None:
    trace = read(rich, tmp_path / "t.pftrace")
    assert trace.on("mtp · traced/thread 7") == [
        (1000, 1800, "forward"),
        (1000, 1400, "matmul"),
        (1100, 1200, "launch"),
        (1950, 1950, "no kernel"),
    ]
    assert trace.on("mtp · traced/thread 7 (2)") == [(1700, 1900, "crosses")]
    depths = {s["name"]: s["depth"] for s in trace.slices}
    assert (depths["forward"], depths["matmul"], depths["launch"], depths["crosses"]) == (0, 1, 2, 0)


def test_arrows_lead_from_the_launch_to_its_kernels(rich: Bundle, tmp_path: Path) -> None:
    trace = read(rich, tmp_path / "t.pftrace")
    assert trace.on("mtp · traced/device 0 stream 3") == [(1250, 1500, "gemm")]
    assert trace.on("mtp · traced/device 0 stream 3 (2)") == [(1400, 1450, "early")]
    flows = {s["name"]: s["flows"] for s in trace.slices if s["flows"]}
    assert flows == {"launch": [1, 2], "gemm": [1], "early": [2]}
    (early,) = [s for s in trace.slices if s["name"] == "early"]
    assert (early["args"]["grid_x"], early["args"]["occupancy_limit"], early["category"]) == (132, 0.5, "kernel")
    assert "grid_y" not in early["args"]


def test_waits_and_lanes_inside_a_kernel_are_drawn(rich: Bundle, tmp_path: Path) -> None:
    trace = read(rich, tmp_path / "t.pftrace")
    assert trace.on("mtp · traced/waits") == [(1600, 1700, "sync")]
    assert trace.on("mtp · traced/SM 4 CTA 5") == [(1300, 1350, "o_proj")]


def test_times_before_zero_are_shifted(sealed: Path, tmp_path: Path) -> None:
    trace = read(Bundle.open(sealed), tmp_path / "t.pftrace")
    assert trace.on("mtp · clean/prefill") == [(0, 800, "prefill"), (4000, 4800, "prefill")]
    assert trace.on("mtp · clean/steps")[0] == (900, 1800, "step: 3 of 4")


def test_gzip_by_suffix_and_the_same_bytes_each_time(rich: Bundle, tmp_path: Path) -> None:
    write_perfetto(rich, tmp_path / "a.gz")
    write_perfetto(rich, tmp_path / "b.gz")
    write_perfetto(rich, tmp_path / "c")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == (tmp_path / "c").read_bytes()
    assert not list(tmp_path.glob("*.tmp"))


def test_hostile_names_survive(tmp_path: Path, manifest: Manifest) -> None:
    names = ["a\0b", "</script>", "\u202ex", "two\nlines", "y" * 100_000]
    row = {"variant": "mtp", "thread": 1, "category": "op"}
    with BundleWriter.create(tmp_path / "b", manifest) as writer:
        rows = [row | {"host_id": i, "name": n, "start_ns": i, "end_ns": i + 1} for i, n in enumerate(names)]
        writer.append("host", rows)
    trace = read(Bundle.open(tmp_path / "b"), tmp_path / "t")
    assert [s["name"] for s in trace.slices] == [*names[:4], "y" * 999 + "…"]


def test_what_cannot_be_written_is_said(rich: Bundle, tmp_path: Path, manifest: Manifest) -> None:
    for path in (tmp_path, tmp_path / "none" / "t", ""):
        with pytest.raises(InputError):
            write_perfetto(rich, path)
    with BundleWriter.create(tmp_path / "empty", manifest):
        pass
    with pytest.raises(InputError, match="nothing to draw"):
        write_perfetto(Bundle.open(tmp_path / "empty"), tmp_path / "t")


class Sink(list[bytes]):
    """A file that remembers."""

    def write(self, data: bytes) -> int:
        self.append(bytes(data))
        return len(data)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=60), st.booleans())
def test_no_lane_ever_holds_a_clash(spans: list[tuple[int, int]], nest: bool) -> None:
    sink = Sink()
    events = TrackEvents(sink)  # type: ignore[arg-type]
    lanes = Lanes(events, "t", events.process("p"), nest=nest)
    drawn = sorted(((start, start + length) for start, length in spans), key=lambda span: (span[0], -span[1]))
    for start, end in drawn:
        lanes.add(start, end, "s", "c", {})
    lanes.close()
    trace = Reader(b"".join(sink))  # asserts that every slice is closed
    assert sorted((s["start"], s["end"]) for s in trace.slices) == sorted(drawn)
    if not nest:
        assert all(s["depth"] == 0 for s in trace.slices)


def test_a_long_trace_is_written_as_it_goes() -> None:
    """What is held does not grow with the number of slices."""
    written = 0

    class Counting:
        def write(self, data: bytes) -> int:
            nonlocal written
            written += len(data)
            return len(data)

    events = TrackEvents(Counting())  # type: ignore[arg-type]
    lanes = Lanes(events, "t", events.process("p"))
    sizes = []
    for index in range(20_000):
        lanes.add(10 * index, 10 * index + 9, f"name {index % 50}", "c", {"index": index})
        sizes.append(written)
    assert sizes[-1] > 400_000
    assert max(later - earlier for earlier, later in pairwise(sizes)) < 200
    assert sum(map(len, events._interned.values())) == 52


def test_a_step_without_accept_length_shows_its_mark(tmp_path: Path, manifest: Manifest) -> None:
    row = {"variant": "mtp", "run_pass": "traced", "step_id": 0, "index": 0, "warmup": False, "mark": "step[DECODE]"}
    path = tmp_path / "foreign"
    with BundleWriter.create(path, manifest) as writer:
        writer.append("steps", [{**row, "start_ns": 1, "draft_end_ns": 1, "forward_end_ns": 9, "end_ns": 9}])
    write_perfetto(Bundle.open(path), tmp_path / "trace")
    reader = Reader((tmp_path / "trace").read_bytes())
    assert [step["name"] for step in reader.slices if step["category"] == "step"] == ["step[DECODE]"]

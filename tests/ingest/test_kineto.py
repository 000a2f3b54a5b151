import json
from collections.abc import Callable
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.ingest.kineto import DEVICE_KINDS, HOST_CATEGORIES, SYNC_KINDS, KinetoTrace
from workbench.ingest.kineto_events import MISSING

ORIGIN_NS = 5_122_391_136_000_000

Read = Callable[..., KinetoTrace]


def losses(trace: KinetoTrace) -> dict[str, int]:
    return {row["kind"]: row["count"] for row in trace.losses.rows()}


def named(trace: KinetoTrace, table: dict[str, Any]) -> list[str]:
    return [trace.names[code] for code in table["name"]]


def test_rows_land_in_their_tables_with_exact_times(make: Any, read: Read) -> None:
    trace = read(
        [
            make.host("aten::mm", 10.001, 20.5),
            make.call("cudaLaunchKernel", 12, 3.25, 77),
            make.annotation("step", 1, 50),
            make.host("f.py(1): f", 2, 3, cat="python_function", tid="main"),
            make.host("Activity Buffer Request", 2, 3, cat="overhead"),
            make.kernel("gemm", 20.123, 5.001, 77, grid=[4, 2, 1], block=[128, 1, 1], **{"registers per thread": 168}),
            make.kernel("Memcpy DtoH", 30, 1, 78, cat="gpu_memcpy", bytes=256),
            make.kernel("Memset (Device)", 31, 1, 79, cat="gpu_memset", bytes=4),
        ]
    )
    assert named(trace, trace.host) == ["aten::mm", "cudaLaunchKernel", "step", "f.py(1): f", "Activity Buffer Request"]
    assert [HOST_CATEGORIES[code] for code in trace.host["category"]] == [
        "op",
        "runtime",
        "annotation",
        "python",
        "overhead",
    ]
    assert [DEVICE_KINDS[code] for code in trace.device["kind"]] == ["kernel", "memcpy", "memset"]
    assert (trace.host["start"] - ORIGIN_NS).tolist() == [10_001, 12_000, 1_000, 2_000, 2_000]
    assert (trace.host["end"] - trace.host["start"]).tolist() == [20_500, 3_250, 50_000, 3_000, 3_000]
    assert (trace.device["start"] - ORIGIN_NS).tolist() == [20_123, 30_000, 31_000]
    assert [int(trace.device[f"grid_{axis}"][0]) for axis in "xyz"] == [4, 2, 1]
    assert trace.device["registers"].tolist() == [168, MISSING, MISSING]
    assert trace.device["bytes"].tolist() == [MISSING, 256, 4]
    assert trace.host["correlation"].tolist() == [MISSING, 77, MISSING, MISSING, MISSING]
    assert trace.threads == {-1: "main"}
    assert trace.host["thread"].tolist() == [7, 7, 7, -1, 7]
    assert trace.header["deviceProperties"][0]["name"] == "NVIDIA H200"
    assert trace.header["traceName"] == "/a/b/t.json"
    assert losses(trace) == {}


@pytest.mark.parametrize(
    ("ts", "dur", "start", "length"),
    [
        ("1707417525509335", "36", 1_707_417_525_509_335_000, 36_000),  # torch before 2.3: integers since 1970
        ("1712195495519689.437", "4.928", 1_712_195_495_519_689_437, 4_928),  # a float64 steps by 250 ns here
        ("1712195495519695.8", "0.5", 1_712_195_495_519_695_800, 500),
        ("5122391136593.216", "47.005", 5_122_391_136_593_216, 47_005),  # counted from baseTimeNanoseconds
        ("0", "0", 0, 0),
        ("-1.5", "2", -1_500, 2_000),
    ],
)
@pytest.mark.parametrize("other", ["", '{"ph": "X", "cat": "cpu_op", "name": "b", "ts": 5.5, "dur": 1},'])
def test_no_digit_of_a_time_is_lost(
    make: Any, read: Read, ts: str, dur: str, start: int, length: int, other: str
) -> None:
    event = f'{{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": {ts}, "dur": {dur}}}'
    trace = read(f'{{"traceEvents": [{other} {event}]}}'.encode())
    assert (trace.host["start"][-1], trace.host["end"][-1]) == (start, start + length)
    assert set(losses(trace)) <= {"no-start"}


def test_the_newest_fields(make: Any, read: Read) -> None:
    occupancy = {"activeBlocksPerMultiprocessor": 4, "limitingFactors": ["warps"], "blockLimitRegs": 5}
    fields = {"graph id": 12, "graph node id": 34, "occupancy": occupancy, "shared memory": 68608}
    trace = read([make.kernel("k", 1, 2, 3, **fields)])
    assert [int(trace.device[name][0]) for name in ("graph_id", "graph_node", "blocks_per_sm", "shared")] == [
        12,
        34,
        4,
        68608,
    ]


def test_rocm_rows(make: Any, read: Read) -> None:
    """Kernels of a HIP graph carry no launch shape; host rows of HIP carry numbers as text."""
    trace = read(
        [
            make.call("hipMemcpyAsync", 1, 2, 5, bytes="256", kind="1", src="0x7f"),
            make.call("hipLaunchKernel", 4, 2, 6, grid=[1, 1, 1], block=[256, 1, 1], stream="0x0"),
            make.kernel("k", 10, 3, 6, kind="Dispatch Task", device=9, stream=3),
            make.kernel("copy", 8, 1, 5, cat="gpu_memcpy", kind="DtoD", bytes=4100, device=9),
        ]
    )
    assert named(trace, trace.host) == ["hipMemcpyAsync", "hipLaunchKernel"]
    assert trace.device["device"].tolist() == [9, 9]
    assert losses(trace) == {}


def test_synchronisations(make: Any, read: Read) -> None:
    kinds = ["Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync", "Something New"]
    events = [
        make.kernel(kind, index, 1, index, cat="cuda_sync", cuda_sync_kind=kind) for index, kind in enumerate(kinds)
    ]
    trace = read([make.host("a", 0, 1), *events])
    assert [SYNC_KINDS[code] for code in trace.syncs["kind"]] == ["event", "stream_wait", "stream", "context"]
    assert losses(trace) == {"unknown-sync": 1}


def test_counters(make: Any, read: Read) -> None:
    def counter(ts: Any, args: Any) -> dict[str, Any]:
        return {"ph": "C", "name": "HBM", "pid": "GPU 2 Counters", "ts": ts, "args": args}

    trace = read(
        [
            make.host("a", 0, 1),
            counter(5, {"HBM": 12.5}),
            counter(6, {"read": 1, "write": 2}),
            counter(7, {"x": "text"}),
            counter(8, None),
            counter(None, {"HBM": 1}),
            counter(9, {"HBM": 1, "flag": True, "text": "x", "huge": 10**400}),
        ]
    )
    assert [(row["name"], row["ns"], row["value"]) for row in trace.counters] == [
        ("HBM", 5_000, 12.5),
        ("HBM: read", 6_000, 1.0),
        ("HBM: write", 6_000, 2.0),
        ("HBM: HBM", 9_000, 1.0),
    ]
    assert losses(trace) == {"unusable-counter": 3 + 3}


def test_what_is_not_kept_is_counted(make: Any, read: Read) -> None:
    def bare(phase: str, category: str = "x") -> dict[str, Any]:
        return {"ph": phase, "cat": category, "name": "n", "ts": 1, "pid": 0, "tid": 0}

    events = [
        bare("s", "ac2g"), bare("f", "ac2g"), bare("f", "ac2g"), bare("M"), bare("i"), bare("B"),
        {**bare("X", "Trace"), "dur": 1}, {**bare("X", "gpu_user_annotation"), "dur": 1},
        {**bare("X", "mystery"), "dur": 1}, {"name": "no phase"}, make.host("a", 0, 1),
    ]  # fmt: skip
    trace = read(events)
    assert losses(trace) == {
        "not-kept-s": 1,
        "not-kept-f": 2,
        "not-kept-M": 1,
        "not-kept-i": 1,
        "not-kept-Trace": 1,
        "not-kept-device-marks": 1,
        "unknown-phase": 2,
        "unknown-category": 1,
    }
    assert trace.events == len(events) == sum(losses(trace).values()) + 1


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"ts": None}, "no-start"),
        ({"ts": "soon"}, "no-start"),
        ({"ts": 1e300}, "no-start"),
        ({"dur": None}, "no-duration"),
        ({"dur": [1]}, "no-duration"),
        ({"dur": -5}, "negative-duration"),
        ({"name": 7}, "unusable-field"),
        ({"pid": None, "args": {}}, "no-device"),
        ({"args": {"device": 1 << 40}}, "no-device"),
        ({"args": {"device": 1 << 90}}, "integer-out-of-range"),
        ({"args": {"device": 0, "correlation": 1 << 70}}, "integer-out-of-range"),
        ({"args": {"device": 0, "registers per thread": 1 << 40}}, "integer-out-of-range"),
        ({"args": {"device": 0, "grid": [1, 2]}}, "unusable-field"),
        ({"args": {"device": 0, "grid": "grid(1,)"}}, "unusable-field"),
        ({"args": 5}, "unusable-field"),
        ({"name": "x" * 5000}, "name-cut"),
    ],
)
def test_an_unusable_value_is_a_loss_and_spares_the_other_rows(
    make: Any, read: Read, change: dict[str, Any], kind: str
) -> None:
    bad = {**make.kernel("bad", 5, 1, 2), **change}
    trace = read([make.kernel("one", 1, 1, 1), bad, make.kernel("two", 9, 1, 3)])
    assert kind in losses(trace)
    assert {"one", "two"} <= set(named(trace, trace.device))
    assert (trace.device["end"] >= trace.device["start"]).all()


def test_long_names_that_begin_alike_stay_apart(make: Any, read: Read) -> None:
    trace = read([make.host("x" * 5000 + "a", 1, 1), make.host("x" * 5000 + "b", 2, 1)])
    assert len(set(named(trace, trace.host))) == 2
    assert max(map(len, trace.names)) <= 4096


def test_hostile_names_are_kept_as_text(make: Any, read: Read) -> None:
    names = ['"quoted"', "</script><b>", "=cmd|' /C calc'!A0", "\x00\x1b[31m", "\u202e rtl", "a\nb", "}, {", "😀"]
    trace = read([make.host(name, index, 1) for index, name in enumerate(names)])
    assert named(trace, trace.host) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"traceEvents": []}', "nothing to read (its list of events is empty)"),
        (b'{"traceEvents": [{"ph": "B", "name": "page load", "ts": 1}]}', "no event of torch.profiler in it"),
        (b"not a trace", "not a torch.profiler trace"),
    ],
)
def test_a_file_with_nothing_in_it_is_refused(make: Any, read: Read, text: bytes, message: str) -> None:
    with pytest.raises(InputError) as raised:
        read(text)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_cut_anywhere_keeps_its_complete_events(make: Any, read: Read, name: str) -> None:
    events = [make.kernel(f"k{index}", index, 1, index) for index in range(20)]
    text = make.text(events)
    complete = [text.index(f'"k{index}"'.encode()) for index in range(20)]
    for cut in range(complete[3], len(text), 97):
        trace = read(text[:cut], name)
        rows = len(trace.device["start"])
        assert rows >= sum(text.index(b"}}", place) + 2 <= cut for place in complete)
        assert rows == 20 or losses(trace)["truncated"] == 1


def test_the_same_rows_whatever_the_layout(make: Any, read: Read) -> None:
    events = [make.host("aten::mm", 1.5, 2), make.kernel("gemm", 3.25, 4, 9, grid=[1, 2, 3])]
    shuffled = [{key: event[key] for key in sorted(event)} for event in events]
    texts = [
        make.text(events),
        make.text(events, indent=2),
        json.dumps({"traceEvents": shuffled}).encode(),
        json.dumps(shuffled).encode(),
    ]
    traces = [read(text) for text in texts]
    for trace in traces[1:]:
        for table in ("host", "device"):
            first, other = getattr(traces[0], table), getattr(trace, table)
            assert {name: column.tolist() for name, column in first.items()} == {
                name: column.tolist() for name, column in other.items()
            }

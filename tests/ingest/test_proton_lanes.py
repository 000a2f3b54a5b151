"""Spans inside kernels by Proton: launches told apart, places kept, cycles never called time."""

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.ingest.bundle import ingest_files
from workbench.ingest.proton_lanes import read_proton_lanes
from workbench.ingest.sniff import sniff
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle
from workbench.trace.validity import verdict

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
LANES = FOREIGN / "lanes.chrome_trace"
RECORDED = FOREIGN.parent / "proton36_add_h200.chrome_trace"


def span(kernel: str = "k", cta: int = 0, warp: str = "warp 0 (line 0)", **more: Any) -> dict[str, Any]:
    own = {"name": "load", "cat": kernel, "ph": "X", "pid": f"{kernel} Core{cta + 3} CTA{cta}", "tid": warp}
    return own | {"ts": 1.0, "dur": 0.5, "args": {}} | more


def written(path: Path, *events: Any) -> Path:
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": list(events)}))
    return path


def test_spans_of_two_launches(tmp_path: Path) -> None:
    assert sniff(LANES) == "proton-lanes"
    assert sniff(FOREIGN / "kernels.chrome_trace") == "proton-trace"
    ingest_files([LANES], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        kernels = bundle.table("kernels").to_pylist()
        assert [(row["kernel_id"], row["name"], row["start_ns"]) for row in kernels] == [
            (0, "moe_gemm", 5_000_040),
            (1, "moe_gemm", 6_000_040),
        ]
        lanes = bundle.table("lanes").to_pylist()
        assert len(lanes) == 16
        assert {(row["sm"], row["cta"], row["warp"]) for row in lanes} == {(0, 0, 0), (0, 0, 1), (7, 1, 0), (7, 1, 1)}
        assert {(row["task"], row["end_ns"] - row["start_ns"]) for row in lanes} == {("load", 1_500), ("dot", 1_960)}
        counters = {row["name"]: (row["value"], row["unit"]) for row in bundle.table("counters").to_pylist()}
        assert counters["cycles of a warp in load: moe_gemm"] == (1_500.0, "cycles")
        judged = verdict(bundle)
        assert not judged.allows("device-time")
        assert [check.id for check in judged.checks] == ["cycles-as-time"]
        said = {row["what"]: row["why"] for row in bundle.table("limits").to_pylist()}
        assert "at least 1.76 GHz" in said["lengths of spans in time"]  # 3,521 cycles in 2,000 ns
    assert check_bundle(tmp_path / "b").ok


def test_a_trace_of_a_real_device(tmp_path: Path) -> None:
    """Triton 3.6 on one H200: an addition with two scopes, launched twice over 1024 CTAs; those of two SMs."""
    ingest_files([RECORDED], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert [row["name"] for row in bundle.table("kernels").to_pylist()] == ["scoped_add", "scoped_add"]
        lanes = bundle.table("lanes").to_pylist()
        assert len(lanes) == 2 * 16 * 4 * 2  # launches, CTAs, warps, scopes
        assert {row["sm"] for row in lanes} == {0, 131}
        assert {row["warp"] for row in lanes} == {0, 1, 2, 3}
        counters = {row["name"]: row["value"] for row in bundle.table("counters").to_pylist()}
        assert counters == {
            "cycles of a warp in load: scoped_add": 243.0,
            "cycles of a warp in store: scoped_add": 1_355.0,
        }
    assert check_bundle(tmp_path / "b").ok


def test_launches_are_told_apart_by_ctas_that_come_again_or_began_at_another_time(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t",
        span(cta=0), span(cta=0, warp="warp 1"), span(cta=1), span(cta=0), span("other"), span("other"),
        span("other", args={"Init Time (ns)": 5}),
    )  # fmt: skip
    part = read_proton_lanes(path)
    assert [row["name"] for row in part.tables["kernels"]] == ["k", "k", "other", "other"]
    assert [sum(lane["kernel_id"] == one for lane in part.tables["lanes"]) for one in range(4)] == [3, 1, 2, 1]


def test_what_cannot_be_used_is_counted(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t",
        span(tid=None), span(ts="x"), span(dur=-1), span(ts=1e300), span(pid="stream 7"), {"ph": "M"}, 7,
        span(name=None),
    )  # fmt: skip
    part = read_proton_lanes(path)
    assert [row["warp"] for row in part.tables["lanes"]] == [None, 0]
    assert part.losses.count("unusable-event") == 3
    assert part.losses.count("not-kept-outside") == 1
    cut = tmp_path / "cut"
    cut.write_text(LANES.read_text()[:2000])
    assert 0 < read_proton_lanes(cut).records < 16


def test_times_since_1970_are_said_to_be_coarse(tmp_path: Path) -> None:
    part = read_proton_lanes(written(tmp_path / "t", span(ts=1.7e15)))
    assert any(row["what"] == "starts of spans below 0.25 us" for row in part.limits)
    part = read_proton_lanes(written(tmp_path / "u", span(ts=1.7e9)))
    assert not any(row["what"] == "starts of spans below 0.25 us" for row in part.limits)


def test_beside_a_trace_there_is_no_place_for_them(tmp_path: Path) -> None:
    ingest_files([FOREIGN / "kernels.chrome_trace", LANES], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.rows("lanes") == 0
        assert any(row["fix"] == "ingest the trace of Proton by itself" for row in bundle.table("limits").to_pylist())
    with pytest.raises(InputError, match="two profiles of kernels"):
        ingest_files([FOREIGN / "kernels.ncu.csv", LANES], tmp_path / "c")


def test_nothing_inside_a_kernel_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no span inside a kernel"):
        read_proton_lanes(FOREIGN / "kernels.chrome_trace")

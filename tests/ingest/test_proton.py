"""Proton's two formats: sums without times, and kernels without a host."""

import json
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.ingest.bundle import ingest_files
from workbench.ingest.proton import read_proton_trace, read_proton_tree
from workbench.trace.bundle import Bundle

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"


def test_a_tree_has_no_kernels(tmp_path: Path) -> None:
    ingest_files([FOREIGN / "tree.hatchet"], tmp_path / "b")
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.rows("kernels") == 0
        values = {row["name"]: row["value"] for row in bundle.table("counters").to_pylist()}
        assert values["kernel time: moe_gemm"] == 960_000 + 968_000
        assert values["kernel launches: moe_gemm"] == 16
        assert values["bytes: moe_gemm"] == 1.12e9
        assert "kernel time: ROOT" not in values
        assert any(row["key"] == "CUDA.0.num_sms" for row in bundle.table("env").to_pylist())
        assert any("sums" in row["why"] for row in bundle.table("limits").to_pylist())


def test_a_trace_gives_kernels_by_stream(tmp_path: Path) -> None:
    made = ingest_files([FOREIGN / "kernels.chrome_trace"], tmp_path / "b")
    assert made.rule == "repeating kernels"
    with Bundle.open(tmp_path / "b") as bundle:
        kernels = bundle.table("kernels").to_pylist()
        assert {row["stream"] for row in kernels} == {7, 13}
        assert {row["end_ns"] - row["start_ns"] for row in kernels} == {120_500}
        assert len(kernels) == 50


def test_a_cut_off_trace_gives_whole_events(tmp_path: Path) -> None:
    text = (FOREIGN / "kernels.chrome_trace").read_text()
    path = tmp_path / "cut"
    path.write_text(text[: len(text) // 2])
    trace = read_proton_trace(path)
    assert 0 < len(trace.device["start"]) < 50
    assert trace.losses.count("truncated") == 1


def test_spans_inside_kernels_are_counted_not_read(tmp_path: Path) -> None:
    events = [
        {"name": "k", "cat": "kernel", "ph": "X", "tid": 1, "ts": 0.0, "dur": 2.0, "args": {"call_stack": []}},
        {"name": "load", "cat": "k", "ph": "X", "pid": "k Core0 CTA0", "tid": "warp 0", "ts": 0.0, "dur": 1.0},
        {"name": "bad", "cat": "kernel", "ph": "X", "tid": 1, "ts": "x", "dur": 1.0},
    ]
    path = tmp_path / "t"
    path.write_text(json.dumps({"displayTimeUnit": "us", "traceEvents": events}))
    trace = read_proton_trace(path)
    assert len(trace.device["start"]) == 1
    assert (trace.losses.count("not-kept-inside"), trace.losses.count("unusable-event")) == (1, 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"frame": {"name": "ROOT"}, "metrics": {"time (ns)": 1', "damaged profile"),
        ('[{"frame": {"name": "ROOT"}, "metrics": {}}]', "no frame has a time"),
        ("[" * 100_000, "damaged profile"),
        ("[1, 2]", "no frame has a time"),
    ],
)
def test_damage_gets_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(InputError, match=line):
        read_proton_tree(tmp_path / "t")

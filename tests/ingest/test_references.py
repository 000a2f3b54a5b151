"""Real traces, where they are at hand, against the busy and idle times that another tool (TraceLens) wrote."""

import csv
from pathlib import Path

import pytest

from workbench.diagnose.busy import CATEGORIES, activities, busy, busy_by_step
from workbench.diagnose.gaps import explain, gaps
from workbench.ingest.bundle import ingest_kineto
from workbench.trace.bundle import Bundle

TRACES = Path(__file__).parents[3] / "shared" / "traces"
TOLERANCE = 1e-3

CASES = [
    ("sglang_qwen3_8b_decode_mi300", "sglang_decode", "window"),
    ("vllm_decode_graph_mi300", "vllm_decode_full", "window"),
    ("qwen15_05b_chat_h100", "qwen15_05b_chat_h100", "step"),
]


def ingested(tmp_path: Path, name: str) -> Bundle:
    trace = TRACES / f"{name}.json.gz"
    if not trace.exists():
        pytest.skip(f"the public trace {trace.name} is not beside the repository (../shared/traces)")
    ingest_kineto(trace, tmp_path / name)
    return Bundle.open(tmp_path / name)


def reference(name: str) -> dict[str, float]:
    with (TRACES / f"{name}.tracelens_gpu_timeline.csv").open(newline="") as file:
        return {row["type"]: float(row["time ms"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize(("name", "csv_name", "what"), CASES)
def test_busy_and_idle_equal_the_reference(tmp_path: Path, name: str, csv_name: str, what: str) -> None:
    with ingested(tmp_path, name) as bundle:
        found = busy(bundle, "trace")[0] if what == "window" else next(iter(busy_by_step(bundle, "trace").values()))[-1]
    expected = reference(csv_name)
    parts = dict(zip(CATEGORIES, (ns / 1e6 for ns in found.by_category), strict=True))
    assert found.window_ns / 1e6 == pytest.approx(expected["total_time"], rel=TOLERANCE)
    assert found.busy_ns / 1e6 == pytest.approx(expected["busy_time"], rel=TOLERANCE)
    assert found.idle_ns / 1e6 == pytest.approx(expected["idle_time"], rel=TOLERANCE)
    # The reference counts fills as computation.
    assert parts["compute"] + parts["memset"] == pytest.approx(expected["computation_time"], rel=TOLERANCE)
    assert parts["memcpy"] == pytest.approx(expected["exposed_memcpy_time"], rel=TOLERANCE)
    assert parts["collective"] == expected["exposed_comm_time"] == 0


def test_the_gap_of_the_sglang_trace_is_explained(tmp_path: Path) -> None:
    with ingested(tmp_path, "sglang_qwen3_8b_decode_mi300") as bundle:
        (activity,) = activities(bundle, "trace")
        gap = gaps(activity)[0]
        assert gap.ns / 1e6 == pytest.approx(463.3, abs=0.05)
        assert gaps(activity)[1].ns < gap.ns / 1000
        sentence = explain(bundle, "trace", gap).sentence()
    assert sentence.startswith(
        "device 9 ran nothing for 463.3 ms: thread 251 waited 463.0 ms of it (99.9 %) in hipMemcpyWithStream, a copy "
        "that blocks, called by aten::copy_ in cuda_graph_runner.py(276): populate_from_forward_batch"
    )


@pytest.mark.parametrize(
    ("name", "rule", "steps"),
    [
        ("sglang0517_gptoss20b_mxfp4_h200", "engine marks", 16),
        ("sglang0517_qwen3_30b_bf16_h200", "engine marks", 16),
        ("sglang0517_qwen3_4layers_dflash_h200", "engine marks", 5),
        ("ns_resolution_resnet_v100", "ProfilerStep#", 5),
        ("cpu_only", "ProfilerStep#", 1),
        ("cuda_event_sync", "ProfilerStep#", 1),
        ("triton_one_kernel", "ProfilerStep#", 1),
    ],
)
def test_steps_of_real_traces(tmp_path: Path, name: str, rule: str, steps: int) -> None:
    with ingested(tmp_path, name) as bundle:
        assert bundle.rows("steps") == steps
        assert f"steps found by: {rule}" in bundle.manifest.notes[0]
        serious = bundle.query("select kind, detail from losses where severity <> 'info'").to_pylist()
        assert serious == []

"""Real traces, where they are beside the repository: what must be said of each, and what must not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find_in
from workbench.ingest.bundle import ingest_files
from workbench.trace.bundle import Bundle

TRACES = Path(__file__).parents[4] / "shared" / "traces"
Open = Callable[..., dict[str, Finding]]


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Open]:
    """``found(name, *more)``: the findings on the trace called ``name``, ingested with the files ``more``."""
    bundles: list[Bundle] = []

    def make(name: str, *more: Path) -> dict[str, Finding]:
        path = TRACES / f"{name}.json.gz"
        if not path.exists():
            pytest.skip(f"the trace {path.name} is not beside the repository (../shared/traces)")
        ingest_files([path, *more], tmp_path / "b")
        bundles.append(Bundle.open(tmp_path / "b"))
        return {one.id: one for one in find_in(Facts(bundles[-1], "trace"))}

    yield make
    for bundle in bundles:
        bundle.close()


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("sglang0517_gptoss20b_mxfp4_h200", "launching 1 replay takes 0.968 ms"),
        ("sglang0517_qwen3_30b_bf16_h200", "launching 1 replay takes 1.31 ms"),
        ("sglang0517_qwen3_4layers_dflash_h200", "launching 2 replays takes 0.221 ms"),
    ],
)
def test_h200_traces_name_the_launch_and_are_stretched(found: Open, name: str, launch: str) -> None:
    findings = found(name)
    one = findings["trace-inflation"]
    assert one.severity == "critical"
    assert launch in one.sentence
    assert next(iter(findings)) == "trace-inflation"
    assert "the engine's own launch cost; without the time of a clean step the profiler's part may be" in one.sentence
    # By what launches cost elsewhere tracing makes that gap: no loss of the engine's is claimed.
    assert "replay-boundary" not in findings


def test_the_stretch_is_known_with_a_benchmark_of_the_same_run(found: Open, tmp_path: Path) -> None:
    """Without the profiler that engine took 3.40 ms a step."""
    result = tmp_path / "one_batch.jsonl"
    result.write_text(json.dumps({"batch_size": 1, "median_decode_latency": 0.0034, "overall_throughput": 290.0}))
    one = found("sglang0517_gptoss20b_mxfp4_h200", result)["trace-inflation"]
    assert "A step without the profiler takes 3.40 ms: traced ones are 1.33 times as long." in one.sentence
    assert "0.814 ms (0.786 to 0.842 ms) are the profiler's and 0.0281 ms the engine's own launch cost" in one.sentence


def test_the_small_model_with_a_drafter_is_bound_by_its_host(found: Open) -> None:
    findings = found("sglang0517_qwen3_4layers_dflash_h200")
    assert "faster kernels will give nothing until the host takes less than 0.945 ms" in findings["host-bound"].sentence
    assert "39.8 kernels shorter than 3 us" in findings["kernels-between-graphs"].sentence


@pytest.mark.parametrize("name", ["sglang_qwen3_8b_decode_mi300", "vllm_decode_graph_mi300"])
def test_launches_that_nobody_waits_for_are_a_note(found: Open, name: str) -> None:
    assert found(name)["trace-inflation"].severity == "note"


@pytest.mark.parametrize("name", ["cuda_event_sync", "triton_one_kernel", "qwen15_05b_chat_h100"])
def test_traces_without_graphs_are_not_stretched_by_them(found: Open, name: str) -> None:
    findings = found(name)
    assert not {"trace-inflation", "kernels-between-graphs", "engine-bandwidth"} & set(findings)

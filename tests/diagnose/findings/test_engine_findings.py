"""Findings on engines' traces and logs: each on a bundle that holds its cause, and on one that must not trigger it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find_in
from workbench.diagnose.findings.skinny_gemm import tile_of
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import Perturbation

ROOT = Path(__file__).parents[3]
Make = Callable[..., Bundle]
Row = dict[str, Any]

GEMM: Row = {"name": "nvjet_tst_64x8", "ns": 50_000, "grid_x": 1320, "block_x": 128, "block_y": 1, "block_z": 1}
TINY: Row = {"name": "update_state", "ns": 1_500, "grid_x": 1, "block_x": 32, "call": "eager", "took": 2_000}
TRACED: Row = {"clean": 0, "traced": 8, "source": "kineto"}
"""As ingested: every step is a traced one."""


def found(bundle: Bundle) -> dict[str, Finding]:
    findings = find_in(Facts(bundle, "v"))
    for one in findings:
        assert (ROOT / one.page).is_file(), one.page
        assert one.sentence.endswith(".")
        assert one.evidence
        if one.recoverable is not None:
            low, high = one.recoverable.low, one.recoverable.high
            assert low is not None
            assert high is not None
            assert 0 <= low <= one.recoverable.value <= high
    return {one.id: one for one in findings}


def graph(count: int = 10, **first: Any) -> list[Row]:
    """A replay of ``count`` products; ``first`` changes its first kernel."""
    plain = GEMM | {"gap": 300, "call": 0}
    return [plain | first, *(plain for _ in range(count - 1))]


def test_trace_inflation_names_the_launch_and_the_stretch(device_run: Make) -> None:
    kernels = graph(gap=220_000, lead=200_000, took=200_000)
    one = found(device_run(kernels, **TRACED))["trace-inflation"]
    assert one.severity == "critical"
    assert "0.200 ms of the host's time a step" in one.sentence
    assert "20 us a kernel" in one.sentence
    assert "not in the trace" in one.sentence
    clean = [Perturbation(variant="v", instrument="torch.profiler", clean_step_ns=500_000, traced_step_ns=722_700)]
    one = found(device_run(kernels, **TRACED, perturbation=clean))["trace-inflation"]
    assert "1.45 times as long" in one.sentence
    assert one.confidence == "high"


def test_trace_inflation_is_a_note_where_the_launch_is_short(device_run: Make) -> None:
    assert found(device_run(graph(took=1_500), **TRACED))["trace-inflation"].severity == "note"


def test_no_trace_inflation_with_clean_steps_or_without_graphs(device_run: Make) -> None:
    long = graph(gap=220_000, lead=200_000, took=200_000)
    assert "trace-inflation" not in found(device_run(long))
    eager = [GEMM | {"call": "eager"} for _ in range(10)]
    assert "trace-inflation" not in found(device_run(eager, **TRACED))


def test_a_launch_that_tracing_makes_long_is_no_loss_at_the_replay(device_run: Make) -> None:
    assert "replay-boundary" not in found(device_run(graph(gap=220_000, lead=200_000, took=200_000), **TRACED))
    # A short call, and idle time after it: sglang#5593's bubble on the device's side.
    late = graph(gap=45_000, lead=42_000, took=2_000)
    assert "replay-boundary" in found(device_run(late, **TRACED))
    assert "replay-boundary" not in found(device_run(graph(), **TRACED))


def bubble(bundle_of: Make, doing_ns: int) -> Bundle:
    """A replay after ``doing_ns`` in which the host prepares it (sglang#5593)."""
    plain = bundle_of(graph(gap=doing_ns + 3_000, lead=2_000), **TRACED)
    starts = Facts(plain, "v").traced.start.tolist()
    host = [
        {"name": "replay_prepare", "category": "op", "start_ns": start + 1_000, "end_ns": start + doing_ns}
        for start in starts
        if doing_ns > 1_000
    ]
    return bundle_of(graph(gap=doing_ns + 3_000, lead=2_000), **TRACED, tables={"host": host})


def test_the_host_prepares_each_replay(device_run: Make) -> None:
    one = found(bubble(device_run, 300_000))["host-bound"]
    assert "before graph replays, while the host is in replay_prepare" in one.sentence
    assert any("replay_prepare" in row.what for row in one.evidence)
    assert "host-bound" not in found(bubble(device_run, 1_000))


def test_a_host_that_sets_the_pace_says_that_kernels_are_not_worth_it(device_run: Make) -> None:
    kernels = [GEMM | {"ns": 10_000, "gap": 20_000, "call": "eager", "lead": 2_000} for _ in range(20)]
    sentence = found(device_run(kernels, **TRACED))["host-bound"].sentence
    assert "The host itself works 0.600 ms a step and the device 0.200 ms" in sentence
    assert "faster kernels will give nothing until the host takes less than 0.200 ms" in sentence


def test_a_host_that_waits_for_the_device_does_not_set_the_pace(device_run: Make) -> None:
    kernels = [GEMM | {"ns": 10_000, "gap": 20_000, "call": "eager", "lead": 2_000} for _ in range(20)]
    waiting = found(device_run(kernels, **TRACED, waits=((0, 590_000),)))
    assert all("will give nothing" not in one.sentence for one in waiting.values())


def test_a_read_back_every_step(device_run: Make) -> None:
    """sglang#26171, #28491: the host reads a value back, then launches what was waiting for it."""
    read = {"name": "Memcpy DtoH (Device -> Pageable)", "kind": "memcpy", "ns": 2_000, "gap": 500, "call": "eager"}
    kernels = [GEMM | {"call": "eager"}, read | {"took": 60_000}, *graph(gap=120_000, lead=2_000)]
    starts = Facts(device_run(kernels, **TRACED), "v").traced.start.tolist()
    waits = [{"thread": 1, "start_ns": start + 60_000, "end_ns": start + 160_000} for start in starts]
    one = found(device_run(kernels, **TRACED, tables={"syncs": waits}))
    assert one["cpu-sync"].location == "cudaStreamSynchronize"
    assert "1 times a step" in one["cpu-sync"].sentence
    assert "cpu-sync" not in found(device_run([GEMM | {"call": "eager"}, *graph()], **TRACED))


def test_a_swarm_between_graphs(device_run: Make) -> None:
    """vllm#20078: state updates one by one between two replays."""
    swarm = [TINY | {"gap": 6_000, "lead": 5_000} for _ in range(30)]
    one = found(device_run([*graph(), *swarm, *(row | {"call": 1} for row in graph())], **TRACED))
    assert "kernels-between-graphs" in one
    assert one["kernels-between-graphs"].location == "update_state"
    assert "30 kernels shorter than 3 us" in one["kernels-between-graphs"].sentence
    few = [TINY | {"gap": 6_000, "lead": 5_000} for _ in range(4)]
    assert "kernels-between-graphs" not in found(device_run([*graph(), *few], **TRACED))
    eager = [GEMM | {"call": "eager"}, *swarm]
    assert "kernels-between-graphs" not in found(device_run(eager, **TRACED))


GENERIC = "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8"


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        (GENERIC, (128, 256)),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute", (128, 128)),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", (64, 8)),
        ("Cijk_Alik_Bljk_BBS_BH_MT128x64x64_MI16x16x1", (128, 64)),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn", (128, 64)),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", (16, 256)),
        ("flash_fwd_kernel", None),
        ("fused_moe_kernel", None),
    ],
)
def test_tiles_in_names(name: str, tile: tuple[int, int] | None) -> None:
    assert tile_of(name) == tile


def test_skinny_gemm(device_run: Make) -> None:
    """sglang#39114: a few rows on tiles of 128 x 256."""
    thin = [GEMM | {"name": GENERIC, "grid_x": 16} for _ in range(6)]
    one = found(device_run([*graph(4), *thin]))
    assert "128x256" in one["skinny-gemm"].sentence
    assert "under-fill" in one["skinny-gemm"].explains
    fitting = [row | {"name": "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT"} for row in thin]
    assert "skinny-gemm" not in found(device_run([*graph(4), *fitting]))
    full = [row | {"grid_x": 1320} for row in thin]
    assert "skinny-gemm" not in found(device_run([*graph(4), *full]))


def test_the_whole_cache_is_converted_in_each_layer(device_run: Make) -> None:
    """sglang#35291: the pool has 4 Mi elements a layer, the sequence about a hundred tokens."""
    pool = {"name": "void at::native::direct_copy_kernel_cuda<>", "ns": 30_000, "grid_x": 16_384, "block_x": 256}
    kernels = [row for _ in range(6) for row in (GEMM, pool)]
    one = found(device_run(kernels))["kv-over-read"]
    assert "goes with the pool's size" in one.sentence
    assert one.explains == ("over-fetch",)
    used = pool | {"grid_x": 400}  # 102,400 elements: a thousand for each token
    assert "kv-over-read" not in found(device_run([row for _ in range(6) for row in (GEMM, used)]))
    once = [*(GEMM for _ in range(6)), pool]
    assert "kv-over-read" not in found(device_run(once))


def said(name: str, *values: float) -> list[Row]:
    """Lines of a log, a second apart; one value is said three times."""
    return [
        {"source": "log", "name": name, "device": None, "unit": "", "value": value, "start_ns": at * 10**9}
        | {"end_ns": at * 10**9 + 1}
        for at, value in enumerate(values if len(values) > 1 else values * 3, 1)
    ]


def test_the_engines_bandwidth_is_not_traffic(device_run: Make) -> None:
    log = [*said("generation_throughput", 500.0), *said("running_requests", 1.0), *said("accept_length", 2.0)]
    # 250 steps/s of 4 GB: 1 TB/s.
    wrong = [*log, *said("estimated_read_rate", 9e12)]
    one = found(device_run(graph(), **TRACED, read_bytes=4 * 10**9, tables={"counters": wrong}))["engine-bandwidth"]
    assert "9 times" in one.sentence
    assert "modelled" in one.sentence
    right = [*log, *said("estimated_read_rate", 1.05e12)]
    same = found(device_run(graph(), **TRACED, read_bytes=4 * 10**9, tables={"counters": right}))
    assert "engine-bandwidth" not in same


def test_an_estimate_beyond_the_device_needs_no_model(device_run: Make) -> None:
    beyond = found(device_run(graph(), **TRACED, tables={"counters": said("estimated_read_rate", 9.1e12)}))
    assert "the device's peak" in beyond["engine-bandwidth"].sentence
    within = found(device_run(graph(), **TRACED, tables={"counters": said("estimated_read_rate", 2e12)}))
    assert "engine-bandwidth" not in within


def test_graphs_that_the_log_says_are_off(device_run: Make) -> None:
    off = said("cuda_graph", 0.0, 1.0, 1.0)
    one = found(device_run(graph(), **TRACED, tables={"counters": off}))["graph-off"]
    assert "33" in one.sentence
    assert "graph-off" not in found(device_run(graph(), **TRACED, tables={"counters": said("cuda_graph", 1.0)}))


def measured(bundle_of: Make, per_step: float, tensors: list[Row]) -> Bundle:
    """A run of 0.5 ms steps whose counters read ``per_step`` bytes in each."""
    roofs = [{"device": "cuda", "bytes_per_s": 4_500 * 10**9}]
    tables: dict[str, list[Row]] = {"tensors": tensors, "roofs": roofs}
    steps = Facts(bundle_of(graph(), tables=tables), "v").steps_of("clean")
    counters = []
    for start, end in zip(steps.start.tolist(), steps.end.tolist(), strict=True):
        for edge in range(start, end, 10_000):
            value = per_step * 10_000 / (end - start)
            counters.append({"start_ns": edge, "end_ns": edge + 10_000, "value": value})
    return bundle_of(graph(), tables=tables | {"counters": counters})


def test_bytes_say_that_weights_were_expanded(device_run: Make) -> None:
    stored = 265_000_000  # 500 M parameters at 4.25 bits
    tensors: list[Row] = [
        {"tensor_class": "experts", "format": "mxfp4", "parameters": 500_000_000, "stored_bytes": stored,
         "resident_bytes": stored, "read_bytes": stored},
        {"tensor_class": "qkv", "parameters": 50_000_000, "stored_bytes": 100_000_000, "resident_bytes": 100_000_000,
         "read_bytes": 100_000_000},
    ]  # fmt: skip
    one = found(measured(device_run, 1.1e9, tensors))["expanded-weights"]
    assert "two bytes a parameter" in one.sentence
    assert one.location == "experts"
    assert "expanded-weights" not in found(measured(device_run, 3.7e8, tensors))
    assert "expanded-weights" not in found(measured(device_run, 7e8, tensors))


def logged(bundle_of: Make, *rows: list[Row]) -> dict[str, Finding]:
    return found(bundle_of({"counters": [row for series in rows for row in series]}, source="log"))


WORKING = said("accept_rate_at_1", 0.8), said("accept_rate_at_2", 0.5), said("accept_length", 2.5)


@pytest.mark.parametrize(
    ("id_", "rows"),
    [
        ("acceptance-wiring", (said("accept_rate_at_1", 0.0), said("accept_length", 1.0))),
        ("acceptance-wiring", (said("accept_rate", 0.01), said("accept_length", 1.05))),
        ("acceptance-block-mask", (said("accept_rate_at_1", 0.34), said("accept_rate_at_2", 0.0), WORKING[2])),
        ("acceptance-degenerate", (said("accept_rate", 1.0), said("accept_length", 8.0))),
        (
            "acceptance-padding",
            (said("cuda_graph", 1, 1, 1, 0, 0, 0), said("accept_length", 1.6, 1.7, 1.6, 3.6, 3.7, 3.5)),
        ),
        (
            "acceptance-padding",
            (said("running_requests", 1, 1, 1, 4, 4, 4), said("accept_length", 3.6, 3.7, 3.6, 2.0, 2.1, 2.2)),
        ),
    ],
)
def test_acceptance_of_a_log(make_bundle: Make, id_: str, rows: tuple[list[Row], ...]) -> None:
    assert id_ in logged(make_bundle, *rows)


@pytest.mark.parametrize(
    "rows",
    [
        WORKING,
        (said("accept_length", 1.0),),  # no draft rate: no speculation
        (said("accept_rate_at_1", 0.9), said("accept_rate_at_2", 0.1), WORKING[2]),
        (said("running_requests", 1, 1, 1, 4, 4, 4), said("accept_length", 3.6, 3.0, 3.6, 2.9, 3.1, 3.2)),
        (said("generation_throughput", 5.0),),
    ],
)
def test_acceptance_that_is_as_it_should_be(make_bundle: Make, rows: tuple[list[Row], ...]) -> None:
    assert not any(name.startswith("acceptance") for name in logged(make_bundle, *rows))

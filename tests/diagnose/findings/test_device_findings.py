"""Each finding on a run made to hold its cause, and on one that holds none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find_in
from workbench.trace.bundle import Bundle

ROOT = Path(__file__).parents[3]
Make = Callable[..., Bundle]
Row = dict[str, Any]

GEMM: Row = {"name": "gemm_full", "ns": 50_000, "grid_x": 1320, "block_x": 128, "block_y": 1, "block_z": 1}
"""A product on ten times as many CTAs as the device has SMs; its registers are not known."""

BYTES = 900_000_000
"""What four of them read at the roof: 200 us."""


def found(bundle: Bundle, variant: str = "v") -> dict[str, Finding]:
    findings = find_in(Facts(bundle, variant))
    for one in findings:
        assert (ROOT / one.page).is_file()
        assert one.sentence.endswith(".")
        assert one.evidence
        if one.recoverable is not None:
            low, high = one.recoverable.low, one.recoverable.high
            assert low is not None
            assert high is not None
            assert 0 <= low <= one.recoverable.value <= high
    return {one.id: one for one in findings}


def good(count: int = 4) -> list[Row]:
    return [GEMM | {"gap": 300} for _ in range(count)]


def test_a_step_at_the_roof_has_no_finding(device_run: Make) -> None:
    assert found(device_run(good(), read_bytes=BYTES)) == {}


def test_launch_gap(device_run: Make) -> None:
    one = found(device_run([GEMM | {"gap": 900} for _ in range(20)] + [GEMM | {"ns": 10}] * 0, read_bytes=BYTES * 5))
    assert "launch-gap" not in one
    kernels = [GEMM | {"ns": 5_000, "gap": 1_000} for _ in range(100)]
    one = found(device_run(kernels, read_bytes=2_250_000_000))
    assert set(one) == {"launch-gap"}
    assert one["launch-gap"].recoverable is not None
    # 100 of 600 us: a fifth more tok/s.
    assert one["launch-gap"].recoverable.value == pytest.approx(0.198 * 1e9 / 600_000, rel=0.03)
    assert one["launch-gap"].severity == "major"


def test_small_kernels(device_run: Make) -> None:
    small = [{"name": "rms_norm", "ns": 2_500, "gap": 10, "grid_x": 64} for _ in range(40)]
    one = found(device_run([*good(), *small, GEMM], read_bytes=BYTES * 5 // 4))
    assert "small-kernels" in one
    assert one["small-kernels"].location == "rms_norm"
    assert "small-kernels" not in found(device_run([*good(), *small[:4], GEMM], read_bytes=BYTES * 5 // 4))


def test_under_fill(device_run: Make) -> None:
    thin = [GEMM | {"name": "gemm_thin", "grid_x": 33} for _ in range(4)]
    one = found(device_run([*good(), *thin], read_bytes=BYTES))
    assert next(iter(one)) == "under-fill"
    assert "33 CTAs on 132 SMs" in one["under-fill"].sentence
    lone = [{"name": "reduce_all", "ns": 20_000, "grid_x": 1, "gap": 300} for _ in range(4)]
    assert "under-fill" in found(device_run([*good(), *lone, GEMM], read_bytes=BYTES * 5 // 4))


def test_spill(device_run: Make) -> None:
    spilling = [GEMM | {"name": "gemm_spilling", "local_bytes_per_thread": 400, "registers": 40} for _ in range(8)]
    assert next(iter(found(device_run(spilling, read_bytes=BYTES)))) == "spill"
    static = [{"kernel": "gemm_full", "spill_store_bytes": 512, "spill_load_bytes": 600, "registers": 255}]
    assert "spill" in found(device_run(good(8), read_bytes=BYTES, tables={"static": static}))
    clean = [{"kernel": "gemm_full", "spill_store_bytes": 0, "spill_load_bytes": 0, "registers": 128}]
    assert "spill" not in found(device_run(good(8), read_bytes=BYTES, tables={"static": clean}))


def test_a_build_that_spills_a_tenth_of_its_registers_loses_a_tenth_of_its_time_by_it(device_run: Make) -> None:
    """Unless a counter saw the traffic: local memory a thread says neither how often it is touched nor where."""

    def spill_ns(local_bytes: int) -> int:
        kernel = GEMM | {"name": "gemm_wide", "local_bytes_per_thread": local_bytes, "registers": 120}
        causes = Facts(device_run([kernel] * 8, read_bytes=BYTES), "v").accounting.causes
        return sum(one.total_ns for one in causes if one.name == "spill")

    assert spill_ns(48) == pytest.approx(spill_ns(480) / 10, rel=0.01)
    assert spill_ns(480) == spill_ns(960) > 0


def samples(bundle_of: Make, per_step: float, *, name: str = "dram_read_bytes", unit: str = "B") -> list[Row]:
    """Samples every 10 us over the steps of a run without counters, which add up to ``per_step`` a step."""
    steps = Facts(bundle_of(good(8), read_bytes=BYTES), "v").steps_of("clean")
    rows = []
    for start, end in zip(steps.start.tolist(), steps.end.tolist(), strict=True):
        edges = list(range(start, end, 10_000))
        for edge in edges:
            value = per_step * 10_000 / (end - start) if unit == "B" else per_step
            rows.append({"name": name, "unit": unit, "start_ns": edge, "end_ns": edge + 10_000, "value": value})
    return rows


def test_over_fetch_by_counters(device_run: Make) -> None:
    twice = samples(device_run, 2.0 * BYTES)
    one = found(device_run(good(8), read_bytes=BYTES, tables={"counters": twice}))
    assert next(iter(one)) == "over-fetch"
    assert one["over-fetch"].confidence == "high"
    assert "1.8" in one["over-fetch"].sentence
    exact = samples(device_run, 1.01 * BYTES)
    assert "over-fetch" not in found(device_run(good(8), read_bytes=BYTES, tables={"counters": exact}))


def test_sets_sampled_one_after_the_other_each_count_at_their_own_rate(device_run: Make) -> None:
    """Half of the steps have samples of DRAM reads, the other half of local memory: neither is halved by that."""
    reads = samples(device_run, 1.0 * BYTES)
    local = samples(device_run, 0.5 * BYTES, name="local_read_bytes")
    middle = sorted(row["start_ns"] for row in reads)[len(reads) // 2]
    rows = [row for row in reads if row["start_ns"] < middle] + [row for row in local if row["start_ns"] >= middle]
    counted = Facts(device_run(good(8), read_bytes=BYTES, tables={"counters": rows}), "v").step_counters
    assert counted.read_bytes == pytest.approx(BYTES, rel=0.02)
    assert counted.local_bytes == pytest.approx(BYTES / 2, rel=0.02)


def test_over_fetch_by_copies(device_run: Make) -> None:
    copies = [
        {"name": "Memcpy DtoD (Device -> Device)", "kind": "memcpy", "ns": 20_000, "copied_bytes": 40_000_000}
        for _ in range(4)
    ]
    one = found(device_run([*good(), *copies, GEMM], read_bytes=BYTES * 5 // 4))
    assert next(iter(one)) == "over-fetch"
    assert "160.0 MB a step" in one["over-fetch"].sentence


def test_over_fetch_by_gathered_experts(device_run: Make) -> None:
    """Experts held as stored, 900 MB a step in two layers: the copy is known, what is beyond it is not."""
    experts = {"role": "target", "tensor_class": "routed_experts", "read_bytes": BYTES}
    experts |= {"stored_bytes": 9 * BYTES, "resident_bytes": 9 * BYTES}
    stated = {"env": [{"key": "experts.v", "value": "gathered: compute capability 8.0"}]}
    step = {"warmup": True, "start_ns": 1, "draft_end_ns": 1, "forward_end_ns": 2, "end_ns": 2, "experts": [4, 4]}

    def sentence(read: float, tables: dict[str, list[Row]], width: int = 1) -> str:
        rows = {"tensors": [experts | {"width": width}], "steps": [step]}
        rows["roofs"] = [{"device": "cuda", "bytes_per_s": 4_500 * 10**9}]
        counters = {"counters": samples(device_run, read * BYTES)}
        return found(device_run(good(8), tables=rows | counters | tables))["over-fetch"].sentence

    # A layer copies 300 MB and 150 MB; an H200's L2 holds 62.9 MB of each.
    known = "copied before they are multiplied, which reads 648.3 MB to 900.0 MB again (modelled)"
    assert sentence(1.9, stated).endswith(f"{known}, and explains them.")
    assert sentence(2.5, stated).endswith(f"{known} and leaves 450.0 MB unexplained.")
    assert "which reads 648.3 MB to 6.300 GB again (modelled), and explains them" in sentence(2.5, stated, width=4)
    assert "copied before" not in sentence(2.5, {})
    assert "copied before" not in sentence(2.5, {"env": [{"key": "experts.v", "value": "grouped"}]})


def test_instruction_bound(device_run: Make) -> None:
    packed = [GEMM | {"name": "mxfp4_gemv"} for _ in range(8)]
    one = found(device_run(packed, read_bytes=BYTES))
    assert one["instruction-bound"].confidence == "low"
    busy = samples(device_run, 3.0, name="instructions_per_cycle", unit="instructions/cycle")
    assert "instruction-bound" in found(device_run(good(8), read_bytes=BYTES, tables={"counters": busy}))
    idle = samples(device_run, 0.4, name="instructions_per_cycle", unit="instructions/cycle")
    one = found(device_run(packed, read_bytes=BYTES, tables={"counters": idle}))
    assert "instruction-bound" not in one
    assert one["slow-kernels"].location == "mxfp4_gemv"
    (loss,) = (row for row in one["slow-kernels"].evidence if "mxfp4_gemv" in row.what)
    assert "schedulers issue in 10% of their cycles at most, so decoding is not why" in loss.what


def test_instruction_bound_by_the_busiest_samples(device_run: Make) -> None:
    """A kernel of a part of the step is judged by the busiest samples of as much time, not by the mean of all."""
    kernels = [GEMM | {"name": "mxfp4_gemv"} for _ in range(4)] + good(4)
    rows = samples(device_run, 0.4, name="instructions_per_cycle", unit="instructions/cycle")
    for row in rows[::3]:
        row["value"] = 3.2
    one = found(device_run(kernels, read_bytes=BYTES, tables={"counters": rows}))
    assert "schedulers issue in up to" in str(one["instruction-bound"].evidence)


def test_what_warps_wait_for_is_evidence(device_run: Make) -> None:
    rows = samples(device_run, 3.0, name="stalled_long_scoreboard", unit="warps/scheduler")
    rows += samples(device_run, 0.25, name="stalled_short_scoreboard", unit="warps/scheduler")
    packed = [GEMM | {"name": "mxfp4_gemv"} for _ in range(8)]
    one = found(device_run(packed, read_bytes=BYTES, tables={"counters": rows}))["instruction-bound"]
    said = {row.what: row.quantity.value for row in one.evidence if "wait for" in row.what}
    assert said == {
        "warps of a scheduler that wait for global or local memory, mean of the step": pytest.approx(3.0),
        "warps of a scheduler that wait for shared memory or the XU, mean of the step": pytest.approx(0.25),
    }


def test_serialised_quantisation(device_run: Make) -> None:
    pair = [{"name": "per_token_group_quant_fp8", "ns": 4_000, "gap": 100, "grid_x": 132}, GEMM]
    one = found(device_run(pair * 4, read_bytes=BYTES))
    assert next(iter(one)) == "serialised-quantisation"
    fused = [{"name": "rms_norm_quant_fp8", "ns": 4_000, "gap": 100, "grid_x": 132}, GEMM]
    assert "serialised-quantisation" not in found(device_run(fused * 4, read_bytes=BYTES))


def test_tail(device_run: Make) -> None:
    shape = {"registers": 128, "block_x": 128, "shared_dynamic_bytes": 100_000, "grid_x": 300}
    one = found(device_run([GEMM | shape | {"gap": 300} for _ in range(8)], read_bytes=BYTES))
    assert "1.14 waves of 264" in one["tail"].sentence


def test_collective(device_run: Make) -> None:
    reduce = [{"name": "ncclDevKernel_AllReduce_Sum_bf16", "ns": 12_000, "gap": 100} for _ in range(4)]
    assert next(iter(found(device_run([*good(), *reduce, GEMM], read_bytes=BYTES * 5 // 4)))) == "collective"


def test_barrier_wait(device_run: Make) -> None:
    lanes = [
        {"cta": cta, "kind": kind, "start_ns": begin, "end_ns": end}
        for cta in range(4)
        for kind, begin, end in (("compute", 0, 60), ("wait", 60, 100), ("compute", 100, 200), ("wait", 180, 190))
    ]
    kernel = GEMM | {"name": "persistent_decode_step", "ns": 400_000, "grid_x": 132}
    one = found(device_run([kernel], read_bytes=BYTES, tables={"lanes": lanes}))
    assert "25.0%" in one["barrier-wait"].sentence


def test_host_bound_and_replay_boundary(device_run: Make) -> None:
    late = [GEMM | {"gap": 60_000, "lead": 2_000}, *good(3)]
    one = found(device_run(late, read_bytes=BYTES))
    assert set(one) == {"host-bound"}
    slow = [GEMM | {"gap": 40_000, "lead": 38_000, "took": 37_000}, *good(3)]
    assert set(found(device_run(slow, read_bytes=BYTES))) == {"replay-boundary"}


def test_cpu_sync_names_the_call(device_run: Make) -> None:
    kernels = [GEMM | {"call": "eager"}, GEMM | {"gap": 60_000, "call": "eager", "lead": 2_000}, *good(2)]
    # In each traced step the host waits from 20 to 100 us; the product it waits for ends at 50.5.
    run = device_run(kernels, read_bytes=BYTES, waits=((20_000, 80_000),))
    waits = [row for row in run.table("host").to_pylist() if row["name"] == "cudaStreamSynchronize"]
    syncs = [
        {"start_ns": row["start_ns"], "end_ns": row["end_ns"], "thread": 1, "host_id": row["host_id"]} for row in waits
    ]
    one = found(device_run(kernels, read_bytes=BYTES, waits=((20_000, 80_000),), tables={"syncs": syncs}))
    assert next(iter(one)) == "cpu-sync"
    assert one["cpu-sync"].location == "cudaStreamSynchronize"
    assert any(row.table == "host" and row.ids for row in one["cpu-sync"].evidence)
    assert "cpu-sync" not in found(device_run(kernels, read_bytes=BYTES))


def test_pageable_copy(device_run: Make) -> None:
    copy = {"name": "Memcpy HtoD (Pageable -> Device)", "kind": "memcpy", "ns": 1_000, "call": "eager"}
    kernels = [GEMM, copy | {"gap": 50_000, "lead": 48_000, "took": 50_000}, *good(3)]
    one = found(device_run(kernels, read_bytes=BYTES))
    assert next(iter(one)) == "pageable-copy"
    assert "pageable-copy" not in found(device_run([GEMM, copy | {"gap": 1_000, "lead": 800}, *good(3)]))


def test_graph_break(device_run: Make) -> None:
    layers = [GEMM | {"call": number, "gap": 9_000, "lead": 6_000} for number in range(4)]
    one = found(device_run(layers, read_bytes=BYTES))
    assert "4 graph replays" in one["graph-break"].sentence
    assert "graph-break" not in found(device_run([GEMM | {"gap": 9_000} for _ in range(4)], read_bytes=BYTES))


def test_unfused_sampling(device_run: Make) -> None:
    chain = [
        {"name": name, "ns": 9_000, "gap": 300, "grid_x": 132}
        for name in ("DeviceRadixSortOnesweepKernel", "softmax_warp_forward", "DeviceScanKernel", "where", "scatter")
    ]
    one = found(device_run([*good(), *chain], read_bytes=BYTES))
    assert next(iter(one)) == "unfused-sampling"
    fused = [{"name": "greedy_kernel", "ns": 9_000, "gap": 300, "grid_x": 132}]
    assert "unfused-sampling" not in found(device_run([*good(8), *fused], read_bytes=BYTES * 2))


def test_expanded_weights(device_run: Make) -> None:
    experts = {"tensor_class": "routed_experts", "format": "mxfp4", "read_bytes": BYTES // 2, "stored_bytes": 10**9}
    wide = {"tensors": [experts | {"resident_bytes": 3_760_000_000}]}
    one = found(device_run(good(12), read_bytes=BYTES // 2, tables=wide))
    assert next(iter(one)) == "expanded-weights"
    assert "3.8 times as wide" in one["expanded-weights"].sentence
    assert "over-fetch" not in one
    narrow = {"tensors": [experts | {"resident_bytes": 1_010_000_000}]}
    assert "expanded-weights" not in found(device_run(good(12), read_bytes=BYTES // 2, tables=narrow))


def test_replicated_weights(device_run: Make) -> None:
    tensors = {"tensors": [{"tensor_class": "kv_a", "read_bytes": BYTES // 4, "replicated": True}]}
    tp = {"model": {"preset": "glm-5.2", "tp": 8}}
    assert "replicated-weights" in found(device_run(good(), read_bytes=BYTES, tables=tensors, settings=tp))
    assert "replicated-weights" not in found(device_run(good(), read_bytes=BYTES, tables=tensors))


def test_draft(device_run: Make) -> None:
    run = device_run(good(), read_bytes=BYTES)
    steps = [row | {"draft_end_ns": row["start_ns"] + 100_000} for row in run.table("steps").to_pylist()]
    rows = {name: run.table(name).to_pylist() for name in ("kernels", "host", "tensors", "roofs")}
    del run
    moved = device_run([], clean=0, tables=rows | {"steps": steps})
    assert "draft" in found(moved)


def test_unexplained_time(device_run: Make) -> None:
    run = device_run([*good(), GEMM | {"gap": 200_000, "call": "eager", "lead": 200_000}], read_bytes=BYTES * 5 // 4)
    assert next(iter(found(run))) == "unexplained-time"


def test_profiler_overhead_counts_where_there_is_no_clean_step(device_run: Make) -> None:
    kernels = [*good(), GEMM | {"gap": 100_000, "lead": 1_000, "call": "eager"}]
    run = device_run(kernels, read_bytes=BYTES, clean=0)
    work = [
        {"name": "Activity Buffer Request", "category": "overhead", "start_ns": row["start_ns"] + 210_000}
        for row in run.table("steps").to_pylist()
    ]
    overhead = {"host": [row | {"end_ns": row["start_ns"] + 60_000} for row in work]}
    assert "profiler-overhead" in found(device_run(kernels, read_bytes=BYTES, clean=0, tables=overhead))
    assert "profiler-overhead" not in found(device_run(kernels, read_bytes=BYTES, tables=overhead))


def test_verify_and_sampling(device_run: Make) -> None:
    run = device_run(good(), read_bytes=BYTES)
    rows = {name: run.table(name).to_pylist() for name in ("kernels", "host", "tensors", "roofs", "steps")}
    for row in rows["steps"]:
        row["end_ns"] += 8_000
    assert set(found(device_run([], clean=0, tables=rows))) == {"verify-and-sampling"}

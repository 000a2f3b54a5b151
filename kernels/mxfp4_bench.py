"""Build, check and time the MXFP4 expert pass: ``python3 -m workbench.kernels.mxfp4_bench --seconds 70``.

Prints each result as it comes and a table last; writes every number to ``$OUT/mxfp4_bench.json`` where OUT is set.
Times are of launches inside one CUDA graph over weights of several layers (together far larger than L2), launch gaps
included: bytes / time is what a decode step would see.
"""

import argparse
import ctypes
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from workbench.kernels import mxfp4_columns, mxfp4_cuda, mxfp4_lanes, mxfp4_one_token, mxfp4_tiles, nvrtc
from workbench.kernels.budget import Budget, DeviceHangError, leave, save, wait
from workbench.kernels.mxfp4_cuda import ExpertPass, ExpertShape, ExpertWeights, Plan
from workbench.kernels.mxfp4_one_token import OneTokenPass, OneTokenPlan
from workbench.kernels.mxfp4_stream import Stream, StreamPlan, compile_stream

GPT_OSS = ExpertShape(2880, 2880, 128, 4, clamp=True, bias=True)
GPT_OSS_20B = ExpertShape(2880, 2880, 32, 4, clamp=True, bias=True)
GLM = ExpertShape(6144, 2048, 256, 8)
GLM_RANK = ExpertShape(6144, 256, 256, 8)
QWEN = ExpertShape(2048, 768, 128, 8)
SMS = 132  # of an H200; what is compiled ahead is for one card
NAMES = {
    GPT_OSS: "gpt-oss-120b",
    GPT_OSS_20B: "gpt-oss-20b",
    GLM: "glm-5.2",
    GLM_RANK: "glm-5.2/tp8",
    QWEN: "qwen3-30b-a3b",
}


def checkpoint(shape: ExpertShape, experts: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random experts in the checkpoint's packing, with scales that give outputs of order one."""

    def draw(*size: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8, device=generator.device)

    two, h, i = 2 * shape.inter, shape.hidden, shape.inter
    result = {
        "gate_up": draw(experts, two, h // 32, 16),
        "gate_up_scales": draw(experts, two, h // 32, low=117, high=122),
        "down": draw(experts, h, i // 32, 16),
        "down_scales": draw(experts, h, i // 32, low=117, high=122),
    }
    if shape.bias:
        for name, size in (("gate_up_bias", two), ("down_bias", h)):
            result[name] = torch.randn(experts, size, generator=generator, device=generator.device).to(torch.bfloat16)
    return result


AnyPlan = Plan | OneTokenPlan
AnyPass = ExpertPass | OneTokenPass


def build_passes(shape: ExpertShape, tokens: int, plan: AnyPlan | None, split: bool) -> list[AnyPass]:
    """The pass that ``plan`` is of, the default's where there is none; ``split``: its halves as two launches."""
    if isinstance(plan, OneTokenPlan):
        return [OneTokenPass(shape, plan=plan)]
    runs = [ExpertPass(shape, tokens, plan=plan, phases=p) for p in (("gate_up", "down") if split else ("both",))]
    for other in runs[1:]:
        other.inter = runs[0].inter
    return [*runs]


def packed(shape: ExpertShape, source: dict[str, torch.Tensor], plan: AnyPlan | None = None) -> ExpertWeights:
    """The checkpoint re-laid out as ``plan``'s pass wants it; gpt-oss alternates gate and up rows, the others stack
    them."""
    order: mxfp4_tiles.Rows = "interleaved" if shape.clamp else "halves"
    biases = (
        (mxfp4_tiles.pack_bias(source["gate_up_bias"], order=order), source["down_bias"])
        if shape.bias
        else (None, None)
    )
    gate_up = mxfp4_tiles.pack_tiles(source["gate_up"], source["gate_up_scales"], order=order)
    if isinstance(plan, OneTokenPlan):
        down = (source["down"], source["down_scales"])
        return ExpertWeights(*mxfp4_one_token.relayout(plan, gate_up, down), *biases)
    return ExpertWeights(gate_up, mxfp4_tiles.pack_tiles(source["down"], source["down_scales"]), *biases)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference; NaN never passes."""
    error = (value.to(torch.float64) - reference).norm() / reference.norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def check(
    shape: ExpertShape, tokens: int, plan: AnyPlan | None = None, *, seed: int = 0, split: bool = False
) -> dict[str, Any]:
    """Compare one pass with float64. ``inter`` may err by its rounding to bf16 and 1e-5 of its largest element;
    ``out`` is compared given the kernel's own ``inter``, so fp32 summation is all it errs by.

    ``split`` runs the two halves as two launches.
    """
    experts = min(shape.experts, 12)
    small = ExpertShape(**{**asdict(shape), "experts": experts})
    generator = torch.Generator("cuda").manual_seed(seed)
    source = checkpoint(small, experts, generator)
    weights = packed(small, source, plan)
    x = (torch.randn(tokens, shape.hidden, generator=generator, device="cuda") * 3).to(torch.bfloat16)
    x[:, 5] *= 300  # an outlier channel
    ids = torch.stack(
        [torch.randperm(experts, generator=generator, device="cuda")[: shape.top_k] for _ in range(tokens)]
    ).to(torch.int32)
    routing = torch.rand(tokens, shape.top_k, generator=generator, device="cuda") + 0.1
    runs = build_passes(small, tokens, plan, split)
    lanes = None
    if runs[0].plan.lanes:
        lanes = torch.zeros(runs[0].lane_words, dtype=torch.int64, device="cuda")
    outs = []
    for _ in range(3):
        out = torch.full((tokens, shape.hidden), float("nan"), device="cuda")
        if isinstance(runs[0], OneTokenPass) or runs[0].plan.exchange == "counters":
            runs[0].inter.fill_(float("nan"))
        for run in runs:
            run.run(x, ids, routing, weights, out, lanes=lanes)
        wait("check")
        for run in runs:
            run.check()
        outs.append(out)
    slots = mxfp4_cuda.slot_order(ids)  # of one token: its choices, which differ
    inter = runs[0].activation()
    expected = torch.zeros(tokens, shape.hidden, dtype=torch.float64, device="cuda")
    worst, equal, excess = 0.0, 1.0, 0.0
    for slot, expert in enumerate(slots):
        full = mxfp4_cuda.dequantise(source["gate_up"][expert], source["gate_up_scales"][expert])
        bias = source["gate_up_bias"][expert] if shape.bias else None
        pick = (
            (slice(0, None, 2), slice(1, None, 2)) if shape.clamp else (slice(0, shape.inter), slice(shape.inter, None))
        )
        biases = (None, None) if bias is None else (bias[pick[0]], bias[pick[1]])
        h = mxfp4_cuda.reference_inter(small, x, full[pick[0]], full[pick[1]], *biases)
        worst = max(worst, relative(inter[slot], h))
        beyond = ((inter[slot].to(torch.float64) - h).abs() - h.abs() * 2.0**-8).max() / h.abs().max()
        excess = max(excess, float(beyond) if bool(torch.isfinite(beyond)) else float("inf"))
        equal = min(equal, float((inter[slot] == h.to(torch.bfloat16)).double().mean()))
        y = (
            inter[slot].to(torch.float64)
            @ mxfp4_cuda.dequantise(source["down"][expert], source["down_scales"][expert]).T
        )
        if shape.bias:
            y = y + source["down_bias"][expert].to(torch.float64)
        chosen = ((ids == expert) * routing.to(torch.float64)).sum(dim=1)
        expected += chosen[:, None] * y
    return {
        "shape": NAMES[shape],
        "tokens": tokens,
        "slots": len(slots),
        "inter_relative": worst,
        "inter_equal_bf16": equal,
        "inter_beyond_rounding": excess,
        "out_relative": max(relative(out, expected) for out in outs),
        "repeatable": all(torch.equal(outs[0], out) for out in outs),
        "ok": excess < 1e-5 and max(relative(out, expected) for out in outs) < 2e-6,
    }


def measure(replay: Callable[[], None], *, repeats: int = 15, warm: int = 3) -> list[float]:
    """Microseconds of each of ``repeats`` calls, by events."""
    for _ in range(warm):
        replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        wait("timing")
        times.append(start.elapsed_time(end) * 1e3)
    return times


def read_roof() -> dict[str, Any]:
    """The best read bandwidth of a plain streaming kernel over 6 GiB, bytes a second."""
    data = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
    data.view(torch.int32).random_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    rows = []
    for unroll in (4, 8):
        kernel = nvrtc.Kernel(nvrtc.compile_kernel("read_roof.cu", "read_roof", {"UNROLL": unroll}))
        for ctas in (264, 528, 1056, 2112):
            args: list[nvrtc.Argument] = [
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_ulonglong(data.numel() // 16),
                ctypes.c_void_p(sink.data_ptr()),
            ]
            stream = torch.cuda.current_stream().cuda_stream
            times = measure(functools.partial(kernel.launch, ctas, 512, stream, args), repeats=5, warm=1)
            rate = data.numel() / (statistics.median(times) * 1e-6)
            rows.append({"unroll": unroll, "ctas": ctas, "bytes_per_s": rate})
    return {"best": max(row["bytes_per_s"] for row in rows), "rows": rows}


def random_layers(shape: ExpertShape, layers: int, experts: int, pairs: int = 0) -> list[ExpertWeights]:
    """Random bytes straight in the packed layout (``pairs``: down by columns), with harmless scales: good for timing,
    where any code is as good as another."""
    result = []
    for _ in range(layers):
        tensors = []
        runs = [
            (rows, units * mxfp4_tiles.UNIT_BYTES, units * mxfp4_tiles.UNIT_WEIGHT_BYTES)
            for rows, units in ((shape.inter // 8, shape.hidden // 64), (shape.hidden // 16, shape.inter // 64))
        ]
        if pairs:
            size, chunks = mxfp4_columns.chunk_bytes(shape.inter, pairs), shape.hidden // (32 * pairs)
            runs[1] = (chunks, size, size // 17 * 16)
        for rows, size, scales in runs:
            t = torch.randint(0, 256, (experts, rows, size), dtype=torch.uint8, device="cuda")
            t[:, :, scales:] = 117 + t[:, :, scales:] % 5
            tensors.append(t)
        biases = [
            torch.randn(experts, n, device="cuda").to(torch.bfloat16) if shape.bias else None
            for n in (2 * shape.inter, shape.hidden)
        ]
        result.append(ExpertWeights(tensors[0], tensors[1], biases[0], biases[1]))
    return result


def time_variant(
    shape: ExpertShape,
    tokens: int,
    layers: list[ExpertWeights],
    *,
    plan: AnyPlan | None = None,
    overlap: bool = False,
    split: bool = False,
    launches: int = 24,
) -> dict[str, Any]:
    """Microseconds a pass inside a graph of ``launches`` passes over rotating layers and experts (``us``), and what a
    further pass takes (``us_more``): three times as many in a graph less those, so without the graph's own start."""
    experts = layers[0].gate_up.shape[0]
    small = ExpertShape(**{**asdict(shape), "experts": experts})
    runs = build_passes(small, tokens, plan, split)
    x = torch.randn(tokens, shape.hidden, device="cuda").to(torch.bfloat16)
    out = torch.empty(tokens, shape.hidden, device="cuda")
    routing = torch.rand(tokens, shape.top_k, device="cuda")

    def choose() -> torch.Tensor:
        return torch.stack([torch.randperm(experts)[: shape.top_k] for _ in range(tokens)]).to(torch.int32)

    choices = [choose() for _ in range(launches)]
    on_device = [choice.cuda() for choice in choices]
    lanes = None
    if runs[0].plan.lanes:
        lanes = torch.zeros(launches, *runs[0].lane_words, dtype=torch.int64, device="cuda")

    def step() -> None:
        for index, ids in enumerate(on_device):
            for run in runs:
                words = None if lanes is None else lanes[index]
                run.run(x, ids, routing, layers[index % len(layers)], out, overlap=overlap, lanes=words)

    step()
    wait("first step")
    for run in runs:
        run.check()
    graphs = []
    for steps in (1, 3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(steps):
                step()
    times, longer = (measure(graph.replay) for graph in graphs)
    for run in runs:
        run.check()
    distinct = statistics.mean(len(mxfp4_cuda.slot_order(choice)) for choice in choices)
    us = statistics.median(times) / launches
    total = shape.bytes_floor(1) * distinct
    kernel = runs[0].kernel
    stamped = {} if lanes is None else {"lanes": mxfp4_lanes.lane_table(lanes[1:])}  # the first starts from idle
    return {
        **stamped,
        "shape": NAMES[shape],
        "tokens": tokens,
        "distinct": distinct,
        "bytes": total,
        "us": us,
        "us_more": (statistics.median(longer) - statistics.median(times)) / (2 * launches),
        "us_spread": [min(times) / launches, max(times) / launches],
        "bytes_per_s": total / (us * 1e-6),
        "plan": asdict(runs[0].plan),
        "registers": kernel.registers,
        "local_bytes": kernel.local_bytes,
    }


def time_stream(
    shape: ExpertShape, layers: list[ExpertWeights], plan: StreamPlan, launches: int = 24
) -> dict[str, Any]:
    """Microseconds that reading one token's experts takes, in the same kind of graph as ``time_variant``."""
    experts = layers[0].gate_up.shape[0]
    stream = Stream(ExpertShape(**{**asdict(shape), "experts": experts}), plan)
    ids = [torch.randperm(experts)[: shape.top_k].to(torch.int32).cuda() for _ in range(launches)]

    def step() -> None:
        for index, chosen in enumerate(ids):
            stream.run(chosen, layers[index % len(layers)])

    step()
    wait("first step")
    graphs = []
    for steps in (1, 3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(steps):
                step()
    times, longer = (measure(graph.replay) for graph in graphs)
    us, total = statistics.median(times) / launches, shape.bytes_floor(shape.top_k)
    return {
        "shape": NAMES[shape],
        "tokens": 1,
        "distinct": float(shape.top_k),
        "bytes": total,
        "us": us,
        "us_more": (statistics.median(longer) - statistics.median(times)) / (2 * launches),
        "us_spread": [min(times) / launches, max(times) / launches],
        "bytes_per_s": total / (us * 1e-6),
        "plan": asdict(plan),
        "registers": stream.kernel.registers,
        "local_bytes": stream.kernel.local_bytes,
    }


Variant = tuple[str, ExpertShape, int, dict[str, Any]]  # name, shape, tokens, options of time_variant


def variants() -> list[Variant]:
    """What is timed, the main question first."""
    base = mxfp4_cuda.make_plan(GPT_OSS, 1)
    counters = replace(base, exchange="counters")
    atomic, stream = replace(counters, combine="atomic"), replace(base, probe=1)
    rows: list[Variant] = [
        ("ordered", GPT_OSS, 1, {"plan": base}),
        ("ordered, overlap", GPT_OSS, 1, {"plan": base, "overlap": True}),
        ("ordered, overlap (again)", GPT_OSS, 1, {"plan": base, "overlap": True}),
        ("atomic", GPT_OSS, 1, {"plan": atomic}),
        ("atomic, overlap", GPT_OSS, 1, {"plan": atomic, "overlap": True}),
        ("stream only", GPT_OSS, 1, {"plan": stream}),
        ("stream only, overlap", GPT_OSS, 1, {"plan": stream, "overlap": True}),
        ("two launches", GPT_OSS, 1, {"plan": counters, "split": True}),
        ("two launches, overlap", GPT_OSS, 1, {"plan": counters, "split": True, "overlap": True}),
        ("counters, overlap", GPT_OSS, 1, {"plan": counters, "overlap": True}),
        ("9 warps, overlap", GPT_OSS, 1, {"plan": mxfp4_cuda.make_plan(GPT_OSS, 1, warps=9), "overlap": True}),
        ("6 stages, overlap", GPT_OSS, 1, {"plan": replace(base, stages=6), "overlap": True}),
        ("8 stages, overlap", GPT_OSS, 1, {"plan": replace(base, stages=8), "overlap": True}),
    ]
    rows += [("ordered, overlap", GPT_OSS, tokens, {"overlap": True}) for tokens in (2, 4, 8)]
    rows += [
        ("ordered, overlap", shape, tokens, {"overlap": True}) for shape in (GLM, GLM_RANK, QWEN) for tokens in (1, 4)
    ]
    return rows


def next_variants() -> list[Variant]:
    """The next round of docs/kernels-cuda.md: down by columns; all with overlap."""
    base = mxfp4_cuda.make_plan(GPT_OSS, 1)
    columns = mxfp4_one_token.make_plan(GPT_OSS, SMS)
    small = mxfp4_one_token.make_plan(QWEN, SMS)
    plans: dict[str, AnyPlan] = {
        "base": base,
        "columns": columns,
        "columns, lanes": replace(columns, lanes=True),
        "columns, stream only": replace(columns, probe=1),
        "columns, in order": replace(columns, spread=0),
        "columns, 1 in flight": replace(columns, in_flight=1),
        "columns, 3 in flight": replace(columns, in_flight=3),
        "columns, 8 stages": replace(columns, stages=8),
        "columns, atomic": replace(columns, combine="atomic"),
        "columns, atomic, lanes": replace(columns, combine="atomic", lanes=True),
        "columns, atomic, stream only": replace(columns, combine="atomic", probe=1),
        "columns, atomic, 8 stages": replace(columns, combine="atomic", stages=8),
        "columns, atomic (again)": replace(columns, combine="atomic"),
        "columns (again)": columns,
        "base (again)": base,
    }
    rows: list[Variant] = [(name, GPT_OSS, 1, {"plan": plan, "overlap": True}) for name, plan in plans.items()]
    rows += [
        ("base", QWEN, 1, {"plan": mxfp4_cuda.make_plan(QWEN, 1), "overlap": True}),
        ("columns", QWEN, 1, {"plan": small, "overlap": True}),
        ("columns, atomic", QWEN, 1, {"plan": replace(small, combine="atomic"), "overlap": True}),
    ]
    return rows


def next_streams() -> dict[str, StreamPlan]:
    """What reading alone is timed with, on the bytes of one token of gpt-oss-120b."""
    return {
        "read: ring, 24 KB x 8": StreamPlan(True, 24480, 8, 64, 1),
        "read: ring, 24 KB x 3": StreamPlan(True, 24480, 3, 64, 1),
        "read: ring, 8 KB x 12": StreamPlan(True, 8160, 12, 64, 1),
        "read: ring, 8 KB x 12, 2 CTAs": StreamPlan(True, 8160, 12, 64, 2),
        "read: loads, 4 x 510, 4 CTAs": StreamPlan(False, 8160, 4, 510, 4),
        "read: loads, 8 x 510, 2 CTAs": StreamPlan(False, 8160, 8, 510, 2),
    }


Job = tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]  # kind, what to say of it if it fails, work


def _jobs(report: dict[str, Any], following: bool) -> list[Job]:
    """What is run, the most telling first, of kind ``check``, ``roof`` or ``time``; ``following``: the next round."""
    base = mxfp4_cuda.make_plan(GPT_OSS, 1)
    held: dict[tuple[ExpertShape, int], list[ExpertWeights]] = {}

    def layers_of(shape: ExpertShape, pairs: int = 0) -> list[ExpertWeights]:
        if (shape, pairs) not in held:
            held.clear()
            torch.cuda.empty_cache()
            held[shape, pairs] = random_layers(shape, 6, 48 if shape is QWEN else 24, pairs)
        return held[shape, pairs]

    def checked(shape: ExpertShape, tokens: int, **options: Any) -> Job:
        name = {"shape": NAMES[shape], "tokens": tokens}
        return "check", name, lambda: check(shape, tokens, seed=tokens, **options)

    def timed(name: str, shape: ExpertShape, tokens: int, options: dict[str, Any]) -> Job:
        def run() -> dict[str, Any]:
            plan = options.get("plan")
            layers = layers_of(shape, plan.warps if isinstance(plan, OneTokenPlan) else 0)
            row = {"variant": name, **time_variant(shape, tokens, layers, **options)}
            return {**row, "share_of_roof": row["bytes_per_s"] / report["roof"]["best"]}

        return "time", {"variant": name, "shape": NAMES[shape], "tokens": tokens}, run

    def read(name: str, plan: StreamPlan) -> Job:
        def run() -> dict[str, Any]:
            row = {"variant": name, **time_stream(GPT_OSS, layers_of(GPT_OSS), plan)}
            return {**row, "share_of_roof": row["bytes_per_s"] / report["roof"]["best"]}

        return "time", {"variant": name, "shape": NAMES[GPT_OSS], "tokens": 1}, run

    if following:
        checks = [checked(shape, tokens, plan=plan) for shape, tokens, plan in next_checked()]
        streams = [read(*row) for row in next_streams().items()]
        rows = [timed(*row) for row in next_variants()]
        return [*checks, ("roof", {}, read_roof), *rows, *streams]
    rows = [timed(*row) for row in variants()]
    first = [index for index, row in enumerate(variants()) if row[1] is GPT_OSS and row[2] == 1][:7]
    rest = [index for index in range(len(rows)) if index not in first]
    return [
        checked(GPT_OSS, 1),
        ("roof", {}, read_roof),
        *(rows[index] for index in first),
        *(checked(GPT_OSS, tokens) for tokens in (2, 4, 8, 3)),
        checked(GPT_OSS, 1, plan=replace(base, exchange="counters", combine="atomic")),
        *(rows[index] for index in rest if variants()[index][1] is GPT_OSS),
        *(checked(shape, tokens) for shape in (GLM, GLM_RANK, QWEN) for tokens in (1, 4)),
        checked(GPT_OSS, 1, plan=mxfp4_cuda.make_plan(GPT_OSS, 1, warps=9)),
        checked(GPT_OSS, 2, split=True),
        *(rows[index] for index in rest if variants()[index][1] is not GPT_OSS),
    ]


def next_checked() -> list[tuple[ExpertShape, int, AnyPlan]]:
    """The options of the next round that leave the result right, each at least once."""
    columns = mxfp4_one_token.make_plan(GPT_OSS, SMS)
    small = mxfp4_one_token.make_plan(QWEN, SMS)
    return [
        (GPT_OSS, 1, columns),
        (GPT_OSS, 1, replace(columns, combine="atomic", lanes=True)),
        (GPT_OSS, 1, replace(columns, spread=0, stages=8, in_flight=3)),
        (QWEN, 1, small),
        (QWEN, 1, replace(small, combine="atomic")),
    ]


def compile_all(following: bool = False) -> int:
    """Compile every kernel the benchmark runs (or the next round's), several at a time; needs no GPU. Returns how
    many."""
    jobs: list[Callable[[], nvrtc.Cubin]] = [
        functools.partial(nvrtc.compile_kernel, "read_roof.cu", "read_roof", {"UNROLL": unroll}) for unroll in (4, 8)
    ]

    def add(shape: ExpertShape, tokens: int, experts: int, plan: AnyPlan | None, split: bool = False) -> None:
        small = ExpertShape(**{**asdict(shape), "experts": experts})
        if isinstance(plan, OneTokenPlan):
            jobs.append(functools.partial(mxfp4_one_token.compile_pass, small, SMS, plan))
            return
        chosen = plan or mxfp4_cuda.make_plan(small, tokens)
        if split:
            chosen = replace(chosen, exchange="counters")
        phases: tuple[mxfp4_cuda.Phases, ...] = ("gate_up", "down") if split else ("both",)
        jobs.extend(functools.partial(mxfp4_cuda.compile_pass, small, tokens, chosen, phase) for phase in phases)

    base = mxfp4_cuda.make_plan(GPT_OSS, 1)
    if following:
        for shape, tokens, plan in next_checked():
            add(shape, tokens, 12, plan)
        small = replace(GPT_OSS, experts=24)
        jobs += [functools.partial(compile_stream, small, stream) for stream in next_streams().values()]
    else:
        for tokens in (1, 2, 3, 4, 8):
            add(GPT_OSS, tokens, 12, None)
        for plan in (replace(base, exchange="counters", combine="atomic"), mxfp4_cuda.make_plan(GPT_OSS, 1, warps=9)):
            add(GPT_OSS, 1, 12, plan)
        add(GPT_OSS, 2, 12, None, split=True)
        for shape in (GLM, GLM_RANK, QWEN):
            for tokens in (1, 4):
                add(shape, tokens, 12, None)
    for _, shape, tokens, options in next_variants() if following else variants():
        add(shape, tokens, 48 if shape is QWEN else 24, options.get("plan"), bool(options.get("split")))
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return len(list(pool.map(lambda job: job(), jobs)))


def _print_table(report: dict[str, Any], failed: int) -> None:
    roof = report["roof"].get("best", float("nan")) / 1e12
    print(f"{report['device']}, torch {report['torch']}, {report['wall_s']:.0f} s; read roof {roof:.3f} TB/s")
    print(
        f"checks: {len(report['checks']) - failed} of {len(report['checks'])} pass; not run: {report['not_run']} jobs"
    )
    heads = f"{'distinct':>8} {'MB':>6} {'us':>7} {'TB/s':>6} {'roof':>6} {'us more':>7} {'roof':>6}"
    heads += f" {'regs':>4} {'local':>5}"
    print(f"{'shape':14} {'T':>2} {'variant':30} {heads}")
    for row in report["timings"]:
        head = f"{row['shape']:14} {row['tokens']:2} {row['variant']:30}"
        if "error" in row:
            print(f"{head} {row['error'][:90]}")
            continue
        rates = f"{row['us']:7.2f} {row['bytes_per_s'] / 1e12:6.3f} {row['share_of_roof']:6.1%}"
        rates += f" {row['us_more']:7.2f} {row['bytes'] / row['us_more'] / 1e6 / roof:6.1%}"
        static = f"{row['registers']:4} {row['local_bytes']:5}"
        print(f"{head} {row['distinct']:8.1f} {row['bytes'] / 1e6:6.1f} {rates} {static}")
    for row in report["timings"]:
        if "lanes" in row:
            print(f"\n{row['shape']}, {row['tokens']} token(s), {row['variant']}: {row['us']:.2f} us a pass")
            print("\n".join(mxfp4_lanes.lane_lines(row["lanes"])))


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print; returns 1 if any check fails or the device hangs, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m workbench.kernels.mxfp4_bench", description=__doc__)
    parser.add_argument("--seconds", type=float, default=70.0, help="stop starting jobs when this is used up")
    parser.add_argument("--compile-only", metavar="FOLDER", help="compile every kernel into FOLDER and stop; no GPU")
    parser.add_argument("--next", action="store_true", help="the next round's variants of docs/kernels-cuda.md instead")
    options = parser.parse_args(arguments)
    if options.compile_only:
        print(
            f"{compile_all(options.next)} kernels compiled, {nvrtc.export(Path(options.compile_only))} cubins exported"
        )
        return 0
    budget = Budget(options.seconds)
    torch.manual_seed(1)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checks": [],
        "timings": [],
        "roof": {},
        "not_run": 0,
    }
    budget.note(f"{report['device']}, torch {report['torch']}")
    budget.note(f"{compile_all(options.next)} kernels compiled")
    failed, hung = 0, False
    jobs = _jobs(report, options.next)
    for done, (kind, name, job) in enumerate(jobs):
        if budget.left < 2 or hung:
            report["not_run"] = len(jobs) - done
            break
        try:
            row = job()
        except DeviceHangError as error:
            row, hung = {**name, "ok": False, "error": str(error)}, True
        except Exception as error:  # one failure must not hide the others
            row = {**name, "ok": False, "error": f"{type(error).__name__}: {error}"}
        failed += kind == "check" and not row["ok"]
        if kind == "roof" and "best" in row:
            report["roof"] = row
        elif kind != "roof":
            report["checks" if kind == "check" else "timings"].append(row)
        budget.note(f"{kind} {json.dumps({k: v for k, v in row.items() if k not in ('plan', 'rows', 'lanes')})}")
        report["wall_s"] = budget.elapsed
        save(report, "mxfp4_bench.json")
    _print_table(report, failed)
    if hung:
        leave(1)
    budget.finish()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

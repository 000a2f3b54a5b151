"""Build, check and time the MXFP4 expert pass: ``python3 -m workbench.kernels.mxfp4_bench --seconds 70``.

Prints each result as it comes and a table last; writes every number to ``$OUT/mxfp4_bench.json`` where OUT is set.
Times are of launches inside one CUDA graph over weights of several layers (together far larger than L2), launch gaps
included: bytes / time is what a decode step would see.
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from workbench.kernels import mxfp4_columns, mxfp4_cuda, mxfp4_lanes, mxfp4_one_token, mxfp4_tiles, nvrtc
from workbench.kernels.bench_jobs import SMS, Job, Report, compile_together, end, new_report, run_jobs
from workbench.kernels.bench_times import graph_times, read_roof
from workbench.kernels.budget import Budget, wait
from workbench.kernels.mxfp4_cases import GLM, GLM_RANK, GPT_OSS, NAMES, QWEN, AnyPlan, build_passes, check
from workbench.kernels.mxfp4_cuda import ExpertShape, ExpertWeights
from workbench.kernels.mxfp4_one_token import OneTokenPlan
from workbench.kernels.mxfp4_stream import Stream, StreamPlan, compile_stream


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
    times, more = graph_times(step)
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
        "us_more": more / launches,
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
    times, more = graph_times(step)
    us, total = statistics.median(times) / launches, shape.bytes_floor(shape.top_k)
    return {
        "shape": NAMES[shape],
        "tokens": 1,
        "distinct": float(shape.top_k),
        "bytes": total,
        "us": us,
        "us_more": more / launches,
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


def _jobs(report: Report, following: bool) -> list[Job]:
    """What is run, the most telling first; ``following``: the next round."""
    base = mxfp4_cuda.make_plan(GPT_OSS, 1)
    held: dict[tuple[ExpertShape, int], list[ExpertWeights]] = {}

    def layers_of(shape: ExpertShape, pairs: int = 0) -> list[ExpertWeights]:
        if (shape, pairs) not in held:
            held.clear()
            torch.cuda.empty_cache()
            held[shape, pairs] = random_layers(shape, 6, 48 if shape is QWEN else 24, pairs)
        return held[shape, pairs]

    def checked(shape: ExpertShape, tokens: int, **options: Any) -> Job:
        name = f"{NAMES[shape]}, {tokens} token(s)"
        return "checks", name, functools.partial(check, shape, tokens, seed=tokens, **options)

    def share(name: str, row: dict[str, Any]) -> dict[str, Any]:
        return {"variant": name, **row, "share_of_roof": row["bytes_per_s"] / report["roof"]["best"]}

    def timed(name: str, shape: ExpertShape, tokens: int, options: dict[str, Any]) -> Job:
        def run() -> dict[str, Any]:
            plan = options.get("plan")
            layers = layers_of(shape, plan.warps if isinstance(plan, OneTokenPlan) else 0)
            return share(name, time_variant(shape, tokens, layers, **options))

        return "timings", name, run

    def read(name: str, plan: StreamPlan) -> Job:
        return "timings", name, lambda: share(name, time_stream(GPT_OSS, layers_of(GPT_OSS), plan))

    if following:
        checks = [checked(shape, tokens, plan=plan) for shape, tokens, plan in next_checked()]
        streams = [read(*row) for row in next_streams().items()]
        rows = [timed(*row) for row in next_variants()]
        return [*checks, ("roof", "roof", read_roof), *rows, *streams]
    rows = [timed(*row) for row in variants()]
    first = [index for index, row in enumerate(variants()) if row[1] is GPT_OSS and row[2] == 1][:7]
    rest = [index for index in range(len(rows)) if index not in first]
    return [
        checked(GPT_OSS, 1),
        ("roof", "roof", read_roof),
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
    return compile_together(jobs)


def _print_table(report: Report) -> None:
    roof = report["roof"].get("best", float("nan")) / 1e12
    print(f"{report['device']}, torch {report['torch']}, {report['wall_s']:.0f} s; read roof {roof:.3f} TB/s")
    print(f"checks: {sum(row['ok'] for row in report['checks'])} of {len(report['checks'])} pass")
    heads = f"{'distinct':>8} {'MB':>6} {'us':>7} {'TB/s':>6} {'roof':>6} {'us more':>7} {'roof':>6}"
    heads += f" {'regs':>4} {'local':>5}"
    print(f"{'shape':14} {'T':>2} {'variant':30} {heads}")
    for row in report["timings"]:
        if "error" in row:
            print(f"{row['variant']}: {row['error'][:100]}")
            continue
        head = f"{row['shape']:14} {row['tokens']:2} {row['variant']:30}"
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
        count = compile_all(options.next)
        print(f"{count} kernels compiled, {nvrtc.export(Path(options.compile_only))} cubins exported")
        return 0
    budget = Budget(options.seconds)
    torch.manual_seed(1)
    report = new_report(budget, compile_all(options.next))
    jobs = _jobs(report, options.next)
    hung = run_jobs(jobs, report, budget, "mxfp4_bench.json", ("plan", "rows", "lanes"))
    _print_table(report)
    return end(report, budget, hung=hung)


if __name__ == "__main__":
    sys.exit(main())

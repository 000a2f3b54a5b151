"""Check and time the persistent decode step: ``python3 -m workbench.kernels.persistent_bench --seconds 80``.

Checks against the float64 reference (a tiny model, then two layers of gpt-oss-20b's true shape), then times the whole
of gpt-oss-20b at one token with random weights: every step's launch gap included, position rising by one a step.
Prints each result as it comes and the tables last; ``$OUT/persistent_bench.json`` holds every number.
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

from workbench.kernels import nvrtc, persistent, persistent_reference
from workbench.kernels.bench_jobs import SMS, Job, compile_together, end, new_report, run_jobs
from workbench.kernels.bench_times import measure, read_roof
from workbench.kernels.budget import Budget, wait
from workbench.kernels.mxfp4_tiles import UNIT_WEIGHT_BYTES
from workbench.kernels.persistent import PersistentEngine, StepPlan
from workbench.kernels.persistent_shape import StepShape, StepWeights, expected_weights, rope_table

GPT_OSS_20B = StepShape(24, 2880, 64, 8, 64, 32, 4, 2880, 201088, (128, 0) * 12)
TWO_LAYERS = replace(GPT_OSS_20B, layers=2, windows=(128, 0))
TINY = StepShape(2, 128, 4, 2, 64, 8, 2, 128, 272, (20, 0))
THETA = 150000.0
TOLERANCE = 2e-3  # of the logits' norm: fp16 and split-bf16 activations, bf16 keys and values


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference; NaN never passes."""
    error = (value.to(torch.float64) - reference).norm() / reference.norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def check(
    name: str, shape: StepShape, positions: list[int], capacity: int, *, seed: int = 0, plan: StepPlan | None = None
) -> dict[str, Any]:
    """Run steps at ``positions`` (ascending; a jump finds the cache filled with random numbers) and compare."""
    generator = torch.Generator("cuda").manual_seed(seed)
    model = persistent_reference.random_model(shape, generator)
    weights = persistent_reference.pack_model(shape, model)
    rope = rope_table(capacity, shape.head_dim, THETA, "cuda")
    plan = plan or persistent.make_plan(shape, SMS)
    engine = PersistentEngine(shape, weights, capacity=capacity, rope=rope, plan=plan)
    for cache in (engine.buffers.keys, engine.buffers.values):
        cache.normal_(generator=generator)
    keys, values = engine.buffers.keys.clone(), engine.buffers.values.clone()
    worst, cache_worst, margin = 0.0, 0.0, float("inf")
    same_experts = same_token = repeatable = True
    token = 7
    for position in positions:
        outputs = []
        for _ in range(2):
            engine.start(token, position)
            engine.buffers.scratch.fill_(float("nan"))
            engine.logits.fill_(float("nan"))
            engine.step()
            wait(f"{name}, position {position}")
            engine.check()
            outputs.append(engine.logits.clone())
        expected = persistent_reference.reference_step(shape, model, token, position, keys, values, rope)
        worst = max(worst, relative(outputs[0], expected.logits))
        cache_worst = max(cache_worst, relative(engine.buffers.keys, keys.to(torch.float64)))
        repeatable &= torch.equal(outputs[0], outputs[1])
        same_experts &= torch.equal(engine.routing.long(), expected.routing)
        margin = min(margin, expected.margin)
        following = int(expected.logits.argmax())
        same_token &= engine.state() == (following, position + 1)
        token = following
    return {
        "name": name,
        "positions": positions,
        "logits_relative": worst,
        "cache_relative": cache_worst,
        "same_experts": same_experts,
        "router_margin": margin,
        "same_token": same_token,
        "repeatable": repeatable,
        "ok": worst < TOLERANCE and cache_worst < TOLERANCE and same_experts and repeatable,
    }


def random_weights(shape: StepShape) -> StepWeights:
    """Random weights straight in the kernel's layouts, scaled so that activations keep an order of one."""
    tensors = {}
    for name, (dtype, extents) in expected_weights(shape).items():
        tensor = torch.empty(extents, dtype=dtype, device="cuda")
        if dtype == torch.uint8:
            weights = extents[-1] // 544 * UNIT_WEIGHT_BYTES
            for layer in tensor:
                layer.random_(0, 256)
                layer[..., weights:] = layer[..., weights:] % 3 + 118
        elif name == "gains":
            tensor.fill_(1.0)
        elif name.endswith("bias") or name == "sinks":
            tensor.normal_(std=0.2)
        else:
            for part in tensor if tensor.numel() > 1 << 30 else (tensor,):
                part.normal_(std=1.0 if name == "embedding" else shape.hidden**-0.5)
        tensors[name] = tensor
    return StepWeights(**tensors)


Variant = tuple[str, StepPlan, int]  # name, plan, context


def plans() -> list[Variant]:
    """What is timed, the main question first: the default plan, then what each of its choices is worth."""
    base = persistent.make_plan(GPT_OSS_20B, SMS)
    return [
        ("default", base, 512),
        ("lanes", replace(base, lanes=True), 512),
        ("ordered barriers", replace(base, marks=False), 512),
        ("no hold", replace(base, hold=False), 512),
        ("head dealt", replace(base, claim_head=False), 512),
        ("none of the three", _plain(base), 512),
        ("default (again)", base, 512),
        ("prefetch 128 KB of QKV", replace(base, prefetch_bytes=131072), 512),
        ("context 2048", base, 2048),
        ("64 positions a split", replace(base, split_positions=64), 2048),
        ("4 stages", replace(base, stages=4), 512),
        ("9 warps", persistent.make_plan(GPT_OSS_20B, SMS, warps=9), 512),
    ]


def _plain(plan: StepPlan) -> StepPlan:
    """``plan`` without what the fourth round brought: its base."""
    return replace(plan, claim_head=False, hold=False, marks=False)


def next_plans() -> list[Variant]:
    """The fourth round of docs/kernels-cuda.md, predictions and measurements there."""
    base = _plain(persistent.make_plan(GPT_OSS_20B, SMS))
    head = replace(base, claim_head=True)
    held = replace(head, hold=True)
    small = replace(held, copy_bytes=2048)
    return [
        ("base", base, 512),
        ("base, lanes", replace(base, lanes=True), 512),
        ("head claimed", head, 512),
        ("hold", replace(base, hold=True), 512),
        ("head claimed, hold", held, 512),
        ("the same, lanes", replace(held, lanes=True), 512),
        ("marks", replace(base, marks=True), 512),
        ("head claimed, hold, marks", replace(held, marks=True), 512),
        ("head claimed, hold, marks, lanes", replace(held, marks=True, lanes=True), 512),
        ("head claimed, hold, marks, 2 KB", replace(small, marks=True), 512),
        ("head claimed, hold, 2 KB", small, 512),
        ("head claimed, hold, 4 KB", replace(held, copy_bytes=4096), 512),
        ("head claimed, hold, 2 KB, lanes", replace(small, lanes=True), 512),
        ("2 KB", replace(base, copy_bytes=2048), 512),
        ("1 in flight", replace(base, in_flight=1), 512),
        ("1 in flight, head claimed, hold", replace(held, in_flight=1), 512),
        ("3 in flight, head cl., hold, 2 KB", replace(small, in_flight=3), 512),
        ("head claimed, hold, join 6", replace(held, join_parts=6), 512),
        ("head claimed, hold, 6 stages", replace(held, stages=6), 512),
        ("head claimed, hold, 5 stages", replace(held, stages=5), 512),
        ("head cl., hold, no evict-first", replace(held, evict_first=False), 512),
        ("12 warps", _with_warps(12), 512),
        ("12 warps, head claimed, hold", replace(_with_warps(12), claim_head=True, hold=True), 512),
        ("the same, 2 KB", replace(_with_warps(12), claim_head=True, hold=True, copy_bytes=2048), 512),
        ("12 warps, head cl., hold, lanes", replace(_with_warps(12), claim_head=True, hold=True, lanes=True), 512),
        ("12 warps, head cl., hold, marks", replace(_with_warps(12), claim_head=True, hold=True, marks=True), 512),
        ("13 warps, head claimed, hold", replace(_with_warps(13), claim_head=True, hold=True), 512),
        ("head claimed, hold", held, 2048),
        ("base (again)", base, 512),
    ]


def _with_warps(warps: int) -> StepPlan:
    """The round's base with fewer warps and the same stages: some take four units of a row tile, three the others."""
    base = _plain(persistent.make_plan(GPT_OSS_20B, SMS))
    return replace(base, warps=warps, pieces=base.pieces * base.warps // warps)


def time_plan(name: str, plan: StepPlan, context: int, weights: StepWeights, roof: float) -> dict[str, Any]:
    """Microseconds a step, back to back, from ``context`` on."""
    shape, steps = GPT_OSS_20B, 16
    rope = rope_table(4096, shape.head_dim, THETA, "cuda")
    engine = PersistentEngine(shape, weights, capacity=4096, rope=rope, plan=plan)
    engine.buffers.keys.normal_()
    engine.buffers.values.normal_()
    engine.start(11, context)
    engine.step()
    wait(f"{name}: first step")
    engine.check()
    finite = bool(torch.isfinite(engine.logits).all())

    def run() -> None:
        for _ in range(steps):
            engine.step()

    times = [us / steps for us in measure(run, repeats=9, warm=1)]
    engine.check()
    us = statistics.median(times)
    total = shape.step_bytes(context + 6 * steps)
    row = {
        "variant": name,
        "context": context,
        "us": us,
        "us_spread": [min(times), max(times)],
        "tokens_per_s": 1e6 / us,
        "bytes": total,
        "bytes_per_s": total / (us * 1e-6),
        "share_of_roof": total / (us * 1e-6) / roof,
        "registers": engine.kernel.registers,
        "local_bytes": engine.kernel.local_bytes,
        "finite": finite,
        "plan": asdict(plan),
    }
    if plan.lanes:
        row["phases"] = phase_table(engine.buffers.lanes.cpu(), shape.layers)
    return row


def phase_table(lanes: torch.Tensor, layers: int) -> list[dict[str, Any]]:
    """Microseconds of each phase, means over layers after the first and over CTAs: ``prepare`` until the activation is
    ready, ``work`` until the CTA's part is done (``slowest`` over CTAs), ``wait`` until the barrier lets it go."""
    names = persistent.PHASES
    rows = []
    for index, name in enumerate(names):
        picked = [layer * len(names) + index for layer in range(1, layers)]
        start, ready, done = (lanes[:, picked, edge].to(torch.float64) for edge in range(3))
        following = lanes[:, [record + 1 for record in picked], 0].to(torch.float64)
        if name == "attention":
            ready = start
        work = done - ready
        rows.append(
            {
                "phase": name,
                "prepare": float((ready - start).mean()) / 1e3,
                "work": float(work.mean()) / 1e3,
                "slowest": float((done.amax(dim=0) - start.amin(dim=0)).mean()) / 1e3,
                "wait": float((following - done).mean()) / 1e3,
                "total": float((following.amin(dim=0) - start.amin(dim=0)).mean()) / 1e3,
            }
        )
    last = lanes[:, layers * len(names)].to(torch.float64)
    rows.append(
        {
            "phase": "head",
            "prepare": float((last[:, 1] - last[:, 0]).mean()) / 1e3,
            "work": float((last[:, 2] - last[:, 1]).mean()) / 1e3,
            "slowest": float(last[:, 2].max() - last[:, 0].min()) / 1e3,
            "wait": 0.0,
            "total": float(last[:, 2].max() - last[:, 0].min()) / 1e3,
        }
    )
    return rows


def _checked_plans(shape: StepShape, following: bool) -> list[StepPlan]:
    """The default plan and the one without its options; of the fourth round also one with every option."""
    plan = persistent.make_plan(shape, SMS)
    every = replace(plan, copy_bytes=2048, join_parts=6, in_flight=1, evict_first=False)
    fewer = replace(_with_warps(12), claim_head=True, hold=True)
    more = [every, *([fewer] if shape is TWO_LAYERS else [])] if following else []
    return [plan, _plain(plan), *more]


def compile_all(following: bool = False) -> int:
    """Compile every kernel the benchmark runs (or the fourth round's), several at a time; needs no GPU. Returns how
    many."""
    jobs: list[Callable[[], nvrtc.Cubin]] = [
        functools.partial(nvrtc.compile_kernel, "read_roof.cu", "read_roof", {"UNROLL": unroll}) for unroll in (4, 8)
    ]
    pairs = [(shape, plan) for shape in (TINY, TWO_LAYERS) for plan in _checked_plans(shape, following)]
    pairs += [(GPT_OSS_20B, plan) for _, plan, _ in (next_plans() if following else plans())]
    jobs += [functools.partial(persistent.compile_step, *pair) for pair in dict.fromkeys(pairs)]
    return compile_together(jobs)


def _print_tables(report: dict[str, Any]) -> None:
    for row in report["timings"]:
        for phase in row.get("phases", []):
            cells = " ".join(f"{key} {phase[key]:7.2f}" for key in ("prepare", "work", "slowest", "wait", "total"))
            print(f"phase {phase['phase']:10} us: {cells}")
    roof = report["roof"].get("best", float("nan")) / 1e12
    print(f"{report['device']}, torch {report['torch']}, {report['wall_s']:.0f} s; read roof {roof:.3f} TB/s")
    for row in report["checks"]:
        print(f"check {row.get('name', '?'):12} {'pass' if row['ok'] else 'FAIL'} {row.get('error', '')}")
    print(
        f"{'variant':34} {'ctx':>5} {'us':>8} {'tok/s':>7} {'GB':>6} {'TB/s':>6} {'roof':>6} {'regs':>4} {'local':>5}"
    )
    for row in report["timings"]:
        if "error" in row:
            print(f"{row['variant']:34} {row['error'][:100]}")
            continue
        rates = f"{row['bytes'] / 1e9:6.3f} {row['bytes_per_s'] / 1e12:6.3f} {row['share_of_roof']:6.1%}"
        head = f"{row['variant']:34} {row['context']:5} {row['us']:8.1f} {row['tokens_per_s']:7.1f}"
        print(f"{head} {rates} {row['registers']:4} {row['local_bytes']:5}")


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print; returns 1 if a check fails or the device hangs, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m workbench.kernels.persistent_bench", description=__doc__)
    parser.add_argument("--seconds", type=float, default=80.0, help="stop starting jobs when this is used up")
    parser.add_argument("--compile-only", metavar="FOLDER", help="compile every kernel into FOLDER and stop; no GPU")
    parser.add_argument(
        "--next", action="store_true", help="the fourth round's variants of docs/kernels-cuda.md instead"
    )
    options = parser.parse_args(arguments)
    if options.compile_only:
        print(
            f"{compile_all(options.next)} kernels compiled, {nvrtc.export(Path(options.compile_only))} cubins exported"
        )
        return 0
    budget = Budget(options.seconds)
    torch.manual_seed(1)
    report = new_report(budget, compile_all(options.next))
    weights: list[StepWeights] = []

    def timed(name: str, plan: StepPlan, context: int) -> dict[str, Any]:
        if not weights:
            torch.cuda.empty_cache()
            weights.append(random_weights(GPT_OSS_20B))
            wait("random weights", 20.0)
            budget.note("random weights of gpt-oss-20b made")
        return time_plan(name, plan, context, weights[0], report["roof"]["best"])

    near, far = [*range(12), 30, 31], [0, 1, 2, 130, 131, 700, 2047]
    jobs: list[Job] = [
        *(
            ("checks", name, functools.partial(check, name, shape, positions, capacity, plan=plan))
            for name, shape, positions, capacity in (("tiny", TINY, near, 64), ("two layers", TWO_LAYERS, far, 2048))
            for plan in _checked_plans(shape, options.next)
        ),
        ("roof", "roof", read_roof),
    ]
    rows = next_plans() if options.next else plans()
    jobs += [("timings", name, functools.partial(timed, name, plan, context)) for name, plan, context in rows]
    hung = run_jobs(jobs, report, budget, "persistent_bench.json", ("plan", "rows"))
    _print_tables(report)
    return end(report, budget, hung=hung)


if __name__ == "__main__":
    sys.exit(main())

"""Check and time the persistent step of 2 to 8 tokens: ``python3 -m workbench.kernels.persistent_wide_bench``.

Checks first, against float64: a tiny model, then two layers of gpt-oss-20b's true shape, at 2, 3, 4, 7 and 8 tokens and
contexts up to the window's and the cache's edge. The checked kernel also writes what each phase leaves, so a failure
names the first wrong phase; the kernel that is timed is held to float64 as well. Then times the whole of gpt-oss-20b
with random weights: one token (``persistent.cu``), then 2, 4 and 8. Prints each result as it comes and the tables last;
``$OUT/persistent_wide_bench.json`` holds every number. ``--check`` stops before timing; ``--next`` checks and times the
options of the last round instead, most plans that are the default now among them.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from workbench.kernels import nvrtc, persistent, persistent_bench, persistent_reference, persistent_wide
from workbench.kernels.bench_jobs import SMS, Job, compile_together, end, new_report, run_jobs
from workbench.kernels.bench_times import measure, read_roof
from workbench.kernels.budget import Budget, wait
from workbench.kernels.persistent import StepPlan
from workbench.kernels.persistent_bench import GPT_OSS_20B, THETA, TINY, TOLERANCE, TWO_LAYERS, relative
from workbench.kernels.persistent_reference import ModelWeights
from workbench.kernels.persistent_shape import StepShape, StepWeights, rope_table
from workbench.kernels.persistent_wide import TRACED, WideEngine, WidePlan
from workbench.kernels.persistent_wide_reference import WideResult, compare_trace, read_trace, reference_wide

WIDTHS = (2, 4, 8)
CONTEXT = 512
BF16_TOLERANCE = 2 * TOLERANCE
"""Of hidden states that leave in bf16."""

MARGIN, DRAWS = 1e-3, 20
"""Tokens are drawn anew, so often at most, while a router's choice hangs on less than this."""

MODELLED_US = {2: 1800.0, 4: 2325.0, 8: 3145.0}
"""Predicted before any measurement (docs/kernels-cuda.md, section 7)."""

TRIED: tuple[tuple[int, str, dict[str, Any], float], ...] = (
    (8, "base", {}, 2935.0),
    (8, "joint", {"joint": True}, 2676.0),
    (8, "marks", {"marks": True}, 2893.0),
    (8, "marks, free 3", {"marks": True, "free": 3}, 2870.0),
    (8, "marks, free 31", {"marks": True, "free": 31}, 2850.0),
    (8, "narrow, cost 8", {"narrow": True}, 3072.0),
    (8, "narrow, cost 9", {"narrow": True, "wide_cost": 9}, 2930.0),
    (8, "narrow, cost 10", {"narrow": True, "wide_cost": 10}, 2840.0),
    (8, "narrow, cost 11", {"narrow": True, "wide_cost": 11}, 2850.0),
    (8, "joint, marks", {"joint": True, "marks": True}, 2634.0),
    (8, "joint, marks, free 31", {"joint": True, "marks": True, "free": 31}, 2590.0),
    (
        8,
        "joint, marks, free 31, cost 10",
        {"joint": True, "marks": True, "free": 31, "narrow": True, "wide_cost": 10},
        2500.0,
    ),
    (
        8,
        "joint, marks, cost 10, lanes",
        {"joint": True, "marks": True, "narrow": True, "wide_cost": 10, "lanes": True},
        2545.0,
    ),
    (4, "base", {}, 2082.0),
    (4, "joint", {"joint": True}, 1952.0),
    (4, "marks", {"marks": True}, 2040.0),
    (4, "all columns", {"narrow": False}, 2120.0),
    (4, "cost 10", {"wide_cost": 10}, 2060.0),
    (4, "joint, marks", {"joint": True, "marks": True}, 1910.0),
    (4, "joint, marks, free 31", {"joint": True, "marks": True, "free": 31}, 1885.0),
    (4, "joint, marks, cost 10", {"joint": True, "marks": True, "wide_cost": 10}, 1890.0),
    (4, "joint, marks, lanes", {"joint": True, "marks": True, "lanes": True}, 1912.0),
    (4, "joint, marks, decode 1", {"joint": True, "marks": True, "decode": 1}, 1890.0),
    (2, "base", {}, 1636.0),
    (2, "joint", {"joint": True}, 1546.0),
    (2, "joint, marks", {"joint": True, "marks": True}, 1504.0),
    (2, "joint, marks, free 31", {"joint": True, "marks": True, "free": 31}, 1480.0),
    (2, "joint, marks, decode 1", {"joint": True, "marks": True, "decode": 1}, 1490.0),
    (2, "joint, marks, lanes", {"joint": True, "marks": True, "lanes": True}, 1506.0),
)
"""The round of docs/kernels-cuda.md, section 8, against the plain plan: tokens, name, options of ``WidePlan``,
microseconds predicted."""

CHECKED: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"joint": True, "marks": True, "free": 31}),
    (4, {"joint": True, "marks": True, "wide_cost": 10, "decode": 1}),
    (8, {"joint": True, "marks": True, "free": 31, "narrow": True, "wide_cost": 10}),
    (8, {"joint": True}),
)
"""What of that round is held to float64, over the plain plan: every option at least once."""

Step = tuple[int, int]  # tokens, position of the first


def near(width: int) -> list[Step]:
    """Steps of the tiny model (window 20, 64 positions): empty cache, window edge, fewer tokens, the cache's end."""
    return [(width, 0), (width, 5), (width, 16), (1, 19), (width - 1, 20), (width, 40), (width, 64 - width)]


def far(width: int) -> list[Step]:
    """Steps of two layers (window 128, 2048 positions)."""
    few = max(width - 1, 1)
    return [(width, 0), (few, 1), (width, 126), (width, 512), (few, 700), (width, 2048 - width)]


def first_wrong(engine: WideEngine, count: int, expected: WideResult) -> tuple[str, list[tuple[str, float]]]:
    """The first phase whose trace is off (empty: none), and every phase's error."""
    errors = compare_trace(read_trace(engine.shape, engine.buffers.trace, engine.plan.tokens, count), expected.trace)
    return next((name for name, error in errors if not error < TOLERANCE), ""), errors


def run_step(engine: WideEngine, tokens: list[int], position: int, what: str) -> torch.Tensor:
    """One step over poisoned outputs; returns its logits [T, vocab]."""
    engine.start(tokens, position)
    buffers = engine.buffers
    for poisoned in (buffers.scratch, buffers.logits, buffers.trace, buffers.hidden, buffers.tapped):
        poisoned.fill_(float("nan"))
    engine.buffers.best.fill_(-1)
    engine.buffers.routing.fill_(-1)
    engine.step()
    wait(what)
    engine.check()
    return engine.logits[: len(tokens)].clone()


@functools.lru_cache(maxsize=1)
def _model(shape: StepShape, seed: int) -> tuple[ModelWeights, StepWeights]:
    model = persistent_reference.random_model(shape, torch.Generator("cuda").manual_seed(seed))
    return model, persistent_reference.pack_model(shape, model)


def check(
    name: str,
    shape: StepShape,
    width: int,
    steps: list[Step],
    capacity: int,
    *,
    seed: int = 0,
    plan: WidePlan | None = None,
) -> dict[str, Any]:
    """Run ``steps`` over a cache filled with random numbers, twice with the trace and once without, and compare.

    ``seed`` draws tokens and caches; the weights of a shape are always the same.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    model, weights = _model(shape, 3)
    rope = rope_table(capacity, shape.head_dim, THETA, "cuda")
    plan = plan or persistent_wide.make_wide_plan(shape, width, SMS)
    shared = persistent_wide.new_state(shape, capacity, rope, torch.device("cuda", torch.cuda.current_device()))
    traced, timed = (
        WideEngine(shape, weights, shared, replace(plan, trace=trace), taps=(0,)) for trace in (True, False)
    )
    for cache in (shared.keys, shared.values):
        cache.normal_(generator=generator)
    keys, values = shared.keys.clone(), shared.values.clone()
    rows: list[dict[str, Any]] = []
    for count, position in steps:
        for _ in range(DRAWS):  # where two experts score alike, rounding alone decides
            tokens = torch.randint(shape.vocab, (count,), generator=generator, device="cuda").tolist()
            expected = reference_wide(shape, model, tokens, position, keys, values, rope)
            if expected.margin > MARGIN:
                break
        where = f"{name}, {count} tokens at {position}"
        outputs = [run_step(traced, tokens, position, where) for _ in range(2)]
        best, routing = traced.buffers.best[:count].tolist(), traced.routing[:, :count].long()
        wrong, errors = first_wrong(traced, count, expected)
        plain = run_step(timed, tokens, position, f"{where}, no trace")
        row: dict[str, Any] = {
            "tokens": count,
            "position": position,
            "plain_relative": relative(plain, expected.logits),
            "logits_relative": max(
                relative(one, other) for one, other in zip(outputs[0], expected.logits, strict=True)
            ),
            "hidden_relative": relative(timed.buffers.hidden[:count], expected.trace[-1][TRACED[-1]]),
            "taps_relative": relative(timed.buffers.tapped[:count, 0], expected.trace[0][TRACED[-1]]),
            "keys_relative": relative(shared.keys, keys.double()),
            "values_relative": relative(shared.values, values.double()),
            "same_experts": torch.equal(routing, expected.routing),
            "router_margin": expected.margin,
            "argmax": best == outputs[0].argmax(dim=1).tolist(),
            "repeatable": torch.equal(outputs[0], outputs[1]),
            "same_without_trace": torch.equal(outputs[0], plain),
            "first_wrong": wrong,
        }
        close = all(
            row[key] < TOLERANCE for key in ("plain_relative", "logits_relative", "keys_relative", "values_relative")
        )
        close &= all(row[key] < BF16_TOLERANCE for key in ("hidden_relative", "taps_relative"))
        alike = ("same_experts", "argmax", "repeatable")
        row["ok"] = close and not wrong and all(row[key] for key in alike)
        if not row["ok"]:
            row["phases"] = errors
            row["got_experts"], row["want_experts"] = routing.tolist(), expected.routing.tolist()
        rows.append(row)
        for mine, right in ((shared.keys, keys), (shared.values, values)):
            mine.copy_(right)  # a wrong step must not spoil the next ones
    return {
        "name": name,
        "ok": all(row["ok"] for row in rows),
        "logits_relative": max(row["logits_relative"] for row in rows),
        "failed": [row for row in rows if not row["ok"]][:2],
        "steps": [
            {key: row[key] for key in row if key not in ("phases", "got_experts", "want_experts")} for row in rows
        ],
        "registers": timed.kernel.registers,
        "local_bytes": timed.kernel.local_bytes,
    }


def time_wide(
    name: str,
    plan: WidePlan,
    weights: StepWeights,
    roof: float,
    modelled_us: float,
    repeats: int = 12,
    count: int | None = None,
) -> dict[str, Any]:
    """Microseconds a step, back to back, the same ``count`` tokens (default: the plan's) at the same position each
    time."""
    count = plan.tokens if count is None else count
    shape, steps = GPT_OSS_20B, 10
    rope = rope_table(4096, shape.head_dim, THETA, "cuda")
    shared = persistent_wide.new_state(shape, 4096, rope, torch.device("cuda", torch.cuda.current_device()))
    generator = torch.Generator("cuda").manual_seed(7)  # the same routing in every variant
    shared.keys.normal_(generator=generator)
    shared.values.normal_(generator=generator)
    engine = WideEngine(shape, weights, shared, plan)
    tokens = torch.randint(shape.vocab, (count,), generator=torch.Generator().manual_seed(5)).tolist()
    run_step(engine, tokens, CONTEXT, f"{name}: first step")

    def run() -> None:
        for _ in range(steps):
            engine.step()

    times = [us / steps for us in measure(run, repeats=repeats, warm=1)]
    engine.check()
    us = statistics.median(times)
    distinct = statistics.mean(len(set(layer[:count].flatten().tolist())) for layer in engine.routing)
    total = persistent_wide.wide_bytes(shape, count, CONTEXT, distinct)
    row = {
        "variant": name,
        "tokens": count,
        "us": us,
        "us_spread": [min(times), max(times)],
        "modelled_us": modelled_us,
        "distinct_experts": distinct,
        "bytes": total,
        "bytes_per_s": total / (us * 1e-6),
        "share_of_roof": total / (us * 1e-6) / roof,
        "registers": engine.kernel.registers,
        "local_bytes": engine.kernel.local_bytes,
        "finite": bool(torch.isfinite(engine.logits[:count]).all()),
        "plan": asdict(plan),
    }
    if plan.lanes:
        row["phases"] = phase_table(engine.buffers.lanes.cpu(), shape.layers)
    return row


def phase_table(lanes: torch.Tensor, layers: int) -> list[dict[str, Any]]:
    """Microseconds of each phase, means over layers after the first and over CTAs: ``work`` until the CTA's part is
    done, ``slowest`` over CTAs, ``wait`` until the barrier lets it go."""
    names = persistent_wide.PHASES
    rows = []
    for index, name in enumerate((*names, "head")):
        picked = [layer * len(names) + index for layer in range(1, layers)] if name != "head" else [layers * len(names)]
        start, done = (lanes[:, picked, edge].double() for edge in (0, 2))
        row: dict[str, Any] = {"phase": name, "work": float((done - start).mean()) / 1e3}
        row["slowest"] = float((done.amax(dim=0) - start.amin(dim=0)).mean()) / 1e3
        if name != "head":
            following = lanes[:, [record + 1 for record in picked], 0].double()
            row["wait"] = float((following - done).mean()) / 1e3
            row["total"] = float((following.amin(dim=0) - start.amin(dim=0)).mean()) / 1e3
        rows.append(row)
    return rows


def time_one(name: str, plan: StepPlan, us: float, weights: StepWeights, roof: float) -> dict[str, Any]:
    """The step of one token, for comparison."""
    row = persistent_bench.time_plan(name, plan, CONTEXT, weights, roof)
    return {**row, "tokens": 1, "distinct_experts": float(GPT_OSS_20B.top_k), "modelled_us": us}


def ones(following: bool) -> list[tuple[str, StepPlan, float]]:
    """Plans of the step of one token and what they are predicted to take; ``following``: of the next round too."""
    plan = persistent.make_plan(GPT_OSS_20B, SMS)
    rows = [("one token", plan, 1225.0)]
    return [*rows, ("one token, decode 1", replace(plan, decode=1), 1215.0)] if following else rows


def plain(plan: WidePlan) -> WidePlan:
    """``plan`` without what the round of section 8 brought: its base."""
    return replace(plan, joint=False, marks=False, free=0)


def variants() -> list[tuple[str, WidePlan, float]]:
    """What is timed, the main question first: name, plan, microseconds predicted."""
    plans = {width: persistent_wide.make_wide_plan(GPT_OSS_20B, width, SMS) for width in WIDTHS}
    rows = [(f"{width} tokens", plans[width]) for width in WIDTHS]
    rows += [(f"{width} tokens, plain", plain(plans[width])) for width in WIDTHS]
    rows += [(f"{width} tokens, lanes", replace(plans[width], lanes=True)) for width in (8, 4, 2)]
    rows += [(f"{width} tokens, 3 in flight", replace(plans[width], in_flight=3)) for width in (8, 4)]
    rows += [("8 tokens, no hold", replace(plans[8], hold=False))]
    rows += [("8 tokens, narrow", replace(plans[8], narrow=True))]
    rows += [("8 tokens, 128 positions a split", replace(plans[8], split_positions=128))]
    return [(name, plan, MODELLED_US[plan.tokens]) for name, plan in rows]


def next_variants() -> list[tuple[str, WidePlan, float]]:
    """The same of the next round."""
    plans = {width: plain(persistent_wide.make_wide_plan(GPT_OSS_20B, width, SMS)) for width in WIDTHS}
    return [(f"{width}: {name}", replace(plans[width], **options), us) for width, name, options, us in TRIED]


Checked = tuple[str, StepShape, WidePlan, list[Step], int]  # name, shape, plan, steps, capacity


def checked(following: bool) -> list[Checked]:
    """What is held to float64; ``following``: of the next round."""
    rows: list[Checked] = []
    for name, shape, choose, size in (("tiny", TINY, near, 64), ("two layers", TWO_LAYERS, far, 2048)):
        for width, options in CHECKED if following else tuple((width, {}) for width in WIDTHS):
            plan = persistent_wide.make_wide_plan(shape, width, SMS)
            plan = replace(plain(plan), **options) if following else plan
            said = "".join(f", {key} {value}" for key, value in options.items())
            rows.append((f"{name}, {width} columns{said}", shape, plan, choose(width), size))
    return rows


def compile_all(*, timings: bool = True, following: bool = False) -> int:
    """Compile every kernel that is run, several at a time; needs no GPU. Returns how many."""
    plans = [
        (shape, replace(plan, trace=trace)) for _, shape, plan, *_ in checked(following) for trace in (True, False)
    ]
    jobs: list[Callable[[], nvrtc.Cubin]] = []
    if timings:
        jobs += [
            functools.partial(nvrtc.compile_kernel, "read_roof.cu", "read_roof", {"UNROLL": unroll})
            for unroll in (4, 8)
        ]
        jobs += [functools.partial(persistent.compile_step, GPT_OSS_20B, plan) for _, plan, _ in ones(following)]
        plans += [(GPT_OSS_20B, plan) for _, plan, _ in (next_variants() if following else variants())]
    jobs += [functools.partial(persistent_wide.compile_wide, *row) for row in dict.fromkeys(plans)]
    return compile_together(jobs)


def _print_failure(row: dict[str, Any]) -> None:
    for step in row.get("failed", []):
        facts = {key: value for key, value in step.items() if key not in ("phases", "got_experts", "want_experts")}
        print(f"FAIL {row['name']}: {json.dumps(facts)}")
        print("     " + "; ".join(f"{name} {error:.2g}" for name, error in step["phases"]))
        print(f"     experts got  {step['got_experts']}")
        print(f"     experts want {step['want_experts']}")


def _print_tables(report: dict[str, Any]) -> None:
    for row in report["checks"]:
        _print_failure(row)
    for row in report["timings"]:
        for phase in row.get("phases", []):
            cells = " ".join(f"{key} {value:7.2f}" for key, value in phase.items() if key != "phase")
            print(f"{row['variant']:20} phase {phase['phase']:10} us: {cells}")
    roof = report["roof"].get("best", float("nan")) / 1e12
    print(f"{report['device']}, torch {report['torch']}, {report['wall_s']:.0f} s; read roof {roof:.3f} TB/s")
    for row in report["checks"]:
        worst = f"logits {row['logits_relative']:.2e}" if "logits_relative" in row else row.get("error", "")
        print(f"check {row['name']:40} {'pass' if row['ok'] else 'FAIL'} {worst}")
    print(
        f"{'variant':34} {'T':>2} {'us':>8} {'modelled':>8} {'experts':>7} {'GB':>6} {'TB/s':>6} {'roof':>6} "
        f"{'regs':>4} {'local':>5}"
    )
    for row in report["timings"]:
        if "error" in row:
            print(f"{row['variant']:34} {row['error'][:100]}")
            continue
        rates = f"{row['bytes'] / 1e9:6.3f} {row['bytes_per_s'] / 1e12:6.3f} {row['share_of_roof']:6.1%}"
        head = f"{row['variant']:34} {row['tokens']:2} {row['us']:8.1f} {row['modelled_us']:8.0f}"
        finite = "" if row["finite"] else " NOT FINITE"
        print(f"{head} {row['distinct_experts']:7.2f} {rates} {row['registers']:4} {row['local_bytes']:5}{finite}")


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print; returns 1 if a check fails or the device hangs, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m workbench.kernels.persistent_wide_bench", description=__doc__)
    parser.add_argument("--seconds", type=float, default=80.0, help="stop starting jobs when this is used up")
    parser.add_argument("--check", action="store_true", help="stop before timing")
    parser.add_argument("--next", action="store_true", help="the next round's options of docs/kernels-cuda.md instead")
    parser.add_argument("--compile-only", metavar="FOLDER", help="compile every kernel into FOLDER and stop; no GPU")
    options = parser.parse_args(arguments)
    if options.compile_only:
        compiled = compile_all(following=options.next)
        print(f"{compiled} kernels compiled, {nvrtc.export(Path(options.compile_only))} cubins exported")
        return 0
    budget = Budget(options.seconds)
    torch.manual_seed(1)
    report = new_report(budget, compile_all(timings=not options.check, following=options.next))
    jobs: list[Job] = [
        ("checks", name, functools.partial(check, name, shape, plan.tokens, steps, size, plan=plan))
        for name, shape, plan, steps, size in checked(options.next)
    ]
    if not options.check:
        jobs += _timing_jobs(report, budget, options.next)
    hung = run_jobs(jobs, report, budget, "persistent_wide_bench.json", ("plan", "rows", "failed", "phases"))
    _print_tables(report)
    return end(report, budget, hung=hung)


def _timing_jobs(report: dict[str, Any], budget: Budget, following: bool) -> list[Job]:
    """The read roof, one token, and the variants, over one set of random weights."""
    weights: list[StepWeights] = []

    def roof() -> dict[str, Any]:
        _model.cache_clear()
        torch.cuda.empty_cache()
        return read_roof()

    def timed(time: Callable[[StepWeights, float], dict[str, Any]]) -> dict[str, Any]:
        if not weights:
            torch.cuda.empty_cache()
            weights.append(persistent_bench.random_weights(GPT_OSS_20B))
            wait("random weights", 20.0)
            budget.note("random weights of gpt-oss-20b made")
        return time(weights[0], report["roof"]["best"])

    def single(name: str, plan: StepPlan, us: float) -> Callable[[StepWeights, float], dict[str, Any]]:
        return lambda held, best: time_one(name, plan, us, held, best)

    def several(
        name: str, plan: WidePlan, us: float, count: int | None = None
    ) -> Callable[[StepWeights, float], dict[str, Any]]:
        return lambda held, best: time_wide(name, plan, held, best, us, count=count)

    rows = next_variants() if following else variants()
    jobs = [(row[0], single(*row)) for row in ones(following)]
    if following:  # the wide kernel with one of its two columns empty
        plan = next(plan for name, plan, _ in rows if name == "2: joint, marks, free 31")
        jobs.append(("one of 2", several("1 of 2: joint, marks, free 31", plan, 1150.0, 1)))
    jobs += [(row[0], several(*row)) for row in rows]
    return [("roof", "roof", roof), *(("timings", name, functools.partial(timed, time)) for name, time in jobs)]


if __name__ == "__main__":
    sys.exit(main())

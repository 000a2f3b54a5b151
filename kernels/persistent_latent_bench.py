"""Check and time the persistent decode step of latent attention: ``python3 -m workbench.kernels.persistent_latent_bench
--seconds 120``.

Checks against the float64 reference (tiny slices, then few layers of the true slice of GLM-5.2 that one of eight ranks
holds, with and without indexers), then times the slice with random weights drawn in the kernel's layouts: every step's
launch gap included, position rising by one a step. Prints each result as it comes and the tables last;
``$OUT/persistent_latent_bench.json`` holds every number.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from workbench.errors import UnfitError
from workbench.kernels import fp8_tiles, latent_reference, mxfp4_tiles, nvrtc, persistent_latent
from workbench.kernels.bench_jobs import SMS, Job, compile_together, end, new_report, run_jobs
from workbench.kernels.bench_times import measure, read_roof
from workbench.kernels.budget import Budget, wait
from workbench.kernels.latent_reference import LatentModel, LatentResult, mxfp4_scale, reference_step
from workbench.kernels.latent_shape import (
    Extents,
    LatentLayer,
    LatentShape,
    LatentWeights,
    expected_layer,
    expected_model,
)
from workbench.kernels.mxfp4_cases import relative
from workbench.kernels.persistent_latent import LatentEngine, LatentPlan
from workbench.kernels.persistent_shape import rope_table

THETA = 8e6
GLM = LatentShape(
    layers=78,
    hidden=6144,
    heads=8,
    q_lora=2048,
    kv_lora=512,
    nope=192,
    rope=64,
    v_dim=256,
    index_dim=128,
    index_heads=32,
    experts=256,
    top_k=8,
    inter=256,
    shared_inter=256,
    dense_layers=3,
    dense_inter=1536,
    vocab=19360,
    owners=(0, 1, 2, *range(6, 78, 4)),
)
"""What one of eight tensor-parallel ranks holds of GLM-5.2."""

FEW = replace(GLM, layers=5, owners=(0, 1, 2, 4))
PLAIN = replace(GLM, layers=4, owners=())
TINY = LatentShape(
    layers=3,
    hidden=512,
    heads=4,
    q_lora=128,
    kv_lora=512,
    nope=32,
    rope=64,
    v_dim=32,
    index_dim=128,
    index_heads=4,
    experts=8,
    top_k=2,
    inter=64,
    shared_inter=128,
    dense_layers=1,
    dense_inter=128,
    vocab=272,
    owners=(0, 2),
)
BARE = replace(TINY, layers=2, dense_layers=0, dense_inter=0, owners=(), index_dim=0, index_heads=0)
TOLERANCE = 4e-3  # of the logits' norm: fp16 activations, 22 bits between phases, a bf16 cache (1.5e-3 in three layers)
CACHE_TOLERANCE = 4e-3  # of a row's norm: rounding to bf16 after sums in another order
CLOSE = 1e-3  # scores nearer than this may be chosen the other way round
CAPACITY = 2048


@dataclass(frozen=True, slots=True)
class Case:
    """Steps to compare with float64. ``positions`` rise; a jump finds the cache filled with random numbers."""

    name: str
    shape: LatentShape
    grid: int
    positions: tuple[int, ...]
    capacity: int
    forced: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> LatentPlan:
        """The default plan for the case's grid, and what the case changes in it."""
        warps = self.changes.get("warps", 8)
        return replace(persistent_latent.make_plan(self.shape, self.grid, warps=warps), **self.changes)


def cases(*, next_round: bool = False) -> list[Case]:
    """What is checked, small things first; ``next_round``: what the plans of that round need, and no more."""
    near, far = (*range(12), 30, 31), (0, 1, 2, 130, 131, 700, 2047)
    if next_round:
        return [
            Case("tiny", TINY, 16, near, 64),
            Case("few layers", FEW, SMS, far, CAPACITY),
            Case("few layers forced", FEW, SMS, (0, 1, 700), CAPACITY, forced=True),
            Case("few layers 16 warps", FEW, SMS, (0, 700), CAPACITY, changes={"warps": 16}),
            Case("few layers decode 1", FEW, SMS, (0, 700), CAPACITY, changes={"decode": 1}),
        ]
    return [
        Case("tiny", TINY, 16, near, 64),
        Case("tiny forced", TINY, 16, near, 64, forced=True),
        Case("tiny odd grid", TINY, 14, near, 64),
        Case("tiny 16 warps", TINY, 16, near, 64, changes={"warps": 16}),
        Case("tiny variant", TINY, 16, near, 64, changes={"in_flight": 0, "claim_head": False, "lanes": True}),
        Case("bare", BARE, 16, near, 64),
        Case("few layers", FEW, SMS, far, CAPACITY),
        Case("few layers forced", FEW, SMS, (0, 1, 700), CAPACITY, forced=True),
        Case("few layers 16 warps", FEW, SMS, (0, 700), CAPACITY, changes={"warps": 16}),
        Case("few layers decode 1", FEW, SMS, (0, 700), CAPACITY, changes={"decode": 1}),
        Case("few layers prefetch", FEW, SMS, (0, 700), CAPACITY, changes={"prefetch_bytes": 65536}),
        Case("few layers stamps", FEW, SMS, (0, 700), CAPACITY, changes={"stamps": True}),
        Case("no indexer", PLAIN, SMS, (0, 1, 700), CAPACITY),
    ]


@functools.lru_cache(maxsize=1)
def _random(shape: LatentShape, seed: int) -> tuple[LatentModel, LatentWeights]:
    model = latent_reference.random_model(shape, torch.Generator("cuda").manual_seed(seed))
    return model, latent_reference.pack_model(shape, model)


def forced_table(shape: LatentShape, rows: int, generator: torch.Generator) -> torch.Tensor:
    """A random choice of experts for every row and layer, int32 [rows, moe layers, top_k]."""
    order = torch.rand(rows, shape.moe_layers, shape.experts, generator=generator, device=generator.device)
    return order.argsort(dim=-1)[..., : shape.top_k].to(torch.int32).contiguous()


def check(case: Case, *, seed: int = 0) -> dict[str, Any]:
    """Run the case's steps and compare logits, experts, caches and the token chosen; every step twice.

    Outputs are poisoned before each run, and the second run of every third step starts from fresh scratch memory.
    Where a router's margin is too close to call, the reference follows the kernel's choice.
    """
    shape = case.shape
    model, weights = _random(shape, seed)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    rope = rope_table(case.capacity, shape.rope, THETA, "cuda")
    forced = forced_table(shape, 5, generator) if case.forced else None
    engine = LatentEngine(shape, weights, capacity=case.capacity, rope=rope, plan=case.plan, forced=forced)
    caches = [engine.buffers.latents, engine.buffers.index_keys]
    for cache in caches:
        cache.normal_(generator=generator)
    copies = [cache.clone() for cache in caches]
    worst, cache_worst, margin = 0.0, 0.0, float("inf")
    same_experts = same_token = repeatable = untouched = True
    token = 7
    for number, position in enumerate(case.positions):
        outputs = []
        for run in range(2):
            if run and number % 3 == 2:
                engine.reset()
            engine.start(token, position)
            engine.logits.fill_(float("nan"))
            engine.routing.fill_(-1)
            engine.step()
            wait(f"{case.name}, position {position}")
            engine.check()
            outputs.append(engine.logits.clone())
            same_token &= engine.state() == (int(engine.logits.argmax()), position + 1)
        repeatable &= torch.equal(outputs[0], outputs[1])
        row = None if forced is None else forced[position % len(forced)]
        expected, same = _reference(shape, model, token, position, copies, rope, row, engine.routing)
        same_experts &= same
        margin = min(margin, expected.margin)
        worst = max(worst, relative(outputs[0], expected.logits))
        for cache, copy in zip(caches, copies, strict=True):
            if cache.numel():
                cache_worst = max(cache_worst, relative(cache[:, position], copy[:, position].to(torch.float64)))
                copy[:, position] = cache[:, position]
                untouched &= torch.equal(cache, copy)
        token = int(expected.logits.argmax())
    return {
        "name": case.name,
        "positions": list(case.positions),
        "logits_relative": worst,
        "cache_relative": cache_worst,
        "cache_untouched_elsewhere": untouched,
        "same_experts": same_experts,
        "router_margin": margin,
        "same_token": same_token,
        "repeatable": repeatable,
        "registers": engine.kernel.registers,
        "local_bytes": engine.kernel.local_bytes,
        "ok": worst < TOLERANCE
        and cache_worst < CACHE_TOLERANCE
        and untouched
        and same_experts
        and same_token
        and repeatable,
    }


def _reference(
    shape: LatentShape,
    model: LatentModel,
    token: int,
    position: int,
    caches: list[torch.Tensor],
    rope: torch.Tensor,
    forced: torch.Tensor | None,
    routing: torch.Tensor,
) -> tuple[LatentResult, bool]:
    """The reference's step, and whether the kernel's ``routing`` is its choice or one too close to call."""
    expected = reference_step(shape, model, token, position, caches[0], caches[1], rope, forced=forced)
    if torch.equal(routing.long().sort(dim=-1).values, expected.routing.sort(dim=-1).values):
        return expected, True
    valid = int(routing.min()) >= 0 and int(routing.max()) < shape.experts
    if forced is not None or expected.margin > CLOSE or not valid:
        return expected, False
    followed = reference_step(shape, model, token, position, caches[0], caches[1], rope, forced=routing)
    return replace(followed, margin=expected.margin), True


def random_weights(shape: LatentShape, device: torch.device | str = "cuda") -> LatentWeights:
    """Random weights straight in the kernel's layouts, scaled so that activations keep an order of one."""
    layers = tuple(
        LatentLayer(
            **{
                name: None if wanted is None else _random_tensor(shape, name, wanted, device)
                for name, wanted in expected_layer(shape, index).items()
            }  # type: ignore[arg-type]
        )
        for index in range(shape.layers)
    )
    whole = {name: _random_tensor(shape, name, wanted, device) for name, wanted in expected_model(shape).items()}
    return LatentWeights(whole["embedding"], whole["head"], whole["final_norm"], layers)


def _random_tensor(shape: LatentShape, name: str, wanted: Extents, device: torch.device | str) -> torch.Tensor:
    dtype, extents = wanted
    tensor = torch.empty(extents, dtype=dtype, device=device)
    if name in ("gate_up", "down"):
        tensor.view(torch.int64).random_(-(2**63), None)
        scales = tensor[..., extents[-1] // mxfp4_tiles.UNIT_BYTES * mxfp4_tiles.UNIT_WEIGHT_BYTES :]
        scales.remainder_(3).add_(mxfp4_scale(shape.hidden if name == "gate_up" else shape.inter) - 1)
    elif dtype == torch.uint8:
        # The top exponent bit of each code is cleared: no NaN, and a root mean square of 0.6.
        words = tensor.view(torch.int64).random_(-(2**63), None)
        words.bitwise_and_(int.from_bytes(b"\xbf" * 8, "little", signed=True))
        factor = 1 / (0.6 * (fp8_tiles.UNIT_COLUMNS * extents[1]) ** 0.5)
        tail = torch.tensor([factor, factor, 0, 0], dtype=torch.float32, device=device).view(torch.uint8)
        tensor[..., fp8_tiles.UNIT_WEIGHT_BYTES :] = tail
    elif name == "index_norm":
        tensor[0], tensor[1] = 1, 0
    elif name.endswith("norm"):
        tensor.fill_(1)
    elif name == "correction":
        tensor.normal_(std=0.05)
    else:
        fan_in = {"embedding": 1, "uk": shape.nope, "uv": shape.kv_lora}.get(name, shape.hidden)
        tensor.normal_(std=fan_in**-0.5)
    return tensor


def packed_bytes(shape: LatentShape) -> int:
    """Bytes that a slice takes in the kernel's layouts."""
    tensors = [*expected_model(shape).values()]
    for index in range(shape.layers):
        tensors += [wanted for wanted in expected_layer(shape, index).values() if wanted is not None]
    return sum(torch.Size(extents).numel() * dtype.itemsize for dtype, extents in tensors)


def first_layers(count: int) -> LatentShape:
    """The first ``count`` layers of the rank's slice of GLM-5.2, the head behind them."""
    return replace(GLM, layers=count, owners=tuple(layer for layer in GLM.owners if layer < count))


def layers_that_fit(free_bytes: int) -> int:
    """Most layers whose weights leave 8 GiB of ``free_bytes``. Raises UnfitError where not even four do."""
    for count in range(GLM.layers, GLM.dense_layers, -1):
        if packed_bytes(first_layers(count)) + (8 << 30) <= free_bytes:
            return count
    raise UnfitError(f"memory: {free_bytes} bytes are free, four layers need {packed_bytes(first_layers(4))} and 8 GiB")


def plans(shape: LatentShape, *, next_round: bool = False) -> list[tuple[str, LatentPlan]]:
    """What is timed, the main question first; ``next_round``: only what was not measured yet."""
    base = persistent_latent.make_plan(shape, SMS)
    wide = persistent_latent.make_plan(shape, SMS, warps=16)
    if next_round:
        return [
            ("base", base),
            ("in flight 3", replace(base, in_flight=3)),
            ("decode 1", replace(base, decode=1)),
            ("16 warps", wide),
            ("6 stages", replace(base, stages=6)),
            ("10 stages", replace(base, stages=10)),
            ("stamps", replace(base, stamps=True)),
            ("nothing else", replace(base, leave_out=3)),
            ("nothing else, stamps", replace(base, leave_out=3, stamps=True)),
            ("base (again)", base),
        ]
    return [
        ("base", base),
        ("lanes", replace(base, lanes=True)),
        ("16 warps", wide),
        ("in flight 0", replace(base, in_flight=0)),
        ("in flight 3", replace(base, in_flight=3)),
        ("in flight 4", replace(base, in_flight=4)),
        ("prefetch 64 KB", replace(base, prefetch_bytes=65536)),
        ("collectives 8 us", replace(base, collective_ns=8000)),
        ("10 stages", replace(base, stages=10)),
        ("6 stages", replace(base, stages=6)),
        ("decode 1", replace(base, decode=1)),
        ("without copies", replace(base, leave_out=1)),
        ("without products", replace(base, leave_out=2)),
        ("without copies and products", replace(base, leave_out=3)),
        ("16 warps, in flight 4", replace(wide, in_flight=4)),
        ("16 warps, lanes", replace(wide, lanes=True)),
        ("head dealt", replace(base, claim_head=False)),
        ("no evict-first", replace(base, evict_first=False)),
        ("base (again)", base),
    ]


def time_plan(
    name: str, shape: LatentShape, plan: LatentPlan, context: int, weights: LatentWeights, roof: float
) -> dict[str, Any]:
    """Microseconds a step, back to back, from ``context`` on."""
    steps, repeats = 16, 9
    engine = LatentEngine(
        shape, weights, capacity=CAPACITY, rope=rope_table(CAPACITY, shape.rope, THETA, "cuda"), plan=plan
    )
    engine.buffers.latents.normal_()
    engine.start(11, context)
    engine.step()
    wait(f"{name}: first step")
    engine.check()
    finite = bool(torch.isfinite(engine.logits).all())

    def run() -> None:
        for _ in range(steps):
            engine.step()

    times = [us / steps for us in measure(run, repeats=repeats, warm=1)]
    engine.check()
    us = statistics.median(times)
    total = shape.step_bytes(context + (repeats // 2 + 1) * steps)
    row = {
        "plan": name,
        "layers": shape.layers,
        "context": context,
        "us": us,
        "us_spread": [min(times), max(times)],
        "bytes": total,
        "gb_per_s": total / us / 1e3,
        "share_of_roof": total / (us * 1e-6) / roof,
        "registers": engine.kernel.registers,
        "local_bytes": engine.kernel.local_bytes,
        "finite": finite,
        "macros": asdict(plan),
    }
    if plan.lanes:
        row["phases"] = phase_table(engine.buffers.lanes.cpu(), shape.layers, max(1, shape.dense_layers))
    if plan.stamps:
        row["marks"] = mark_table(engine.buffers.lanes.cpu(), shape.layers, max(1, shape.dense_layers))
    return row


def mark_table(stamps: torch.Tensor, layers: int, first: int = 1) -> list[dict[str, Any]]:
    """Microseconds from a phase's start to each of its marks in the last step, means over the layers from ``first`` on
    of medians over CTAs; ``next``: the following phase's start; ``last_published``: from the last CTA's publication of
    the phase before to all words there in the median CTA, a hop. Marks that a phase never sets are left out.

    A CTA's clock is put on %globaltimer's scale by a line through all its phases, so that the timer's steps average
    out.
    """
    names = persistent_latent.MARKS
    wall = stamps[..., names.index("wall")].to(torch.float64)
    clock = stamps.to(torch.float64)
    start = clock[..., 0]
    centred, wall_0 = start - start.mean(dim=1, keepdim=True), wall.mean(dim=1, keepdim=True)
    rate = (centred * (wall - wall_0)).sum(dim=1) / (centred * centred).sum(dim=1)  # ns a clock, by CTA
    there = stamps != 0
    times = ((clock - start.mean(dim=1)[:, None, None]) * rate[:, None, None] + wall_0[..., None] - wall.min()) / 1e3
    rows = []
    for index, phase in enumerate(persistent_latent.PHASES):
        picked = [layer * len(persistent_latent.PHASES) + index for layer in range(first, layers)]
        begin = times[:, picked, 0]
        row: dict[str, Any] = {"phase": phase}
        for edge, name in enumerate(names):
            seen = there[:, picked, edge].float().mean()
            if name not in ("start", "wall") and float(seen) > 0.5:
                after = torch.where(there[:, picked, edge], times[:, picked, edge] - begin, torch.nan)
                row[name] = float(after.nanquantile(0.5, dim=0).nanmean())
        row["next"] = _middle(times[:, [record + 1 for record in picked], 0] - begin)
        words, published = names.index("words"), names.index("published")
        before = [record - 1 for record in picked]
        hop = times[:, picked, words].quantile(0.5, dim=0) - times[:, before, published].amax(dim=0)
        row["last_published"] = float(hop.mean())
        rows.append(row)
    return rows


def phase_table(lanes: torch.Tensor, layers: int, first: int = 1) -> list[dict[str, Any]]:
    """Microseconds of each phase in the last step, means over the layers from ``first`` on of medians over CTAs:
    ``wait`` until the CTA's activation is there, ``compute`` from then until its part is done, ``slowest`` from the
    first CTA's start to the last one's end, ``total`` from a start to the next phase's. A phase that does not record
    when its activation is there counts all as ``compute``."""
    names = persistent_latent.PHASES
    edges = lanes.to(torch.float64) / 1e3 - lanes[..., 0].min() / 1e3
    start, done = edges[..., 0], edges[..., 2]
    ready = torch.where(lanes[..., 1] == 0, start, edges[..., 1])
    rows = []
    for index, name in enumerate((*names, "head")):
        head = name == "head"
        picked = [layers * len(names)] if head else [layer * len(names) + index for layer in range(first, layers)]
        following = done[:, picked] if head else start[:, [record + 1 for record in picked]]
        rows.append(
            {
                "phase": name,
                "wait": _middle((ready - start)[:, picked]),
                "compute": _middle((done - ready)[:, picked]),
                "slowest": float((done[:, picked].amax(dim=0) - start[:, picked].amin(dim=0)).mean()),
                "total": _middle(following - start[:, picked]),
            }
        )
    return rows


def _middle(values: torch.Tensor) -> float:
    return float(values.quantile(0.5, dim=0).mean())


def compile_all(shape: LatentShape, *, next_round: bool = False) -> int:
    """Compile every kernel the benchmark runs, several at a time; needs no GPU. Returns how many."""
    jobs: list[Callable[[], nvrtc.Cubin]] = [
        functools.partial(nvrtc.compile_kernel, "read_roof.cu", "read_roof", {"UNROLL": unroll}) for unroll in (4, 8)
    ]
    pairs = [(case.shape, case.plan) for case in cases(next_round=next_round)]
    pairs += [(shape, plan) for _, plan in plans(shape, next_round=next_round)]
    jobs += [functools.partial(persistent_latent.compile_step, *pair) for pair in dict.fromkeys(pairs)]
    return compile_together(jobs)


def _print_tables(report: dict[str, Any]) -> None:
    for row in report["timings"]:
        for marks in row.get("marks", []):
            cells = " ".join(f"{key} {value:.2f}" for key, value in marks.items() if key != "phase")
            print(f"{row['plan']:24} {marks['phase']:10} us: {cells}")
    for row in report["timings"]:
        for phase in row.get("phases", []):
            cells = " ".join(f"{key} {phase[key]:7.2f}" for key in ("wait", "compute", "slowest", "total"))
            print(f"{row['plan']:16} {phase['phase']:10} us: {cells}")
    roof = report["roof"].get("best", float("nan")) / 1e9
    print(f"{report['device']}, torch {report['torch']}, {report['wall_s']:.0f} s; read roof {roof:.0f} GB/s")
    for row in report["checks"]:
        known = f"logits {row['logits_relative']:.1e}" if "logits_relative" in row else row.get("error", "")[:100]
        print(f"check {row['name']:20} {'pass' if row['ok'] else 'FAIL'} {known}")
    print(f"{'plan':34} {'layers':>6} {'us a step':>9} {'of roof':>7} {'GB/s':>6} {'regs':>4} {'local':>5}")
    for row in report["timings"]:
        if "error" in row:
            print(f"{row['plan']:34} {row['error'][:100]}")
            continue
        rates = f"{row['us']:9.1f} {row['share_of_roof']:7.1%} {row['gb_per_s']:6.0f}"
        print(f"{row['plan']:34} {row['layers']:6} {rates} {row['registers']:4} {row['local_bytes']:5}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m workbench.kernels.persistent_latent_bench", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop starting jobs when this is used up")
    parser.add_argument("--layers", type=int, help="layers to time, 4 to 78; default: as many as fit the memory")
    parser.add_argument("--context", type=int, default=512, help="positions in the cache when timing starts")
    parser.add_argument("--compile-only", metavar="FOLDER", help="compile every kernel into FOLDER and stop; no GPU")
    parser.add_argument("--next", action="store_true", help="only the checks and plans of the round being measured")
    parser.add_argument("--json", action="store_true", help="print the whole report as one line at the end, no tables")
    options = parser.parse_args(arguments)
    if options.layers is not None and not GLM.dense_layers < options.layers <= GLM.layers:
        parser.error(f"--layers must be {GLM.dense_layers + 1} to {GLM.layers}, not {options.layers}")
    if not 0 <= options.context <= CAPACITY - 256:
        parser.error(f"--context must be 0 to {CAPACITY - 256}, not {options.context}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print; returns 1 if a check fails or the device hangs, 0 otherwise."""
    options = _parse(arguments)
    if options.compile_only:
        count = compile_all(first_layers(options.layers or GLM.layers), next_round=options.next)
        print(f"{count} kernels compiled, {nvrtc.export(Path(options.compile_only))} cubins exported")
        return 0
    budget = Budget(options.seconds)
    torch.manual_seed(1)
    shape = first_layers(options.layers or layers_that_fit(torch.cuda.mem_get_info()[0]))
    report = new_report(budget, compile_all(shape, next_round=options.next))
    budget.note(f"{shape.layers} layers")
    weights: list[LatentWeights] = []

    def timed(name: str, plan: LatentPlan) -> dict[str, Any]:
        if not weights:
            _random.cache_clear()
            torch.cuda.empty_cache()
            weights.append(random_weights(shape))
            wait("random weights", 30.0)
            budget.note(f"random weights of {shape.layers} layers made, {packed_bytes(shape) / 1e9:.1f} GB")
        return time_plan(name, shape, plan, options.context, weights[0], report["roof"]["best"])

    jobs: list[Job] = [
        *(("checks", case.name, functools.partial(check, case)) for case in cases(next_round=options.next)),
        ("roof", "roof", read_roof),
        *(
            ("timings", name, functools.partial(timed, name, plan))
            for name, plan in plans(shape, next_round=options.next)
        ),
    ]
    hung = run_jobs(jobs, report, budget, "persistent_latent_bench.json", ("macros", "rows", "phases", "marks"))
    if options.json:
        print(json.dumps(report))
    else:
        _print_tables(report)
    return end(report, budget, hung=hung)


if __name__ == "__main__":
    sys.exit(main())

"""Check every rung against the eager one, then time it: ``python -m workbench.decode.rungs.smoke --seconds 85``.

The first layers of a true shape (gpt-oss-20b, 4 layers, by default) with random weights, all rungs over the same
numbers and the same context. A rung passes if most rows chose the eager rung's experts and those rows' logits differ
by no more than its tolerance. The reference never groups its experts, so ``eager`` and ``graph`` check that product.
Times are of steps back to back, launch gaps included, the head and all; ``of the roof`` is the bytes that the rung
holds and must read, over the time, over the read bandwidth measured first.

``--tp 8`` runs the slice that one of eight ranks holds (GLM-5.2, MiMo): experts are then chosen from a drawn table, so
that every row can be compared, FP8 experts are checked beside MXFP4 ones where the model ships them, and Split-K and
the persistent step run once more with stand-ins for the collectives. Of a slice the persistent rung is that of MLA
models, one token a step.

Width 1 of every rung goes first, wider steps as far as ``--seconds`` goes; what was left out is said. Exit status 1
where a rung failed. The table comes last; ``$OUT/rungs_smoke.json`` holds every number.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from workbench.decode.bytes import step_bytes
from workbench.decode.model import Scores, Target
from workbench.decode.precision import TensorClass, load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rank import first_layers, rank_slice
from workbench.decode.rungs.agreement import Agreement, agreement, fill_context
from workbench.decode.rungs.collectives import with_collectives
from workbench.decode.rungs.forward import EagerForward, Forward
from workbench.decode.rungs.fused import FusedStep
from workbench.decode.rungs.grouping import ExpertForm, with_grouped_experts
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.persistent import persistent_forward
from workbench.decode.rungs.persistent_latent import latent_forward
from workbench.decode.rungs.persistent_wide import wide_forward
from workbench.decode.rungs.plain import PlainStep
from workbench.decode.rungs.plan import PLANS, RungPlan, plan_of
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.reference import fp8_experts_twin, live_quant_twin
from workbench.decode.rungs.routing import drawn_choices, with_choices
from workbench.decode.rungs.static import StaticForward
from workbench.decode.rungs.store import Held
from workbench.decode.spec import MLA, ModelSpec
from workbench.errors import InputError, UnfitError
from workbench.hardware import measure_read_roof
from workbench.kernels.budget import Budget, DeviceHangError, leave, save, wait
from workbench.kernels.persistent_wide import MAX_TOKENS
from workbench.scenario import RUNGS, Rung

TOLERANCE = 3e-2
"""Relative error of the logits: both sides are bfloat16, in other orders."""

LIVE_TOLERANCE = 1.5e-1
"""With FP8 activations: a bfloat16 error turns some to a neighbour, 6 to 12 % away, in every layer."""

RANK_TOLERANCE = 2e-1
"""The same where every product of a layer rounds its input, and shared and routed experts do."""

SAME_SHARE = 0.5
"""Share of rows that must have chosen the reference's experts; random routers have many near ties."""

FREE_LAYERS = 6
"""Layers up to which routers choose for themselves in the check."""

ROWS = 8
"""Tokens that a rung is checked on, each in the same context: one row alone could be one that flipped."""

ROUNDS = 3
"""Timed rounds; the median counts."""

STEPS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One rung at one width."""

    rung: Rung
    width: int
    overlap: bool = False
    policy: str = ""
    collective_us: float = 0

    @property
    def name(self) -> str:
        """What the table calls it."""
        more = f"{'+overlap' if self.overlap else ''}{'+collective' if self.collective_us else ''}"
        return f"{self.rung}{more}{f' {self.policy}' if self.policy else ''} T={self.width}"


class Weights:
    """The smoke model in the forms that rungs hold, built when first asked for.

    ``choices``: the experts that every token runs, or None where the router chooses.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, choices: torch.Tensor | None = None) -> None:
        self.spec, self._device, self._choices = spec, device, choices
        self._held: dict[tuple[str, bool], Held] = {}

    def get(self, policy: str, *, packed: bool) -> Held:
        """Return the weights under ``policy``."""
        key = (policy, packed)
        if key not in self._held:
            target, experts = random_model(
                self.spec, load_policy(policy), seed=0, device=self._device, dtype=torch.bfloat16, packed=packed
            )
            target = target if self._choices is None else with_choices(target, self._choices)
            self._held[key] = Held(target, None, experts)
        return self._held[key]


def policy_of(case: Case, spec: ModelSpec) -> str:
    """Return the policy whose weights ``case`` needs: FP8 as shipped for what is no FP4 rung of such a model."""
    plan = PLANS[case.rung]
    if case.policy:
        return case.policy
    if spec.shipped == "mimo-release":
        return spec.shipped
    if spec.shipped == "fp8":
        return "mxfp4-experts-fp8" if plan.packed else "fp8"
    return "mxfp4-experts" if plan.dense == "bf16" else "mxfp4-experts-fp8"


def stays_packed(plan: RungPlan, policy: str) -> bool:
    """Whether the case's experts stay as stored: FP8 ones always do, MXFP4 ones on packed rungs."""
    return plan.packed or policy == "fp8"


def build(case: Case, weights: Weights, capacity: int) -> tuple[Forward, ExpertForm | None]:
    """Build the rung and say how plain torch runs its experts; on CUDA graphs are captured here."""
    plan, policy = PLANS[case.rung], policy_of(case, weights.spec)
    held = weights.get(policy, packed=stays_packed(plan, policy))
    if case.collective_us:
        held = replace(held, target=with_collectives(held.target, case.collective_us))
    device = held.target.device
    if plan.persistent:
        packed = [part for part in held.packed if isinstance(part, PackedExperts)]
        if isinstance(weights.spec.attention, MLA):
            return latent_forward(held.target, packed, capacity, relaid=held.relaid), None
        if case.width > 1:
            return wide_forward(held.target, packed, capacity, case.width), None
        return persistent_forward(held.target, packed, capacity), None
    experts: ExpertForm | None = None
    if plan.plain:
        target, experts = with_grouped_experts(held.target)
        held = replace(held, target=target)
    if not plan.graph:
        return EagerForward(held.target, capacity), experts
    slots = capacity + case.width
    cuda = device.type == "cuda"
    sms = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 132
    step: Any = (
        FusedStep(
            held.target,
            held.packed,
            plan,
            slots,
            sms=sms,
            overlap=case.overlap,
            fp8=plan.fp8(load_policy(policy)),
            blocks=held.blocks,
        )
        if plan.kernels
        else PlainStep(held.target, slots)
    )
    return StaticForward(step, device=device, capacity=capacity, widths=[case.width], capture=cuda), experts


def reference(case: Case, weights: Weights) -> Target:
    """Return the eager target that computes what the rung should."""
    plan, policy = plan_of(case.rung, weights.spec), policy_of(case, weights.spec)
    target = weights.get(policy, packed=policy == "fp8").target
    target = fp8_experts_twin(target) if plan.kernels and policy == "fp8" else target
    return live_quant_twin(target, plan.live(load_policy(policy)))


def tolerance_of(case: Case, spec: ModelSpec) -> float:
    """Return how far the logits may be off."""
    plan, policy = plan_of(case.rung, spec), policy_of(case, spec)
    live = plan.live(load_policy(policy))
    if not plan.kernels or (not live and policy != "fp8"):
        return TOLERANCE
    return RANK_TOLERANCE if TensorClass.SHARED_EXPERTS in live else LIVE_TOLERANCE


def time_steps(forward: Forward, tokens: torch.Tensor, steps: int) -> tuple[float, float]:
    """Return milliseconds a step, back to back, and the spread (max - min) / median of the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        if forward.device.type == "cuda":
            start, end = (_event() for _ in range(2))
            start.record()
            for _ in range(steps):
                forward.score(tokens)
            end.record()
            end.synchronize()
            rounds.append(start.elapsed_time(end) / steps)
        else:
            begun = time.perf_counter()
            for _ in range(steps):
                forward.score(tokens)
            rounds.append((time.perf_counter() - begun) * 1e3 / steps)
    middle = statistics.median(rounds)
    return middle, (max(rounds) - min(rounds)) / middle


def _event() -> Any:
    event: Any = torch.cuda.Event  # untyped in torch
    return event(enable_timing=True)


def copied(scores: Scores) -> Scores:
    """Return scores that outlive the next step."""
    return Scores(scores.logits.clone(), scores.hidden.clone(), scores.taps.clone(), scores.experts.clone())


def joined(parts: list[Scores]) -> Scores:
    """Return several steps' scores as the rows of one."""
    logits, hidden, taps, experts = zip(*((p.logits, p.hidden, p.taps, p.experts) for p in parts), strict=True)
    return Scores(torch.cat(logits, 1), torch.cat(hidden, 1), torch.cat(taps, 1), torch.cat(experts, 1))


def run_case(case: Case, weights: Weights, spec: ModelSpec, context: int, steps: int) -> dict[str, Any]:
    """Check and time one rung."""
    begun = time.monotonic()
    capacity = context + case.width
    forward, experts = build(case, weights, capacity)
    eager = EagerForward(reference(case, weights), capacity)
    device = forward.device
    generator = torch.Generator().manual_seed(1)
    rounds = max(1, ROWS // case.width)
    text = torch.randint(spec.vocab, (rounds, 1, case.width), generator=generator).to(device)
    with torch.inference_mode():
        fill_context(eager, context)
        fill_context(forward, context)
        want = joined([copied(eager.score(tokens)) for tokens in text])
        first = copied(forward.score(text[0]))
        if device.type == "cuda":
            wait(f"{case.name}: first step", 20.0)
        got = joined([copied(forward.score(tokens)) for tokens in text])
        result = agreement(got, want)
        repeatable = torch.equal(first.logits, got.logits[:, : case.width])
        built = time.monotonic() - begun
        ms, spread = time_steps(forward, text[0], steps)
    plan, policy_name = plan_of(case.rung, spec), policy_of(case, spec)
    distinct = [float(len(set(layer.flatten().tolist()))) for layer in first.experts]
    policy = plan.held(load_policy(policy_name), "bf16", packed=stays_packed(plan, policy_name))
    moved = step_bytes(spec, policy, width=case.width, context=context, distinct_experts=distinct or None).read_bytes
    tolerance = tolerance_of(case, spec)
    return {
        "case": case.name,
        **asdict(case),
        **asdict(result),
        "tolerance": tolerance,
        "passed": passed(result, tolerance),
        "repeatable": repeatable,
        "ms": ms,
        "spread": spread,
        "read_bytes": moved,
        "experts": "" if experts is None else str(experts),
        "build_s": built,
    }


def passed(result: Agreement, tolerance: float) -> bool:
    """Whether enough rows can be compared and those agree."""
    return result.same >= SAME_SHARE * result.rows and result.error <= tolerance


def cases(
    rungs: list[Rung], widths: list[int], *, rank: bool = False, fp8: bool = False, latent: bool = False
) -> Iterator[Case]:
    """Yield every rung at the first width, then wider; Split-K also with overlapping launches. The persistent rung is
    last: its compiler takes longest. ``rank``: a slice, which has collectives, and a persistent rung, of one token a
    step, where ``latent``: the model is an MLA model; ``fp8``: the model ships FP8 experts, so fused live quantisation
    runs with them too."""
    for width in widths:
        for rung in rungs:
            if not PLANS[rung].persistent:
                yield Case(rung, width)
            if rung == "splitk":
                yield Case(rung, width, overlap=True)
            if rung == "splitk" and rank:
                yield Case(rung, width, collective_us=COLLECTIVE_US)
            if rung == "livequant-fused" and fp8:
                yield Case(rung, width, policy="fp8")
    one_launch = [rung for rung in rungs if PLANS[rung].persistent]
    if latent and 1 in widths:
        for rung in one_launch:
            yield Case(rung, 1)
            if rank:
                yield Case(rung, 1, collective_us=COLLECTIVE_US)
    elif not (rank or latent):
        yield from (Case(rung, width) for width in widths if width <= MAX_TOKENS for rung in one_launch)


COLLECTIVE_US = 8.0
"""Length of a stand-in, µs: about what a fused all-reduce of GLM-5.2 takes over eight GPUs (sglang#30959)."""


def table(rows: list[dict[str, Any]], roof: float) -> str:
    """Return the results as text; ``roof`` in bytes per second."""
    lines = [f"{'rung':26} {'ms/step':>8} {'spread':>7} {'GB':>6} {'of roof':>8} {'error':>8} {'same':>6}  check"]
    for row in rows:
        if "error_text" in row:
            lines.append(f"{row['case']:26} {row['error_text']}")
            continue
        share = row["read_bytes"] / (row["ms"] * 1e-3) / roof
        lines.append(
            f"{row['case']:26} {row['ms']:8.3f} {row['spread']:6.1%} {row['read_bytes'] / 1e9:6.2f} {share:8.1%} "
            f"{row['error']:8.4f} {row['same']:>3}/{row['rows']:<2}  {'ok' if row['passed'] else 'FAILED'}"
            f"{'' if row['repeatable'] else ', not repeatable'}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None, *, device: torch.device | None = None) -> int:
    """Run the smoke test; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workbench.decode.rungs.smoke", description=__doc__)
    parser.add_argument("--model", default="gpt-oss-20b")
    parser.add_argument("--tp", type=int, default=1, help="run the slice of one of this many ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--widths", default="1,4", help="tokens a step, the first of them for every rung first")
    parser.add_argument("--rungs", default=",".join(RUNGS))
    parser.add_argument("--steps", type=int, default=STEPS, help="steps a timed round")
    parser.add_argument("--seconds", type=float, default=85)
    options = parser.parse_args(arguments)
    if device is None and not torch.cuda.is_available():
        raise UnfitError("the smoke test of the rungs needs an NVIDIA GPU and torch sees none")
    device = device or torch.device("cuda")
    rungs: list[Rung] = [rung for rung in RUNGS if rung in options.rungs.split(",")]
    spec = load_preset(options.model)
    if not 0 < options.layers <= spec.layers:
        raise InputError(f"--layers: {options.layers} is not 1 to {spec.layers}, what {spec.name} has")
    spec = first_layers(rank_slice(spec, options.tp), options.layers)
    widths = [int(width) for width in options.widths.split(",")]
    budget = Budget(options.seconds)
    try:
        latent = isinstance(spec.attention, MLA)
        todo = list(cases(rungs, widths, rank=options.tp > 1, fp8=spec.shipped == "fp8", latent=latent))
        report = _run(spec, todo, options.context, options.steps, budget, device, rank=options.tp > 1)
    finally:
        budget.finish()
    rows = report["rows"]
    print(table(rows, report["roof_bytes_per_s"]), flush=True)
    if any(row.get("hung") for row in rows):
        leave(1)
    return int(any(not row.get("passed", "left out" in row.get("error_text", "")) for row in rows))


def _run(
    spec: ModelSpec, todo: list[Case], context: int, steps: int, budget: Budget, device: torch.device, *, rank: bool
) -> dict[str, Any]:
    """Run the cases as far as the budget goes; return the report, saved after every case."""
    roof = measure_read_roof("cuda" if device.type == "cuda" else "cpu")
    budget.note(f"roof {roof.value:.0f} GB/s; {spec.name}, {spec.layers} layers, context {context}")
    # Random routers have near ties: through many layers no row keeps the reference's experts, and none can be compared.
    forced = rank or spec.layers > FREE_LAYERS
    choices = drawn_choices(spec, exponent=None, seed=0) if forced else None
    weights, rows = Weights(spec, device, choices), list[dict[str, Any]]()
    report: dict[str, Any] = {"model": spec.name, "layers": spec.layers, "context": context, "rows": rows}
    report["roof_bytes_per_s"] = roof.value * 1e9
    for case in todo:
        if choices is not None and PLANS[case.rung].persistent and not isinstance(spec.attention, MLA):
            why = f"left out: its kernel routes by itself, and beyond {FREE_LAYERS} layers no row can be compared"
            rows.append({"case": case.name, "error_text": why})
            continue
        if budget.left < 5:
            rows.append({"case": case.name, "error_text": "left out: the time was up"})
            continue
        rows.append(_attempt(partial(run_case, case, weights, spec, context, steps), case))
        budget.note(f"{case.name}: {_line(rows[-1])}")
        save(report, "rungs_smoke.json")
        if rows[-1].get("hung"):
            break
    return report


def _attempt(run: Callable[[], dict[str, Any]], case: Case) -> dict[str, Any]:
    """Run one case; an error of the toolchain or the device becomes its row, so that the others are still seen."""
    try:
        return run()
    except DeviceHangError as error:
        return {"case": case.name, "error_text": str(error), "hung": True}
    except Exception as error:
        text = str(error).splitlines() or [type(error).__name__]
        return {"case": case.name, "error_text": f"{type(error).__name__}: {text[0][:200]}"}


def _line(row: dict[str, Any]) -> str:
    if "error_text" in row:
        return str(row["error_text"])
    compared = f"error {row['error']:.4f}, {row['same']}/{row['rows']} rows"
    experts = f", experts {row['experts']}" if row["experts"] else ""
    return f"{row['ms']:.3f} ms, {compared}, ready after {row['build_s']:.1f} s{experts}"


if __name__ == "__main__":
    sys.exit(main())

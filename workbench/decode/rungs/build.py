"""From a variant and its weights to the forward that runs it, and to the verification that fits that forward."""

from dataclasses import dataclass, replace

import torch

from workbench.decode.engine import Acceptance, Verify
from workbench.decode.model import Target
from workbench.decode.precision import TensorClass, load_policy
from workbench.decode.rungs.collectives import with_collectives
from workbench.decode.rungs.faults import REGISTER_CAP
from workbench.decode.rungs.faulty import FaultyAheadForward, FaultyForward, RecomputingForward, waiting_layers
from workbench.decode.rungs.forward import AheadForward, EagerForward, Forward
from workbench.decode.rungs.grouping import ExpertForm, with_grouped_experts
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.plain import PlainStep
from workbench.decode.rungs.plan import RungPlan, plan_of
from workbench.decode.rungs.routing import drawn_choices, recorded_choices, with_choices
from workbench.decode.rungs.static import StaticForward
from workbench.decode.rungs.store import Held
from workbench.decode.rungs.twin import narrow_activations, round_activations, shift_taps, unshare_head
from workbench.decode.rungs.verifiers import DeviceVerifier, UnfusedVerifier
from workbench.decode.spec import MLA
from workbench.scenario import Engine as EngineSettings
from workbench.scenario import Variant


@dataclass(frozen=True, slots=True)
class Runner:
    """What the decode loop needs of a rung. ``verify`` None: the loop's own verification in plain torch. ``ahead``:
    reads what a step decided by itself, for a loop that runs ahead; None for one that does not.

    ``experts``: how a plain-torch rung runs routed experts; None where there are none, and on rungs with kernels.
    """

    forward: Forward
    verify: Verify | None
    experts: ExpertForm | None = None
    ahead: Verify | None = None


def build_rung(variant: Variant, held: Held, capacity: int, acceptance: Acceptance | None) -> Runner:
    """Build the rung of ``variant`` over ``held``, for sequences of up to ``capacity`` positions.

    CUDA graphs are captured here, one for each width that the drafter leads to. The variant was checked before
    (workbench/decode/rungs/fit.py); memory that runs out here is torch's own error.
    """
    plan, faults = plan_of(variant.engine.rung, held.target.spec), frozenset(variant.engine.faults)
    widths = sorted({1, variant.drafter.width})
    held = replace(held, target=_as_asked(variant, held.target))
    experts: ExpertForm | None = None
    if plan.plain:
        target, experts = with_grouped_experts(held.target)
        held = replace(held, target=target)
    fp8 = plan.fp8(load_policy(variant.precision.policy, shipped=held.target.spec.shipped))
    fused_choice = variant.sampling.method == "greedy" and "unfused-sampling" not in faults
    decide = fused_choice and (plan.graph or plan.persistent)
    forward = _forward(plan, variant.engine, held, capacity, widths, fp8=fp8, decide=decide)
    if "recompute-prefix" in faults:
        forward = RecomputingForward(forward)
    if faults & {"item-per-step", "pageable-copy", "busy-host", "sleep-per-step", "collector-pauses"}:
        waits = {
            "item": "item-per-step" in faults,
            "upload": "pageable-copy" in faults,
            "busy": "busy-host" in faults,
            "sleep": "sleep-per-step" in faults,
            "collect": "collector-pauses" in faults,
        }
        if variant.engine.run_ahead:
            assert isinstance(forward, AheadForward)  # noqa: S101 - fit.py lets no other through
            forward = FaultyAheadForward(forward, **waits)
        else:
            forward = FaultyForward(forward, **waits)
    if "unfused-sampling" in faults:
        return Runner(forward, UnfusedVerifier(acceptance), experts)
    if decide:
        ahead = DeviceVerifier(widths[-1], forward.device) if variant.engine.run_ahead else None
        return Runner(forward, DeviceVerifier(widths[-1], forward.device, acceptance), experts, ahead)
    return Runner(forward, None, experts)


def drafter_target(variant: Variant, target: Target) -> Target:
    """Return the target as the drafter sees it: itself, or a twin with a head of its own."""
    return unshare_head(target) if "unshared-head" in variant.engine.faults else target


def _as_asked(variant: Variant, target: Target) -> Target:
    """Return ``target``, or a twin of it with the routing and the collectives that ``variant`` asks for."""
    settings, spec = variant.model, target.spec
    if settings.routing != "router":
        if variant.routing_path is not None:
            choices = recorded_choices(variant.routing_path, spec)
        else:
            exponent = settings.routing_exponent if settings.routing == "skewed" else None
            choices = drawn_choices(spec, exponent=exponent, seed=settings.seed)
        target = with_choices(target, choices)
    if variant.engine.collective_us:
        target = with_collectives(target, variant.engine.collective_us)
    return target


def _forward(
    plan: RungPlan,
    engine: EngineSettings,
    held: Held,
    capacity: int,
    widths: list[int],
    *,
    fp8: frozenset[TensorClass],
    decide: bool,
) -> Forward:
    faults, ahead = frozenset(engine.faults), engine.run_ahead
    target = shift_taps(held.target) if "tap-off-by-one" in faults else held.target
    if plan.persistent:
        from workbench.decode.rungs.persistent import persistent_forward  # needs the CUDA toolchain
        from workbench.decode.rungs.persistent_latent import latent_forward
        from workbench.decode.rungs.persistent_wide import wide_forward

        packed = [part for part in held.packed if isinstance(part, PackedExperts)]  # fit.py lets only MXFP4 through
        if isinstance(target.spec.attention, MLA):
            return latent_forward(target, packed, capacity, relaid=held.relaid)
        if widths[-1] > 1:
            return wide_forward(target, packed, capacity, widths[-1], decide=decide, ahead=ahead)
        return persistent_forward(target, packed, capacity)
    if not plan.kernels and "w4a8" in faults:
        target = narrow_activations(target)
    if "w4a4" in faults:
        target = round_activations(target)
    if "wait-per-layer" in faults:
        target = waiting_layers(target)
    if not plan.graph:
        return EagerForward(target, capacity, over_read="kv-over-read" in faults)
    slots = capacity + StaticForward.slack(widths)
    piecewise = "graph-break" in faults
    if not plan.kernels:
        plain = PlainStep(target, slots)
        return StaticForward(
            plain,
            device=target.device,
            capacity=capacity,
            widths=widths,
            capture=True,
            piecewise=piecewise,
            decide=decide,
            ahead=ahead,
        )
    from workbench.decode.rungs.fused import FusedFaults, FusedStep  # needs triton

    fused = FusedStep(
        target,
        held.packed,
        plan,
        slots,
        sms=_multiprocessors(target.device),
        overlap=engine.overlap,
        fp8=fp8,
        blocks=held.blocks,
        faults=FusedFaults(
            small_kernels="small-kernels" in faults,
            low_split="low-split" in faults,
            over_read="kv-over-read" in faults,
            registers=REGISTER_CAP if "register-cap" in faults else 0,
            narrow="w4a8" in faults,
        ),
    )
    return StaticForward(
        fused, device=target.device, capacity=capacity, widths=widths, capture=True, piecewise=piecewise, ahead=ahead
    )


def _multiprocessors(device: torch.device) -> int:
    """Return the card's multiprocessors; an H200's where there is no card (Triton's interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132

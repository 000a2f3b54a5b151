"""Whether this machine and these kernels can run a scenario's variants: asked of all before anything is built."""

from collections import Counter
from collections.abc import Sequence

import psutil
import torch

from workbench.decode.precision import Policy, TensorClass, load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rank import rank_slice
from workbench.decode.rungs.faults import check_faults
from workbench.decode.rungs.plan import LIVE_CLASSES, MAX_WIDTH, PLANS, RungPlan, plan_of, stays_packed
from workbench.decode.spec import GQA, MLA, ModelSpec
from workbench.decode.tensors import target_weights
from workbench.errors import InputError, UnfitError
from workbench.scenario import Variant

SPARE_BYTES = 4 << 30
"""Left free on a GPU for activations, graphs, workspaces and the roof's buffer."""


def check_variants(variants: Sequence[Variant]) -> None:
    """Raise UnfitError where this machine cannot run one of ``variants``, InputError where one makes no sense.

    Either names the variant and the field, or all rungs that lack a GPU. Nothing is allocated.
    """
    own = [variant for variant in variants if variant.engine.kind == "workbench"]
    _check_devices(own)
    for variant in variants:
        if variant.engine.kind == "sglang":
            from workbench.engines.sglang_engine import check

            resolve_device(variant.engine.device, f"variant {variant.name!r}")
            check(variant, variant_spec(variant))
        else:
            check_variant(variant, variant_spec(variant))
    _check_memory(own)


def variant_spec(variant: Variant) -> ModelSpec:
    """Return what ``variant`` runs: the model that it names, or one rank's slice of it."""
    whole = load_shape(variant)
    try:
        return rank_slice(whole, variant.model.tp)
    except InputError as error:
        raise InputError(f"variant {variant.name!r}: model.tp: {error.message}", hint=error.hint) from None


def load_shape(variant: Variant) -> ModelSpec:
    """Return the whole model that ``variant`` names."""
    return load_preset(str(variant.shape_path or variant.model.preset))


def resolve_device(name: str, where: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device that exists."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UnfitError(f"{where}: engine.device: 'cuda' asks for an NVIDIA GPU and torch sees none", hint="use 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def base_format(device: torch.device) -> str:
    """Return the format that engines compute in on ``device``: bf16 on CUDA, fp32 on the CPU."""
    return "bf16" if device.type == "cuda" else "fp32"


def _check_devices(variants: Sequence[Variant]) -> None:
    rungs = [rung for rung, plan in PLANS.items() if plan.needs_gpu and any(v.engine.rung == rung for v in variants)]
    if rungs and not torch.cuda.is_available():
        named = ", ".join(rungs)
        raise UnfitError(
            f"engine.rung: {named} {'needs' if len(rungs) == 1 else 'need'} an NVIDIA GPU and torch sees none, so no "
            "variant was run",
            hint="use rung 'eager', or a machine with a GPU",
        )
    for variant in variants:
        where = f"variant {variant.name!r}"
        if resolve_device(variant.engine.device, where).type != "cpu":
            continue
        if variant.engine.rung in rungs:
            raise InputError(f"{where}: engine.device: rung {variant.engine.rung!r} runs on 'cuda' only")
        if variant.engine.collective_us:
            raise InputError(f"{where}: engine.collective_us: the stand-in is a GPU kernel, the device is the CPU")


def check_variant(variant: Variant, spec: ModelSpec) -> None:
    """Raise InputError where rung, shape, precision and faults of ``variant`` do not go together."""
    where, rung = f"variant {variant.name!r}", variant.engine.rung
    plan, policy = plan_of(rung, spec), load_policy(variant.precision.policy, shipped=spec.shipped)
    check_faults(variant)
    if variant.engine.overlap and not plan.kernels:
        raise InputError(f"{where}: engine.overlap: rung {rung!r} launches no kernels of its own", hint="leave it out")
    if variant.engine.overlap and plan.persistent:
        raise InputError(f"{where}: engine.overlap: rung {rung!r} is one launch a step", hint="leave it out")
    if variant.engine.run_ahead:
        _check_ahead(variant, where)
    _check_experts(variant, spec, policy, where)
    for cls in _needs_fp8(plan, spec):
        if policy.of(cls).name != "fp8":
            has = f"{policy.name!r} has {policy.of(cls).name}"
            raise InputError(
                f"{where}: precision.policy: rung {rung!r} needs {cls} in fp8, {has}", hint="use mxfp4-experts-fp8"
            )
    if "w4a8" in variant.engine.faults and policy.of(TensorClass.ROUTED_EXPERTS).name != "mxfp4":
        raise InputError(
            f"{where}: engine.faults: 'w4a8' needs routed experts in mxfp4", hint="change precision.policy"
        )
    own = plan.persistent and not isinstance(spec.attention, MLA)  # kernels that neither take choices nor wait
    if variant.model.routing != "router" and (spec.moe is None or own):
        why = "routes for itself" if own else f"of {spec.name} has no experts to choose"
        raise InputError(f"{where}: model.routing: rung {rung!r} {why}", hint="leave it out")
    if variant.engine.collective_us and own:
        raise InputError(
            f"{where}: engine.collective_us: rung {rung!r} of {spec.name} waits for no other rank", hint="leave it out"
        )
    if plan.persistent:
        _check_persistent(spec, variant.drafter.width, where)
    if plan.kernels:
        _check_kernels(spec, variant.drafter.width, where)


def _needs_fp8(plan: RungPlan, spec: ModelSpec) -> list[TensorClass]:
    """Return the classes that must be stored in FP8: the attention's first, or all, where nothing wider is read."""
    if plan.dense == "bf16":
        return []
    if plan.dense == "fp8-weights":
        return [cls for cls in TensorClass if cls in LIVE_CLASSES and cls is not TensorClass.QKV]
    return [TensorClass.QKV_A if isinstance(spec.attention, MLA) else TensorClass.QKV]


def _check_ahead(variant: Variant, where: str) -> None:
    """Raise InputError where the host must see what a step decided before it can enqueue the next one."""
    rung, plan, kind = variant.engine.rung, PLANS[variant.engine.rung], variant.drafter.kind
    hint = "engine.run_ahead = false"
    if not (plan.graph or plan.persistent):
        raise InputError(f"{where}: engine.run_ahead: rung {rung!r} decides on the host what it commits", hint=hint)
    if variant.sampling.method != "greedy" or "unfused-sampling" in variant.engine.faults:
        raise InputError(f"{where}: engine.run_ahead: tokens are chosen outside the step", hint=hint)
    if kind not in ("none", "simulated"):
        why = f"drafter {kind!r} needs to know how many tokens were accepted before it drafts"
        raise InputError(f"{where}: engine.run_ahead: {why}", hint=f"{hint}, or drafter.kind none or simulated")


def _check_experts(variant: Variant, spec: ModelSpec, policy: Policy, where: str) -> None:
    """Raise InputError where the rung cannot hold the routed experts in the policy's format."""
    plan, rung = PLANS[variant.engine.rung], variant.engine.rung
    held = "none" if spec.moe is None else policy.of(TensorClass.ROUTED_EXPERTS).name
    if plan.packed and held not in plan.experts:
        raise InputError(
            f"{where}: precision.policy: rung {rung!r} needs routed experts in {' or '.join(plan.experts)}, "
            f"{policy.name!r} of {spec.name} has {held}",
            hint="use mxfp4-experts or mxfp4-experts-fp8",
        )
    if not stays_packed(variant):
        return
    if variant.precision.expand == "step" and not plan.packed and held not in ("mxfp4", "fp8"):
        raise InputError(f"{where}: precision.expand: 'step' needs routed experts in mxfp4 or fp8, they are {held}")
    if plan.kernels and not plan.packed and held != "fp8":
        raise InputError(
            f"{where}: precision.expand: rung {rung!r} multiplies bf16 or fp8 experts, not {held}",
            hint="use rung 'fp4'",
        )
    assert spec.moe is not None  # noqa: S101 - held is not none
    if held == "fp8" and (spec.moe.inter % 128 or spec.hidden % 128 or spec.moe.bias):
        raise InputError(
            f"{where}: {spec.name}: fp8 experts need hidden and moe.inter in multiples of 128 and no bias, they are "
            f"{spec.hidden} and {spec.moe.inter}"
        )
    if variant.engine.faults and held == "fp8" and "w4a8" in variant.engine.faults:
        raise InputError(f"{where}: engine.faults: 'w4a8' needs routed experts in mxfp4")


def _check_persistent(spec: ModelSpec, width: int, where: str) -> None:
    from workbench.decode.rungs.persistent import step_shape  # imports the kernels' launchers
    from workbench.decode.rungs.persistent_latent import check_latent
    from workbench.decode.rungs.persistent_wide import check_width

    try:
        if isinstance(spec.attention, MLA):
            check_latent(spec, width)
            return
        step_shape(spec)
        check_width(spec, width)
    except InputError as error:
        raise InputError(f"{where}: {error.message}", hint=error.hint) from None


def _check_kernels(spec: ModelSpec, width: int, where: str) -> None:
    """Raise InputError for a shape that the Triton kernels cannot take, before the first of them is launched."""
    if width > MAX_WIDTH:
        raise InputError(f"{where}: drafter.depth: kernel rungs score up to {MAX_WIDTH} tokens a step, not {width}")
    columns = {"hidden": spec.hidden}
    if spec.moe is not None:
        columns["moe.inter"] = spec.moe.inter
    if spec.dense_inter is not None and spec.layers > spec.moe_layers:
        columns["dense_inter"] = spec.dense_inter
    for name, value in columns.items():
        if value % 64:
            raise InputError(f"{where}: {spec.name}: {name}: {value} is not a multiple of 64, as the kernels need")
    for shape in {spec.mixer_spec(layer) for layer in range(spec.layers)}:
        if isinstance(shape, MLA):
            _check_mla(spec, shape, where)
            continue
        if not isinstance(shape, GQA):
            raise InputError(f"{where}: {spec.name}: attention: the kernel rungs run gqa and mla only")
        if shape.heads * shape.v_dim % 64:
            raise InputError(
                f"{where}: {spec.name}: attention: heads * v_dim = {shape.heads * shape.v_dim} is not a multiple of "
                "64, as the kernels need"
            )
        sizes = (16, 32, 64, 128, 256)
        if shape.qk_dim not in (*sizes, 192) or shape.v_dim not in sizes:
            raise InputError(
                f"{where}: {spec.name}: attention: head sizes {shape.qk_dim} and {shape.v_dim} are not the kernels'"
            )
        if width * shape.heads // shape.kv_heads > 256:
            raise InputError(
                f"{where}: drafter.depth: {width} tokens of {shape.heads // shape.kv_heads} query heads a KV head are "
                "more than the attention kernel's 256 rows"
            )


def _check_mla(spec: ModelSpec, shape: MLA, where: str) -> None:
    powers = {"kv_lora": shape.kv_lora, "rope_dim": shape.rope_dim}
    if shape.indexer is not None:
        powers["indexer.dim"] = shape.indexer.dim
    for name, size in powers.items():
        if size < 16 or size > 512 or size & (size - 1):
            raise InputError(f"{where}: {spec.name}: attention.{name}: {size} is no power of two from 16 to 512")
    for name, size in (("nope_dim", shape.nope_dim), ("v_dim", shape.v_dim)):
        if size % 16:
            raise InputError(f"{where}: {spec.name}: attention.{name}: {size} is not a multiple of 16")
    for name, size in (("q_lora", shape.q_lora), ("heads * v_dim", shape.heads * shape.v_dim)):
        if size % 64:
            raise InputError(f"{where}: {spec.name}: attention: {name} = {size} is not a multiple of 64")


def held_bytes(spec: ModelSpec, held: Policy) -> Counter[TensorClass]:
    """Return the bytes that the target's weights take in the formats of ``held``, class by class."""
    total: Counter[TensorClass] = Counter()
    for group in target_weights(spec):
        if group.stored:
            total[group.cls] += group.unit_bytes(held) * group.copies
    return total


def _check_memory(variants: Sequence[Variant]) -> None:
    """Raise UnfitError naming the largest tensor class where the distinct sets of weights exceed what is free.

    Sets are shared as the store shares them (store.py): one for each way to hold the experts, and beside it, once,
    the block FP8 forms that livequant rungs multiply. The persistent rung has a layout of its own: of MLA models its
    variants share it, else each of them holds all anew.
    """
    needed: dict[str, Counter[str]] = {"cpu": Counter(), "cuda": Counter()}
    seen: set[tuple[object, ...]] = set()
    for variant in variants:
        spec, where = variant_spec(variant), f"variant {variant.name!r}"
        plan, device = plan_of(variant.engine.rung, spec), resolve_device(variant.engine.device, where)
        policy, base = load_policy(variant.precision.policy, shipped=spec.shipped), base_format(device)
        packed, live = stays_packed(variant), plan.live(policy)
        key = (spec, variant.model.weights, variant.model.seed, policy.name, device.type, packed)
        bytes_of = needed[device.type]
        parts: list[tuple[tuple[object, ...], Policy, frozenset[TensorClass]]]
        parts = [((*key, "weights"), PLANS["eager"].held(policy, base, packed=packed), frozenset(TensorClass))]
        if live:
            parts.append(((*key, live), Policy("live", dict.fromkeys(live, "fp8")), live))
        if plan.persistent:
            whose = "" if isinstance(spec.attention, MLA) else variant.name
            parts.append(((*key, "persistent", whose), plan.held(policy, base), frozenset(TensorClass)))
        for part, held, classes in parts:
            if part not in seen:
                seen.add(part)
                for cls, size in held_bytes(spec, held).items():
                    if cls in classes:
                        bytes_of[f"{cls} in {held.of(cls).name}"] += size
        free = free_bytes(device)
        if bytes_of.total() > free:
            name, size = bytes_of.most_common(1)[0]
            raise UnfitError(
                f"{where}: rung {variant.engine.rung!r} of {spec.name}: {size} bytes of {name}, {bytes_of.total()} "
                f"with all else that the run holds, exceed the {free} bytes free on the {device.type}",
                hint="" if packed or spec.moe is None else _packed_hint(spec, policy),
            )


def _packed_hint(spec: ModelSpec, policy: Policy) -> str:
    if policy.of(TensorClass.ROUTED_EXPERTS).name == "fp8":
        size = held_bytes(spec, policy)[TensorClass.ROUTED_EXPERTS]
        return f"precision.expand = 'step' keeps them as stored, {size} bytes"
    return f"rung 'fp4' keeps the experts packed, {_packed(spec)} bytes"


def _packed(spec: ModelSpec) -> int:
    policy = Policy("packed", {TensorClass.ROUTED_EXPERTS: "mxfp4"})
    return held_bytes(spec, policy)[TensorClass.ROUTED_EXPERTS]


def free_bytes(device: torch.device) -> int:
    """Return the memory that weights may take on ``device``."""
    if device.type == "cuda":
        return max(0, torch.cuda.mem_get_info(device)[0] - SPARE_BYTES)
    return int(psutil.virtual_memory().available)

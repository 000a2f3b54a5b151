"""The persistent rung of latent attention: one launch takes a token through a rank's slice of an MLA model with experts
(workbench/kernels/persistent_latent.py).

Block FP8 weights stay so: the slice's bfloat16 matrices are quantised again, part by part, which gives back the values
and scales that they were expanded from; activations keep 16 bits. The launch waits for collectives inside itself and
takes forced choices of experts. The loop around it is that of the gpt-oss kernel (persistent.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.decode.experts import Experts
from workbench.decode.fp8 import Fp8, dequantize_blocks, quantize_blocks
from workbench.decode.layers import SwiGLU
from workbench.decode.mla import IndexerProjections, LatentAttention
from workbench.decode.model import Block, Target
from workbench.decode.rungs.collectives import collective_ns
from workbench.decode.rungs.packed import PackedExperts, expert_layers
from workbench.decode.rungs.persistent import PersistentForward
from workbench.decode.rungs.persistent_wide import CARD_SMS
from workbench.decode.spec import MLA, ModelSpec
from workbench.errors import InputError
from workbench.kernels import fp8_tiles, persistent_layout
from workbench.kernels.latent_shape import LatentLayer, LatentShape, LatentWeights
from workbench.kernels.mxfp4_retile import retile
from workbench.kernels.persistent_latent import PHASES, LatentEngine, LatentPlan, make_plan
from workbench.kernels.persistent_shape import rope_table

Relaid = dict[LatentShape, LatentWeights]
"""Weights in the kernel's layouts: made by the first rung that needs them, shared by the others."""


def step_shape(spec: ModelSpec) -> LatentShape:
    """Return ``spec`` as the kernel takes it; raises InputError, naming the field, for a model it does not."""
    shape, moe = spec.attention, spec.moe
    if not isinstance(shape, MLA) or set(spec.mixers) != {"full"}:
        raise InputError(f"{spec.name}: attention: the persistent step of latent attention takes MLA in every layer")
    if moe is None or moe.score != "sigmoid" or moe.activation != "swiglu" or moe.bias:
        raise InputError(f"{spec.name}: moe: the persistent step takes sigmoid scores, plain swiglu and no bias")
    if moe.shared != 1:
        raise InputError(f"{spec.name}: moe.shared: the persistent step takes one shared expert, not {moe.shared}")
    owned = shape.indexer
    try:
        return LatentShape(
            layers=spec.layers,
            hidden=spec.hidden,
            heads=shape.heads,
            q_lora=shape.q_lora,
            kv_lora=shape.kv_lora,
            nope=shape.nope_dim,
            rope=shape.rope_dim,
            v_dim=shape.v_dim,
            index_dim=0 if owned is None else owned.dim,
            index_heads=0 if owned is None else owned.heads,
            experts=moe.experts,
            top_k=moe.top_k,
            inter=moe.inter,
            shared_inter=moe.shared_inter or moe.inter,
            dense_layers=spec.dense_first,
            dense_inter=(spec.dense_inter or 0) if spec.dense_first else 0,
            vocab=spec.vocab,
            owners=() if owned is None else tuple(layer for layer in range(spec.layers) if owned.owned_by(layer)),
            eps=spec.norm_eps,
            factor=moe.factor,
        )
    except InputError as error:
        raise InputError(f"{spec.name}: persistent step: {error.message}", hint=error.hint) from None


def check_latent(spec: ModelSpec, width: int) -> None:
    """Raise InputError where no launch takes ``width`` tokens of ``spec``; nothing is compiled."""
    shape = step_shape(spec)
    if width > 1:
        raise InputError(
            f"drafter.depth: rung 'persistent' scores one token a step of an MLA model, not {width}",
            hint="drafter.kind 'none'",
        )
    try:
        make_plan(shape, CARD_SMS)
    except InputError as error:
        raise InputError(f"{spec.name}: persistent step: {error.message}", hint=error.hint) from None


@torch.no_grad()
def step_weights(target: Target, packed: Sequence[PackedExperts], shape: LatentShape) -> LatentWeights:
    """Return ``target``'s weights in the kernel's layouts; norms, embedding and correction stay where they are.

    Raises InputError, naming the matrix, where block FP8 does not hold a projection exactly.
    """
    experts = iter(packed)
    layers = []
    for index, block in enumerate(target.blocks):
        assert isinstance(block, Block)  # noqa: S101 - for the type checker
        layers.append(_layer(f"blocks.{index}", block, experts=None if shape.dense(index) else next(experts)))
    return LatentWeights(
        embedding=target.embed.weight.detach(),
        head=persistent_layout.pack_matrix(target.head_weight.detach()),
        final_norm=target.norm.weight.detach(),
        layers=tuple(layers),
    )


def _layer(name: str, block: Block, *, experts: PackedExperts | None) -> LatentLayer:
    attention, ffn = block.attention, block.ffn
    assert isinstance(attention, LatentAttention)  # noqa: S101 - checked by step_shape
    routed = ffn if isinstance(ffn, Experts) else None
    feed = ffn.shared if isinstance(ffn, Experts) else ffn
    assert isinstance(feed, SwiGLU)  # noqa: S101 - likewise
    owned = attention.indexer
    low = {"attention.q_a": attention.q_a.weight, "attention.kv_a": attention.kv_a.weight}
    queries = {"attention.q_b": attention.q_b.weight}
    if owned is not None:
        low |= {"attention.indexer.wk": owned.wk.weight, "attention.indexer.weights": owned.weights.weight}
        queries["attention.indexer.wq_b"] = owned.wq_b.weight
    where = f"{name}.ffn" if routed is None else f"{name}.ffn.shared"
    gate, up = (_exact(f"{where}.gate_up", part) for part in feed.gate_up.weight.chunk(2))
    return LatentLayer(
        a=_merged(name, low),
        q_b=_merged(name, queries),
        uk=persistent_layout.pack_matrix(attention.uk.detach().flatten(0, 1)),
        uv=persistent_layout.pack_matrix(attention.uv.detach().flatten(0, 1)),
        out=_merged(name, {"attention.o": attention.o.weight}),
        attention_norm=block.attention_norm.weight.detach(),
        q_norm=attention.q_a_norm.weight.detach(),
        kv_norm=attention.kv_a_norm.weight.detach(),
        index_norm=None if owned is None else _index_norm(owned),
        ffn_norm=block.ffn_norm.weight.detach(),
        router=None if routed is None else routed.router.weight.detach(),
        correction=_correction(routed),
        gate_up=None if experts is None else retile(*experts.gate_up),
        down=None if experts is None else retile(*experts.down),
        feed_up=fp8_tiles.pack_gate_up(gate.values, gate.scales, up.values, up.scales),
        feed_down=_merged(where, {"down": feed.down.weight}),
    )


def _merged(name: str, parts: dict[str, Tensor]) -> Tensor:
    """Matrices under each other as FP8 tiles, each with its own blocks, each padded to whole tiles."""
    tiles = []
    for part, weight in parts.items():
        q = _exact(f"{name}.{part}", weight)
        tiles.append(fp8_tiles.pack_fp8(fp8_tiles.pad_rows(q.values), q.scales))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _exact(name: str, weight: Tensor) -> Fp8:
    q = quantize_blocks(weight.detach())
    if not torch.equal(dequantize_blocks(q, weight.dtype), weight):
        raise InputError(
            f"{name}: block FP8 does not hold it exactly, and the persistent step reads nothing wider",
            hint="precision.policy mxfp4-experts-fp8",
        )
    return q


def _index_norm(owned: IndexerProjections) -> Tensor:
    return torch.stack((owned.k_norm.weight.detach(), owned.k_norm.bias.detach())).float()


def _correction(routed: Experts | None) -> Tensor | None:
    if routed is None:
        return None
    assert routed.correction is not None  # noqa: S101 - sigmoid scores have one
    return routed.correction.detach().float()


def forced_table(target: Target) -> Tensor | None:
    """Return the choices that ``target``'s layers with experts are forced to, int32 [rows, layers, top_k], or None."""
    tables = [ffn.forced for _, ffn in expert_layers(target) if ffn.forced is not None]
    return torch.stack(tables, dim=1).to(torch.int32).contiguous() if tables else None


def latent_forward(
    target: Target,
    packed: Sequence[PackedExperts],
    capacity: int,
    plan: LatentPlan | None = None,
    *,
    relaid: Relaid | None = None,
) -> PersistentForward[LatentEngine]:
    """Return the rung of an MLA slice, with ``target``'s stand-ins for collectives and its forced choices.

    ``plan``: how the step is cut up, but for the collectives; ``persistent_latent.make_plan``'s without one.
    ``relaid``: where the weights in the kernel's layouts are kept for other variants of ``target``.
    Raises InputError for a model the kernel does not take, UnfitError without a GPU of compute capability 9.
    """
    shape, device = step_shape(target.spec), target.device
    relaid = {} if relaid is None else relaid
    if shape not in relaid:
        relaid[shape] = step_weights(target, packed, shape)
    weights, forced = relaid[shape], forced_table(target)
    rope = rope_table(capacity, shape.rope, target.spec.rope_theta, device)
    if plan is None:
        cuda = device.type == "cuda"
        plan = make_plan(shape, torch.cuda.get_device_properties(device).multi_processor_count if cuda else CARD_SMS)
    plan = replace(plan, collective_ns=collective_ns(target))

    def make(plan: LatentPlan) -> LatentEngine:
        return LatentEngine(shape, weights, capacity=capacity, rope=rope, plan=plan, forced=forced, device=device)

    return PersistentForward(
        target, make(plan), phases=PHASES, laned=lambda: make(replace(plan, lanes=True)), slabs=_slabs
    )


def _slabs(engine: LatentEngine) -> list[tuple[Tensor, Tensor]]:
    """Latents as keys, the indexer's keys as values, as the eager rung's caches are."""
    buffers, owners = engine.buffers, engine.shape.owners
    nothing = buffers.latents[:1, :, :0]
    return [
        (latents[None], buffers.index_keys[owners.index(layer)][None] if layer in owners else nothing)
        for layer, latents in enumerate(buffers.latents)
    ]

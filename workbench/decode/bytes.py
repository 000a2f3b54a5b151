"""Bytes and operations that a decode step cannot avoid, per tensor class and rank: modelled, never measured.

``step_bytes`` covers the target's forward over ``width`` tokens a sequence, ``draft_bytes`` the drafting before it.
Every weight is read once a step, routed experts as many as the tokens touch, caches as far as the mixer sees.
Activations, collectives and what kernels fetch twice are left out: docs/reference/byte-model.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.decode.byte_rows import ByteRow, StepBytes
from workbench.decode.cache_bytes import CacheLoad, mixer_caches, target_caches
from workbench.decode.precision import Policy, TensorClass
from workbench.decode.spec import GQA, MLA, DFlash, GatedDelta, ModelSpec, Mtp
from workbench.decode.tensors import (
    REPLICATED,
    Part,
    WeightGroup,
    dflash_weights,
    draft_attention,
    mtp_weights,
    target_weights,
)
from workbench.errors import InputError

__all__ = ["ByteRow", "Drafter", "StepBytes", "distinct_experts", "draft_bytes", "step_bytes"]

Drafter = Literal["mtp", "dflash"]


@dataclass(frozen=True, slots=True)
class _Draft:
    """What is asked of a drafter, in the words of :func:`draft_bytes`."""

    drafts: int
    catch_up: int
    tp: int
    context: int
    batch: int
    replicated: Collection[TensorClass]


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """Return the expected number of experts that ``tokens`` tokens touch in one layer.

    E * (1 - (1 - k/E)^T): every token picks ``top_k`` of ``experts`` uniformly and on its own. Real routing is
    correlated between neighbouring tokens, so measured counts are lower; pass them to :func:`step_bytes`.
    """
    return experts * (1 - (1 - top_k / experts) ** tokens)


def share_of_one_token(share: float, tokens: int) -> float:
    """Return k/E where ``tokens`` tokens touch ``share`` of the experts by ``distinct_experts``: its inverse."""
    return float(1 - (1 - share) ** (1 / tokens))


def step_bytes(
    spec: ModelSpec,
    policy: Policy,
    *,
    tp: int = 1,
    width: int = 1,
    context: int = 0,
    batch: int = 1,
    distinct_experts: Sequence[float] | None = None,
    replicated: Collection[TensorClass] = REPLICATED,
) -> StepBytes:
    """Return what one of ``tp`` ranks reads to score ``width`` tokens of each of ``batch`` sequences.

    ``context`` is the number of positions each sequence already holds. ``distinct_experts`` replaces the uniform model
    by measured counts, one for each layer with routed experts. ``replicated`` names the classes that every rank holds
    whole; an empty collection is the ideal even split. Raises InputError where a size does not fit the model.
    """
    _check_sizes(spec, tp=tp, width=width, batch=batch, context=context)
    counts = _expert_counts(spec, width * batch, distinct_experts)
    rows: list[ByteRow] = []
    for group in target_weights(spec):
        reads = sum(counts) if group.cls is TensorClass.ROUTED_EXPERTS else float(group.copies)
        rows.append(_weights(group, "target", policy, tp, replicated, reads=reads, tokens=width * batch))
    rows += target_caches(spec, policy, CacheLoad("target", tp, width, batch, context))
    return StepBytes(
        model=spec.name,
        policy=policy.name,
        tp=tp,
        width=width,
        batch=batch,
        context=context,
        rows=tuple(rows),
        distinct=counts,
        tag="modelled" if distinct_experts is None else "estimated",
    )


def draft_bytes(
    spec: ModelSpec,
    policy: Policy,
    *,
    drafter: Drafter,
    drafts: int | None = None,
    catch_up: int = 1,
    tp: int = 1,
    context: int = 0,
    batch: int = 1,
    replicated: Collection[TensorClass] = REPLICATED,
) -> StepBytes:
    """Return what one rank reads to propose ``drafts`` tokens for each sequence; ``width`` of the result is ``drafts``.

    ``mtp`` runs one pass a token (default: as many as there are modules), the first one over the ``catch_up`` tokens
    that the last step committed. ``dflash`` runs one pass over a block of ``drafts + 1`` (default: the trained block)
    after projecting the features of ``catch_up`` tokens. Every pass reads the target's head.
    """
    _check_sizes(spec, tp=tp, width=1, batch=batch, context=context, drafts=drafts, catch_up=catch_up)
    if drafter == "mtp":
        if spec.mtp is None:
            raise InputError(f"{spec.name}: has no mtp section", hint="choose another drafter")
        ask = _Draft(drafts or spec.mtp.modules, catch_up, tp, context, batch, replicated)
        rows = _mtp_rows(spec, spec.mtp, policy, ask)
    else:
        if spec.dflash is None:
            raise InputError(f"{spec.name}: has no dflash section", hint="choose another drafter")
        ask = _Draft(drafts or spec.dflash.block - 1, catch_up, tp, context, batch, replicated)
        rows = _dflash_rows(spec, spec.dflash, policy, ask)
    return StepBytes(
        model=spec.name, policy=policy.name, tp=tp, width=ask.drafts, batch=batch, context=context, rows=tuple(rows)
    )


def _mtp_rows(spec: ModelSpec, mtp: Mtp, policy: Policy, ask: _Draft) -> list[ByteRow]:
    fed = ask.batch * (ask.catch_up + ask.drafts - 1)  # tokens over all passes
    rows: list[ByteRow] = []
    for group in mtp_weights(spec):
        # groups hold all modules; a pass runs one of them
        reads, tokens = group.copies * ask.drafts / mtp.modules, fed / mtp.modules
        if group.cls is TensorClass.EMBEDDING:
            tokens = fed
        elif group.cls is TensorClass.HEAD:  # shared by the modules; scores one token a sequence and pass
            reads, tokens = ask.drafts, ask.batch * ask.drafts
        elif group.cls is TensorClass.ROUTED_EXPERTS and spec.moe is not None:
            first = distinct_experts(spec.moe.experts, spec.moe.top_k, ask.batch * ask.catch_up)
            later = distinct_experts(spec.moe.experts, spec.moe.top_k, ask.batch)
            reads = first + later * (ask.drafts - 1)
        rows.append(_weights(group, "mtp", policy, ask.tp, ask.replicated, reads=reads, tokens=tokens))
    load = CacheLoad("mtp", ask.tp, 1, ask.batch, ask.context, passes=ask.drafts)
    return rows + mixer_caches(spec.sliding or spec.attention, policy, load, layers=1, window=spec.window)


def _dflash_rows(spec: ModelSpec, drafter: DFlash, policy: Policy, ask: _Draft) -> list[ByteRow]:
    if ask.drafts >= drafter.block:
        raise InputError(
            f"drafts={ask.drafts}: {spec.name}'s block of {drafter.block} proposes at most {drafter.block - 1}"
        )
    shape = draft_attention(spec)
    _check_heads(spec.name, "dflash", shape, ask.tp)
    block = ask.batch * (ask.drafts + 1)
    rows: list[ByteRow] = []
    for group in dflash_weights(spec):
        # the joint sees the features of newly committed tokens, all else the block
        tokens = ask.batch * ask.catch_up if group.cls is TensorClass.DFLASH_PROJ else block
        rows.append(_weights(group, "dflash", policy, ask.tp, ask.replicated, reads=group.copies, tokens=tokens))
    load = CacheLoad("dflash", ask.tp, ask.drafts + 1, ask.batch, ask.context)
    return rows + mixer_caches(shape, policy, load, layers=drafter.layers, window=drafter.window)


def _weights(
    group: WeightGroup,
    part: Part,
    policy: Policy,
    tp: int,
    replicated: Collection[TensorClass],
    *,
    reads: float,
    tokens: float,
) -> ByteRow:
    """Return the row of a group of which ``reads`` copies are read while ``tokens`` tokens pass its active ones."""
    parts = group.parts(tp, replicated)
    unit = group.unit_bytes(policy)
    if group.cls is TensorClass.EMBEDDING:  # a lookup: one row a token, held by one of the ranks
        reads = tokens / group.matrices[0][0]
    return ByteRow(
        name=group.name,
        cls=group.cls,
        part=part,
        format=policy.of(group.cls).name,
        tp=tp,
        parts=parts,
        params=group.params,
        active_params=group.active_params,
        stored_bytes=float(unit * group.copies) if group.stored else 0.0,
        read_bytes=reads * unit / parts,
        written_bytes=0.0,
        flops=2 * group.active_matrix_params * tokens / parts,
    )


def _expert_counts(spec: ModelSpec, tokens: int, measured: Sequence[float] | None) -> tuple[float, ...]:
    if spec.moe is None:
        if measured:
            raise InputError(f"distinct_experts: {spec.name} has no routed experts", hint="leave it out")
        return ()
    if measured is None:
        return (distinct_experts(spec.moe.experts, spec.moe.top_k, tokens),) * spec.moe_layers
    if len(measured) != spec.moe_layers:
        raise InputError(
            f"distinct_experts: {len(measured)} counts given, {spec.name} has {spec.moe_layers} layers with experts"
        )
    low, high = spec.moe.top_k, min(spec.moe.experts, spec.moe.top_k * tokens)
    for layer, count in enumerate(measured):
        if not low <= count <= high:
            raise InputError(f"distinct_experts: {count} in layer {layer} is outside {low}..{high} for {tokens} tokens")
    return tuple(float(count) for count in measured)


def _check_sizes(spec: ModelSpec, *, context: int, drafts: int | None = None, **positive: int) -> None:
    if drafts is not None:
        positive["drafts"] = drafts
    for name, value in positive.items():
        if value < 1:
            raise InputError(f"{name}={value}: must be 1 or more")
    if not 0 <= context <= spec.max_positions:
        raise InputError(f"context={context}: {spec.name} holds 0 to {spec.max_positions} positions")
    for mixer in dict.fromkeys(spec.mixers):
        shape = spec.mixer_spec(spec.mixers.index(mixer))
        _check_heads(spec.name, mixer, shape, positive["tp"])


def _check_heads(model: str, layers: str, shape: GQA | MLA | GatedDelta, tp: int) -> None:
    """Refuse a split that no engine could load: query heads divide evenly, KV heads divide or repeat evenly."""
    heads = shape.v_heads if isinstance(shape, GatedDelta) else shape.heads
    shared = shape.kv_heads if isinstance(shape, GQA) else shape.k_heads if isinstance(shape, GatedDelta) else None
    if heads % tp or (shared is not None and shared % tp and tp % shared):
        among = "" if shared is None else f" over {shared} key heads"
        raise InputError(
            f"tp={tp}: {model}'s {layers} attention has {heads} heads{among}", hint="choose a divisor of the heads"
        )

"""Split-KV decode attention for GQA: 1 to 16 query tokens of one sequence, full or sliding window, optional sinks.

Reference (fp32): for query token t of head h (KV head h // group), position p_t = kv_len - T + t, keys at positions
k with k <= p_t (causal) and k > p_t - window: ``softmax(scale * q . k, with sink[h] as one more logit) @ v``. A sink
takes part in the denominator only (gpt-oss). ``causal=False`` lets every query see all kv_len keys (the tokens of a
DFlash block), still within the window.

Shapes: q bf16[T, H, Dk]; k bf16[KV, capacity, Dk], v bf16[KV, capacity, Dv], the T new positions already written;
kv_len int32[1] on the device, so that a captured graph follows the growing context. Out bf16[T, H, Dv].
Byte floor: the visible positions' keys and values once, 2 (Dk + Dv) KV bytes each. Instruction floor: the products
run on the tensor core in tiles of 16 rows; per visible (row, key): scale, mask, max, exp2, sum, convert, about 8.

One program handles one KV head and one part of the context, with all group x T query rows as the tile's rows, so
keys are read once for every query. The last part to arrive merges the parts and adds the sink, or a second launch does
(``AttentionConfig.merge``).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.matmul import dot_bf16
from workbench.kernels.merge import Merge, default_merge, merge_parts
from workbench.kernels.overlap import wait_for_previous
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """``splits`` programs share one KV head's context (0: by rule); ``block`` keys a loop turn.

    ``merge``: the last part to arrive joins the parts, or a launch of its own does (merge.py).
    """

    splits: int = 0
    block: int = 64
    num_warps: int = 4
    num_stages: int = 2
    merge: Merge = "last"


SPACE = (
    AttentionConfig(block=128),
    AttentionConfig(block=128, merge="launch"),
    AttentionConfig(merge="launch"),
    AttentionConfig(block=32, merge="launch"),
    AttentionConfig(block=128, splits=8),
    AttentionConfig(block=64, splits=32, merge="launch"),
    AttentionConfig(),
    AttentionConfig(block=32),
)


def default_config(rows: int, dk: int, dv: int) -> AttentionConfig:
    """Choose by rule, from what docs/kernels.md measured, for ``rows`` query rows a KV head.

    128 keys a turn for up to 16 rows of short heads (longer ones would not leave room in shared memory), 64 up to 64
    rows, 32 beyond.
    """
    if rows <= 16:
        return AttentionConfig(block=128 if dk + dv <= 128 else 64)
    return AttentionConfig(block=64 if rows <= 64 else 32, num_warps=4 if rows <= 64 else 8)


def default_splits(kv_heads: int, reach: int, block: int, sms: int = 132) -> int:
    """One program an SM, but at least two blocks of keys each; ``reach`` = most positions one query can see."""
    return max(1, min(sms // kv_heads, -(-reach // (2 * block))))


@triton.jit
def merge_step(scores, m, l_sum):
    """Online softmax in base 2: return (probabilities, rescale factor, new max, new sum)."""
    m_new = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - safe[:, None])
    alpha = tl.exp2(m - safe)
    return p, alpha, m_new, l_sum * alpha + tl.sum(p, 1)


@triton.jit
def gqa_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    kv_len_ptr,
    sink_ptr,
    o_ptr,
    partial_ptr,
    counter_ptr,
    capacity,
    window,
    scale_log2,
    T: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DK_A: tl.constexpr,
    DK_B: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    FUSED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(0)
    part = tl.program_id(1)
    wait_for_previous(OVERLAP)
    kv_len = tl.load(kv_len_ptr)
    row = tl.arange(0, ROWS)  # row = token * GROUP + member of the group
    row_ok = row < T * GROUP
    position = kv_len - T + row // GROUP
    q_at = q_ptr + ((row // GROUP * KV_HEADS + head) * GROUP + row % GROUP)[:, None] * DK
    da = tl.arange(0, DK_A)
    q_a = tl.load(q_at + da[None, :], mask=row_ok[:, None], other=0.0)
    if DK_B > 0:
        db = tl.arange(0, DK_B)
        q_b = tl.load(q_at + DK_A + db[None, :], mask=row_ok[:, None], other=0.0)
    dv = tl.arange(0, DV)
    low = 0
    if WINDOWED:
        low = tl.maximum(kv_len - T + 1 - window, 0)
    share = tl.cdiv(tl.cdiv(kv_len - low, SPLITS), BLOCK) * BLOCK
    start = low + part * share
    end = tl.minimum(start + share, kv_len)
    k_head = k_ptr + head.to(tl.int64) * capacity * DK
    v_head = v_ptr + head.to(tl.int64) * capacity * DV

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DV), tl.float32)
    for first in range(start, end, BLOCK):
        key = first + tl.arange(0, BLOCK)
        key_ok = key < end
        k_a = tl.load(k_head + key[None, :] * DK + da[:, None], mask=key_ok[None, :], other=0.0)
        scores = dot_bf16(q_a, k_a)
        if DK_B > 0:
            k_b = tl.load(k_head + key[None, :] * DK + DK_A + db[:, None], mask=key_ok[None, :], other=0.0)
            scores += dot_bf16(q_b, k_b)
        visible = key_ok[None, :] & row_ok[:, None]
        if CAUSAL:
            visible &= key[None, :] <= position[:, None]
        if WINDOWED:
            visible &= key[None, :] > position[:, None] - window
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        p, alpha, m, l_sum = merge_step(scores, m, l_sum)
        v = tl.load(v_head + key[:, None] * DV + dv[None, :], mask=key_ok[:, None], other=0.0)
        acc = acc * alpha[:, None] + dot_bf16(p.to(tl.bfloat16), v)

    if SPLITS > 1:
        slot = (head * SPLITS + part) * ROWS + row
        stats = partial_ptr + KV_HEADS * SPLITS * ROWS * DV
        tl.store(partial_ptr + slot[:, None] * DV + dv[None, :], acc, mask=row_ok[:, None])
        tl.store(stats + slot * 2, m, mask=row_ok)
        tl.store(stats + slot * 2 + 1, l_sum, mask=row_ok)
        if FUSED:
            if not arrive(counter_ptr + head, SPLITS):
                return
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            for other in range(SPLITS):
                at = (head * SPLITS + other) * ROWS + row
                m = tl.maximum(m, tl.load(stats + at * 2, mask=row_ok, other=float("-inf"), cache_modifier=".cg"))
            safe = tl.where(m == float("-inf"), 0.0, m)
            l_sum = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, DV), tl.float32)
            for other in range(SPLITS):
                at = (head * SPLITS + other) * ROWS + row
                m_other = tl.load(stats + at * 2, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
                l_other = tl.load(stats + at * 2 + 1, mask=row_ok, other=0.0, cache_modifier=".cg")
                alpha = tl.exp2(m_other - safe)
                l_sum += l_other * alpha
                some = tl.load(
                    partial_ptr + at[:, None] * DV + dv[None, :], mask=row_ok[:, None], other=0.0, cache_modifier=".cg"
                )
                acc += some * alpha[:, None]
    if FUSED:
        if SINKS:
            sink = tl.load(sink_ptr + head * GROUP + row % GROUP, mask=row_ok, other=0.0).to(tl.float32)
            sink = sink * 1.4426950408889634
            m_all = tl.maximum(m, sink)
            shrink = tl.exp2(m - m_all)
            acc *= shrink[:, None]
            l_sum = l_sum * shrink + tl.exp2(sink - m_all)
        out = acc / tl.where(l_sum == 0.0, 1.0, l_sum)[:, None]
        o_at = o_ptr + ((row // GROUP * KV_HEADS + head) * GROUP + row % GROUP)[:, None] * DV + dv[None, :]
        tl.store(o_at, out.to(tl.bfloat16), mask=row_ok[:, None])


def floor(tokens: int, heads: int, kv_heads: int, dk: int, dv: int, visible: int) -> Floor:
    """Return the floor with ``visible`` positions in reach of the queries (window applied)."""
    read = 2 * kv_heads * visible * (dk + dv) + 2 * tokens * heads * dk
    return Floor(read, 2 * tokens * heads * dv, 8 * tokens * heads * visible)


def gqa_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: AttentionConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return the attention output, bf16[T, H, Dv]; see the module text for the arguments' shapes.

    ``window`` counts the query's own position; ``sinks`` bf16 or fp32[H] are logits after ``scale``. Dk is a power
    of two from 16 to 256, or 192 (MiMo). ``overlap``: overlap.py. Raises InputError before launch for anything else.
    """
    kernel = "gqa_decode"
    expect(kernel, "q", q, torch.bfloat16, (None, None, None))
    tokens, heads, dk = q.shape
    expect(kernel, "k", k, torch.bfloat16, (None, None, dk), device=q.device)
    kv_heads, capacity, _ = k.shape
    expect(kernel, "v", v, torch.bfloat16, (kv_heads, capacity, None), device=q.device)
    dv = v.shape[2]
    expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=q.device)
    require(kernel, 1 <= tokens <= 16, f"q holds {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, heads % kv_heads == 0, f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    dk_a, dk_b = (128, 64) if dk == 192 else (dk, 0)
    require(kernel, dk_a == power_of_2(dk_a) and 16 <= dk_a <= 256, f"head size {dk} is neither a power of two nor 192")
    require(kernel, dv == power_of_2(dv) and 16 <= dv <= 256, f"value size {dv} is not a power of two from 16 to 256")
    require(kernel, window is None or window >= 1, f"window={window} must be at least 1")
    group = heads // kv_heads
    rows = max(16, power_of_2(tokens * group))
    require(kernel, rows <= 256, f"{tokens} tokens x {group} heads a group is {rows} rows, the kernel takes up to 256")
    if sinks is not None:
        expect(kernel, "sinks", sinks, (torch.bfloat16, torch.float32), (heads,), device=q.device)
    by_rule = config is None
    config = config or default_config(rows, dk, dv)
    reach = capacity if window is None else min(capacity, window + tokens - 1)
    splits = config.splits or default_splits(kv_heads, reach, config.block)
    if by_rule:
        config = replace(config, merge=default_merge(splits))
    if out is None:
        out = torch.empty(tokens, heads, dv, dtype=torch.bfloat16, device=q.device)
    expect(kernel, "out", out, torch.bfloat16, (tokens, heads, dv), device=q.device)
    partial, counters = (out, kv_len)
    if splits > 1:
        workspace = workspace or Workspace(q.device)
        partial, counters = workspace.take(kernel, kv_heads * splits * rows * (dv + 2), kv_heads)
    fused = splits == 1 or config.merge == "last"
    gqa_kernel[(kv_heads, splits)](
        q, k, v, kv_len, q if sinks is None else sinks, out, partial, counters, capacity, window or 0,
        scale * 1.4426950408889634, T=tokens, KV_HEADS=kv_heads, GROUP=group, DK=dk, DK_A=dk_a, DK_B=dk_b, DV=dv,
        ROWS=rows, SPLITS=splits, BLOCK=config.block, CAUSAL=causal, WINDOWED=window is not None,
        SINKS=sinks is not None, FUSED=fused, OVERLAP=overlap, launch_pdl=overlap, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    if not fused:
        merge_parts(
            partial, sinks, out, tokens=tokens, kv_heads=kv_heads, group=group, blocks=kv_heads, rows=rows,
            splits=splits, overlap=overlap,
        )  # fmt: skip
    return out

"""MLA decode in the absorbed form (DeepSeek-V2, arXiv 2405.04434): every head attends to one shared latent.

Reference (fp32): with latent c[k] (``rank`` numbers) and rotary key r[k] (``rope`` numbers) of each position k <= p_t,
``p = softmax(scale * (q_latent . c[k] + q_rope . r[k]))`` and ``out = sum_k p_k c[k]``. The up-projections of keys
and values are absorbed into q and the output projection outside.

Shapes: q bf16[T, H, rank + rope], latent part first; cache bf16[capacity, rank + rope]; kv_len int32[1] on the
device; out bf16[T, H, rank]. ``indices`` int32[T, K] limits each query to chosen positions (DSA top-k; -1 = none).
Byte floor: 2 (rank + rope) bytes a visible position, once for all heads. Instruction floor as for GQA.

The latent tile is key and value at once, loaded once. Heads (times tokens) are cut into row blocks of 16, context
into ``splits``; the last part to arrive merges, or a second launch (``MlaConfig.merge``).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803, N806

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.attention import merge_step
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.matmul import dot_bf16
from workbench.kernels.merge import Merge, default_merge, merge_parts
from workbench.kernels.overlap import wait_for_previous
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """``splits`` programs share the context of one row block (0: by rule); ``block`` positions a loop turn.

    ``merge``: the last part to arrive joins the parts, or a launch of its own does (merge.py). 64 positions, because
    the rule then makes half as many parts to join as with 32. Where no config is given, merge.py's rule chooses.
    """

    splits: int = 0
    block: int = 64
    num_warps: int = 4
    num_stages: int = 2
    merge: Merge = "last"


SPACE = (
    MlaConfig(),
    MlaConfig(merge="launch"),
    MlaConfig(block=32, merge="launch"),
    MlaConfig(splits=32),
    MlaConfig(num_warps=8, merge="launch"),
    MlaConfig(num_warps=8),
    MlaConfig(splits=24),
    MlaConfig(block=32),
)


@triton.jit
def mla_kernel(
    q_ptr,
    cache_ptr,
    kv_len_ptr,
    indices_ptr,
    o_ptr,
    partial_ptr,
    counter_ptr,
    scale_log2,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    FUSED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    group = tl.program_id(0)
    part = tl.program_id(1)
    wait_for_previous(OVERLAP)
    kv_len = tl.load(kv_len_ptr)
    WIDTH: tl.constexpr = RANK + ROPE
    if TOPK > 0:  # every row of a program is of one token: its index list is the program's
        token = group // tl.cdiv(HEADS, ROWS)
        head = group % tl.cdiv(HEADS, ROWS) * ROWS + tl.arange(0, ROWS)
        row_ok = head < HEADS
        row = token * HEADS + head
        total = TOPK
    else:
        token = 0
        row = group * ROWS + tl.arange(0, ROWS)
        row_ok = row < T * HEADS
        total = kv_len
    position = kv_len - T + row // HEADS
    dl = tl.arange(0, RANK)
    dr = tl.arange(0, ROPE)
    q_at = q_ptr + row[:, None] * WIDTH
    q_latent = tl.load(q_at + dl[None, :], mask=row_ok[:, None], other=0.0)
    q_rope = tl.load(q_at + RANK + dr[None, :], mask=row_ok[:, None], other=0.0)
    share = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK) * BLOCK
    start = part * share
    end = tl.minimum(start + share, total)

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(start, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        key_ok = index < end
        if TOPK > 0:
            key = tl.load(indices_ptr + token * TOPK + index, mask=key_ok, other=-1)
            key_ok = key >= 0
            key = tl.maximum(key, 0)
        else:
            key = index
        at = cache_ptr + key.to(tl.int64)[:, None] * WIDTH
        latent = tl.load(at + dl[None, :], mask=key_ok[:, None], other=0.0)
        rope = tl.load(at + RANK + dr[None, :], mask=key_ok[:, None], other=0.0)
        scores = dot_bf16(q_latent, latent.trans(1, 0)) + dot_bf16(q_rope, rope.trans(1, 0))
        visible = key_ok[None, :] & row_ok[:, None] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        p, alpha, m, l_sum = merge_step(scores, m, l_sum)
        acc = acc * alpha[:, None] + dot_bf16(p.to(tl.bfloat16), latent)

    if SPLITS > 1:
        slot = (group * SPLITS + part) * ROWS + tl.arange(0, ROWS)
        stats = partial_ptr + tl.num_programs(0) * SPLITS * ROWS * RANK
        tl.store(partial_ptr + slot[:, None] * RANK + dl[None, :], acc, mask=row_ok[:, None])
        tl.store(stats + slot * 2, m, mask=row_ok)
        tl.store(stats + slot * 2 + 1, l_sum, mask=row_ok)
        if FUSED:
            if not arrive(counter_ptr + group, SPLITS):
                return
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            for other in range(SPLITS):
                at_other = (group * SPLITS + other) * ROWS + tl.arange(0, ROWS)
                m = tl.maximum(m, tl.load(stats + at_other * 2, mask=row_ok, other=float("-inf"), cache_modifier=".cg"))
            safe = tl.where(m == float("-inf"), 0.0, m)
            l_sum = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, RANK), tl.float32)
            for other in range(SPLITS):
                at_other = (group * SPLITS + other) * ROWS + tl.arange(0, ROWS)
                m_other = tl.load(stats + at_other * 2, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
                l_other = tl.load(stats + at_other * 2 + 1, mask=row_ok, other=0.0, cache_modifier=".cg")
                alpha = tl.exp2(m_other - safe)
                l_sum += l_other * alpha
                some_at = partial_ptr + at_other[:, None] * RANK + dl[None, :]
                acc += tl.load(some_at, mask=row_ok[:, None], other=0.0, cache_modifier=".cg") * alpha[:, None]
    if FUSED:
        out = acc / tl.where(l_sum == 0.0, 1.0, l_sum)[:, None]
        tl.store(o_ptr + row[:, None] * RANK + dl[None, :], out.to(tl.bfloat16), mask=row_ok[:, None])


def floor(tokens: int, heads: int, rank: int, rope: int, visible: int) -> Floor:
    """Return the floor with ``visible`` positions in reach (the union over tokens where they are chosen)."""
    read = 2 * visible * (rank + rope) + 2 * tokens * heads * (rank + rope)
    return Floor(read, 2 * tokens * heads * rank, 8 * tokens * heads * visible)


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    rank: int,
    scale: float,
    indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: MlaConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return the latent output, bf16[T, H, rank]; see the module text for the arguments' shapes.

    ``rank`` and the rotary part are powers of two of at least 16. ``overlap``: overlap.py.
    Raises InputError before launch for anything else.
    """
    kernel = "mla_decode"
    expect(kernel, "q", q, torch.bfloat16, (None, None, None))
    tokens, heads, width = q.shape
    expect(kernel, "cache", cache, torch.bfloat16, (None, width), device=q.device)
    expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=q.device)
    require(kernel, 1 <= tokens <= 16, f"q holds {tokens} tokens, the kernel takes 1 to 16")
    rope = width - rank
    for name, extent in (("rank", rank), ("rope", rope)):
        require(kernel, extent >= 16 and extent == power_of_2(extent), f"{name}={extent} is not a power of two >= 16")
    require(kernel, rank <= 512, f"rank={rank}, the kernel takes up to 512")
    top_k = 0
    if indices is not None:
        expect(kernel, "indices", indices, torch.int32, (tokens, None), device=q.device)
        top_k = indices.shape[1]
    by_rule = config is None
    config = config or MlaConfig()
    rows = 16
    groups = -(-tokens * heads // rows) if top_k == 0 else tokens * -(-heads // rows)
    reach = top_k or cache.shape[0]
    splits = config.splits or max(1, min(132 // groups, -(-reach // (2 * config.block))))
    if by_rule:
        config = replace(config, merge=default_merge(splits))
    if out is None:
        out = torch.empty(tokens, heads, rank, dtype=torch.bfloat16, device=q.device)
    expect(kernel, "out", out, torch.bfloat16, (tokens, heads, rank), device=q.device)
    partial, counters = (out, kv_len)
    if splits > 1:
        workspace = workspace or Workspace(q.device)
        partial, counters = workspace.take(kernel, groups * splits * rows * (rank + 2), groups)
    fused = splits == 1 or config.merge == "last"
    mla_kernel[(groups, splits)](
        q, cache, kv_len, kv_len if indices is None else indices, out, partial, counters, scale * 1.4426950408889634,
        T=tokens, HEADS=heads, RANK=rank, ROPE=rope, ROWS=rows, SPLITS=splits, BLOCK=config.block, TOPK=top_k,
        FUSED=fused, OVERLAP=overlap, launch_pdl=overlap, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if not fused:
        merge_parts(
            partial, None, out, tokens=tokens, heads=heads, per_token=top_k > 0, blocks=groups, rows=rows,
            splits=splits, overlap=overlap,
        )  # fmt: skip
    return out

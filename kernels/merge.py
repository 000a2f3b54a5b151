"""Joining the parts of split attention in a launch of its own: the other way than the last part to arrive.

A part leaves its rescaled sum of values (fp32[rows, D]), its maximum (base 2) and its denominator a row; reference:
``sum_p 2^(m_p - m) acc_p / sum_p 2^(m_p - m) l_p``, the sink one more term of the denominator.

Byte floor: the parts once (L2), the output once. Every row and column block has a program, and every program asks for
all its parts at once; the last part to arrive reads them one after another on one SM, an L2 latency each.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from typing import Literal

import torch
import triton
import triton.language as tl

from workbench.kernels.contract import power_of_2
from workbench.kernels.overlap import wait_for_previous

Merge = Literal["last", "launch"]

#: Columns a program merges.
COLUMNS = 32


def default_merge(splits: int) -> Merge:
    """Choose by rule: a second launch costs about 2 µs, reading one part after another about 0.6 µs each."""
    return "launch" if splits > 4 else "last"


@triton.jit
def merge_kernel(
    partial_ptr,
    sink_ptr,
    o_ptr,
    T: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    S_WIDE: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0) // ROWS
    member = tl.program_id(0) % ROWS
    if GROUP > 0:  # GQA: blocks are KV heads, rows are (token, query head of the group)
        row = (member // GROUP * KV_HEADS + block) * GROUP + member % GROUP
        ok = member < T * GROUP
    elif PER_TOKEN:  # MLA with chosen positions: a block is of one token
        per_token: tl.constexpr = (HEADS + ROWS - 1) // ROWS
        head = block % per_token * ROWS + member
        row = block // per_token * HEADS + head
        ok = head < HEADS
    else:
        row = block * ROWS + member
        ok = row < T * HEADS
    part = tl.arange(0, S_WIDE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_previous(OVERLAP)
    if ok:
        there = part < SPLITS
        slot = (block * SPLITS + part) * ROWS + member
        stats = partial_ptr + tl.num_programs(0).to(tl.int64) * SPLITS * D
        m = tl.load(stats + slot * 2, mask=there, other=float("-inf"))
        l_part = tl.load(stats + slot * 2 + 1, mask=there, other=0.0)
        at = partial_ptr + slot[:, None].to(tl.int64) * D + column[None, :]
        values = tl.load(at, mask=there[:, None] & (column < D)[None, :], other=0.0)
        top = tl.max(m, 0)
        if SINKS:
            sink = tl.load(sink_ptr + block * GROUP + member % GROUP).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        factor = tl.exp2(m - top)
        total = tl.sum(l_part * factor, 0)
        if SINKS:
            total += tl.exp2(sink - top)
        out = tl.sum(values * factor[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        tl.store(o_ptr + row.to(tl.int64) * D + column, out.to(tl.bfloat16), mask=column < D)


def merge_parts(
    partial: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    tokens: int,
    kv_heads: int = 0,
    group: int = 0,
    heads: int = 0,
    per_token: bool = False,
    blocks: int,
    rows: int,
    splits: int,
    overlap: bool,
) -> None:
    """Join what ``blocks`` x ``splits`` programs left in ``partial``: ``rows`` x D sums each, all (maximum,
    denominator) pairs behind them. ``group`` > 0 orders rows as gqa_decode does, else as mla_decode."""
    width = out.shape[-1]
    merge_kernel[(blocks * rows, -(-width // COLUMNS))](
        partial, out if sinks is None else sinks, out, T=tokens, KV_HEADS=kv_heads, GROUP=group, HEADS=heads,
        PER_TOKEN=per_token, ROWS=rows, SPLITS=splits, S_WIDE=power_of_2(splits), D=width, COLUMNS=COLUMNS,
        SINKS=sinks is not None, OVERLAP=overlap, launch_pdl=overlap, num_warps=4, num_stages=1,
    )  # fmt: skip

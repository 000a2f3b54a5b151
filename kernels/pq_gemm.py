"""FP8 product with the activation quantised in the prologue: once a program, kept on chip, then reused for many rows.

The fourth form of live quantisation (live_quant.py). The naive fusion quantises x again for every block of rows, with
max, divide and convert between every load and its MMA. Here a program owns a slice of K: it quantises that slice of x
once, keeps the e4m3 operand and its scales on chip, and then walks over blocks of rows with nothing but loads, MMAs and
one scale in its loop. It is what GLM-5.2's authors call PQ-GEMM, without their clusters: each walker quantises for
itself, since Triton shares no memory between programs.

Reference and shapes: as in live_quant.py. Byte floor: the same as its fused form. Instruction floor: 6 an element of x
for every walker, then 1/16 MMA + 1/16 load a weight.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.e4m3 import GROUP, group_scale, to_e4m3
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class PqConfig:
    """``block`` weight rows a turn (a divisor of 128); a program's slice of K is ``groups`` groups of 128 columns.

    ``walkers`` programs share the rows of one slice (0: about two programs a multiprocessor in all). ``groups`` is 1,
    2 or 4: the quantised slice lives in registers.
    """

    block: int = 32
    groups: int = 2
    walkers: int = 0
    num_warps: int = 4
    num_stages: int = 3


SPACE = tuple(
    PqConfig(block, groups, 0, warps, stages)
    for block, warps in ((32, 4), (64, 4))
    for groups in (1, 2, 4)
    for stages in (2, 3)
)


@triton.jit
def pq_gemm_kernel(
    w_ptr,
    w_scale_ptr,
    x_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    columns,
    blocks,
    T: tl.constexpr,
    TM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUPS: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    walker = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.arange(0, TM)
    k = tl.arange(0, 128)
    group = part * GROUPS + tl.arange(0, GROUPS)
    here = group < columns // 128
    x_at = x_ptr + token[None, :, None] * columns + group[:, None, None] * 128 + k[None, None, :]
    x = tl.load(x_at, mask=here[:, None, None] & (token < T)[None, :, None], other=0.0).to(tl.float32)
    scale = group_scale(tl.max(tl.abs(x), 2), POWER_OF_2)
    q = to_e4m3(tl.minimum(tl.maximum(x / scale[:, :, None], -448.0), 448.0))
    w_at = w_ptr + group[:, None, None] * 128 + k[None, :, None]
    for block in range(walker, blocks, tl.num_programs(0)):
        row = block * BLOCK + tl.arange(0, BLOCK)
        ok_w = here[:, None, None] & (row < rows)[None, None, :]
        w = tl.load(w_at + row.to(tl.int64)[None, None, :] * columns, mask=ok_w, other=0.0)
        w_scale = tl.load(w_scale_ptr + block * BLOCK // 128 * (columns // 128) + group, mask=here, other=0.0)
        acc = tl.sum(tl.dot(q, w) * (scale * w_scale[:, None])[:, :, None], 0)
        at = token[:, None] * rows + row[None, :]
        ok = (token < T)[:, None] & (row < rows)[None, :]
        last = True
        if SPLIT > 1:
            tl.store(partial_ptr + part * T * rows + at, acc, mask=ok)
            last = arrive(counter_ptr + block, SPLIT)
        if last:
            if SPLIT > 1:
                acc = tl.zeros((TM, BLOCK), tl.float32)
                for other in range(SPLIT):
                    acc += tl.load(partial_ptr + other * T * rows + at, mask=ok, other=0.0, cache_modifier=".cg")
            if BIAS:
                acc += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
            if RESIDUAL:
                acc += tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
            tl.store(y_ptr + at, acc.to(tl.bfloat16), mask=ok)


def default_config(columns: int) -> PqConfig:
    """Choose by rule: slices of two groups, or of one where K is so short that few programs would share it."""
    return PqConfig(groups=2 if columns // GROUP >= 8 else 1)


def pq_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    power_of_2_scales: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor,
    workspace: Workspace | None = None,
    config: PqConfig | None = None,
    sms: int = 132,
) -> torch.Tensor:
    """Fill and return ``out`` bf16[T, N]; the other arguments as ``live_quant_gemm``, which checks the shapes.

    Raises InputError before launch for a config that does not fit.
    """
    kernel = "pq_gemm"
    expect(kernel, "x", x, torch.bfloat16, (None, w.shape[1]), device=w.device)
    (tokens, columns), rows = x.shape, len(w)
    config = config or default_config(columns)
    require(kernel, config.block in (16, 32, 64, 128), f"config.block={config.block} is not 16, 32, 64 or 128")
    require(kernel, config.groups in (1, 2, 4), f"config.groups={config.groups} is not 1, 2 or 4")
    split, blocks = -(-(columns // GROUP) // config.groups), -(-rows // config.block)
    walkers = min(blocks, config.walkers or max(1, 2 * sms // split))
    partial, counters = out, out
    if split > 1:
        workspace = workspace or Workspace(x.device)
        partial, counters = workspace.take(kernel, split * tokens * rows, blocks)
    pq_gemm_kernel[(walkers, split)](
        w, w_scales, x, x if bias is None else bias, x if residual is None else residual, out, partial, counters, rows,
        columns, blocks, T=tokens, TM=max(16, power_of_2(tokens)), BLOCK=config.block, SPLIT=split,
        GROUPS=config.groups, POWER_OF_2=power_of_2_scales, BIAS=bias is not None, RESIDUAL=residual is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out

"""Live FP8 quantisation of activations in front of an FP8 product, in four forms that compute the same numbers.

Reference (fp32): x is quantised by groups of 128 columns (e4m3.py), then ``y = (q * scale) @ dequantised(W).T``.

- ``separate``: one launch writes q and scales, the skinny FP8 product reads them. Two launches, one trip of x through
  device memory, but the product is the fast one.
- ``naive``: the textbook fusion. Every program quantises its 16 x 128 tile of x inside the K loop, one program a row
  block, K not split: few programs, and in each of them max, divide and convert stand between the loads and the MMA.
- ``fused``: the same loop with K split over programs, so that the quantisation of one program hides behind the
  weight loads of the others on its SM.
- ``pq``: quantise in the prologue (pq_gemm.py). A program owns a slice of K, quantises its part of x once, keeps it on
  chip and walks over the row blocks: no quantisation stands in the loop, and x is quantised once a walker.

The story to reproduce in kind (GLM-5.2 on B300, its authors' figures): 53 µs separate, 127 µs naive, 37 µs at
Split-K = 16. Shapes: x bf16[T, K], W e4m3[N, K], w_scales fp32[ceil(N/128), K/128], y bf16[T, N].
Byte floor: W, its scales and x once, y once; ``separate`` adds q and scales, written and read. Instruction floor a
weight: 1/16 MMA + 1/16 load, plus 6 per element of x for every row block that quantises it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.e4m3 import GROUP, group_scale, quantise_groups, to_e4m3
from workbench.kernels.floor import Floor
from workbench.kernels.pq_gemm import PqConfig, pq_gemm
from workbench.kernels.skinny_gemm import SkinnyConfig, skinny_fp8
from workbench.kernels.workspace import Workspace

Form = Literal["separate", "naive", "fused", "pq"]
FORMS: tuple[Form, ...] = ("separate", "naive", "fused", "pq")


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """``block`` weight rows a program (a divisor of 128), K over ``split`` programs."""

    block: int = 64
    split: int = 1
    num_warps: int = 4
    num_stages: int = 3


NAIVE = FusedConfig()
SPACE = tuple(
    FusedConfig(block, split, warps, stages)
    for block, warps in ((32, 2), (64, 4))
    for split in (4, 8, 16)
    for stages in (2, 3)
)


def default_split(rows: int, groups: int, block: int, sms: int = 132) -> int:
    """Split K until there are four programs an SM or a program has two groups left."""
    split = 1
    while -(-rows // block) * split < 4 * sms and groups >= 4 * split:
        split *= 2
    return split


@triton.jit
def quantise_kernel(x_ptr, q_ptr, scale_ptr, total, GROUPS: tl.constexpr, POWER_OF_2: tl.constexpr):
    first = tl.program_id(0) * GROUPS
    at = first * 128 + tl.arange(0, GROUPS * 128)
    x = tl.load(x_ptr + at, mask=at < total * 128, other=0.0).to(tl.float32)
    q, scale = quantise_groups(x, GROUPS, POWER_OF_2)
    tl.store(q_ptr + at, q.reshape(GROUPS * 128), mask=at < total * 128)
    group = first + tl.arange(0, GROUPS)
    tl.store(scale_ptr + group, scale, mask=group < total)


@triton.jit
def fused_kernel(
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
    T: tl.constexpr,
    TM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    row = block * BLOCK + tl.arange(0, BLOCK)
    token = tl.arange(0, TM)
    k = tl.arange(0, 128)
    groups = columns // 128
    share = tl.cdiv(groups, SPLIT)
    w_at = w_ptr + row.to(tl.int64)[None, :] * columns + k[:, None]
    x_at = x_ptr + token[:, None] * columns + k[None, :]
    acc = tl.zeros((TM, BLOCK), tl.float32)
    for group in range(part * share, tl.minimum(part * share + share, groups)):
        w = tl.load(w_at + group * 128, mask=(row < rows)[None, :], other=0.0)
        x = tl.load(x_at + group * 128, mask=(token < T)[:, None], other=0.0).to(tl.float32)
        scale = group_scale(tl.max(tl.abs(x), 1), POWER_OF_2)
        q = to_e4m3(tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0))
        w_scale = tl.load(w_scale_ptr + block * BLOCK // 128 * groups + group)
        acc += tl.dot(q, w) * (scale * w_scale)[:, None]
    at = token[:, None] * rows + row[None, :]
    ok = (token < T)[:, None] & (row < rows)[None, :]
    if SPLIT > 1:
        tl.store(partial_ptr + part * T * rows + at, acc, mask=ok)
        if not arrive(counter_ptr + block, SPLIT):
            return
        acc = tl.zeros((TM, BLOCK), tl.float32)
        for other in range(SPLIT):
            acc += tl.load(partial_ptr + other * T * rows + at, mask=ok, other=0.0, cache_modifier=".cg")
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(tl.bfloat16), mask=ok)


def floor(tokens: int, rows: int, columns: int, form: Form, block: int = 64) -> Floor:
    """Return the floor of one form; ``block`` is the rows a quantising program serves, in ``pq`` all of them."""
    weights = rows * columns
    read = weights + 4 * (-(-rows // 128)) * (columns // 128) + 2 * tokens * columns
    written = 2 * tokens * rows
    quantised = tokens * columns + tokens * columns // 32
    times = 1
    if form == "separate":
        read += quantised
        written += quantised
    elif form != "pq":
        times = -(-rows // block)
    return Floor(read, written, weights // 8 + 6 * tokens * columns * times)


def quantise(x: torch.Tensor, *, power_of_2_scales: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(q, scales)`` of x bf16[T, K]: e4m3[T, K] and fp32[T, K/128].

    Raises InputError before launch unless K is a multiple of 128.
    """
    expect("quantise", "x", x, torch.bfloat16, (None, None))
    tokens, columns = x.shape
    require("quantise", columns % GROUP == 0, f"K={columns} is not a multiple of {GROUP}")
    q = torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, columns // GROUP, dtype=torch.float32, device=x.device)
    total = scales.numel()
    quantise_kernel[(-(-total // 4),)](x, q, scales, total, GROUPS=4, POWER_OF_2=power_of_2_scales, num_warps=4)
    return q, scales


def live_quant_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    form: Form,
    power_of_2_scales: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: FusedConfig | SkinnyConfig | PqConfig | None = None,
) -> torch.Tensor:
    """Return y, bf16[T, N], by the named form; ``bias`` bf16[N] and ``residual`` bf16[T, N] are added.

    ``config`` is a SkinnyConfig for ``separate``, a PqConfig for ``pq``, else a FusedConfig. ``out`` may be
    ``residual``.
    Raises InputError before launch for shapes, types or a config that do not fit.
    """
    kernel = f"live_quant_gemm {form}"
    require(kernel, form in FORMS, f"form={form!r} is unknown", hint=f"one of {', '.join(FORMS)}")
    expect(kernel, "w", w, torch.float8_e4m3fn, (None, None))
    rows, columns = w.shape
    require(kernel, columns % GROUP == 0, f"K={columns} is not a multiple of {GROUP}")
    expect(kernel, "x", x, torch.bfloat16, (None, columns), device=w.device)
    expect(kernel, "w_scales", w_scales, torch.float32, (-(-rows // 128), columns // 128), device=w.device)
    tokens = x.shape[0]
    require(kernel, 1 <= tokens <= 16, f"x holds {tokens} tokens, the kernel takes 1 to 16")
    if bias is not None:
        expect(kernel, "bias", bias, torch.bfloat16, (rows,), device=x.device)
    if residual is not None:
        expect(kernel, "residual", residual, torch.bfloat16, (tokens, rows), device=x.device)
    if out is None:
        out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    expect(kernel, "out", out, torch.bfloat16, (tokens, rows), device=x.device)
    if form == "separate":
        require(kernel, config is None or isinstance(config, SkinnyConfig), "config must be a SkinnyConfig")
        q, scales = quantise(x, power_of_2_scales=power_of_2_scales)
        skinny = config if isinstance(config, SkinnyConfig) else None
        return skinny_fp8(
            q, scales, w, w_scales, bias=bias, residual=residual, out=out, workspace=workspace, config=skinny
        )
    if form == "pq":
        require(kernel, config is None or isinstance(config, PqConfig), "config must be a PqConfig")
        return pq_gemm(
            x, w, w_scales, power_of_2_scales=power_of_2_scales, bias=bias, residual=residual, out=out,
            workspace=workspace, config=config if isinstance(config, PqConfig) else None,
        )  # fmt: skip
    require(kernel, config is None or isinstance(config, FusedConfig), "config must be a FusedConfig")
    if isinstance(config, FusedConfig):
        cut = config
    else:
        split = 1 if form == "naive" else default_split(rows, columns // GROUP, NAIVE.block)
        cut = FusedConfig(split=split)
    require(kernel, cut.block in (16, 32, 64, 128), f"config.block={cut.block} is not 16, 32, 64 or 128")
    require(kernel, form != "naive" or cut.split == 1, f"config.split={cut.split}: the naive form does not split K")
    blocks = -(-rows // cut.block)
    partial, counters = out, out
    if cut.split > 1:
        workspace = workspace or Workspace(x.device)
        partial, counters = workspace.take(kernel, cut.split * tokens * rows, blocks)
    fused_kernel[(blocks, cut.split)](
        w, w_scales, x, x if bias is None else bias, x if residual is None else residual, out, partial, counters, rows,
        columns, T=tokens, TM=max(16, power_of_2(tokens)), BLOCK=cut.block, SPLIT=cut.split,
        POWER_OF_2=power_of_2_scales, BIAS=bias is not None, RESIDUAL=residual is not None,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out

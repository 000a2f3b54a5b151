"""Dense products y = x @ W.T (+ bias, + residual) for 1 to 16 tokens: BF16, and FP8 with block scales.

Reference (fp32 or fp64): ``x.double() @ w.double().T``; FP8: both operands dequantised first, weights by 128 x 128
blocks, activations by groups of 128 columns (DeepSeek-V3's form).

Shapes: x [T, K], W [N, K] in checkpoint order, y bf16 or fp32 [T, N]. BF16: K a multiple of 64. FP8: K of 128,
w_scales fp32[ceil(N/128), K/128], x_scales fp32[T, K/128]. Byte floor: W once (2 or 1 bytes a weight, and scales),
x, y. Instruction floor a weight: 1/8 of an MMA, 1/8 (FP8 1/16) of a load; FP8 adds 7/4 to decode e4m3 to fp16, because
sm_90 has FP8 MMAs only through wgmma, whose 64 rows do not suit a split this fine. 13 (FP8: 6.6) fit at the roof.

Split-K is what fills the card at small N: ``split`` programs share K and the last to arrive adds their partial sums
in fixed order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.skinny_products import CHUNK_BF16, CHUNK_FP8, products_bf16, products_fp8
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How the work is cut; all but ``stages`` and ``registers`` powers of two.

    ``kw`` warps share a row tile's K, ``rw`` groups of warps take different tiles, ``r`` tiles of 16 rows a warp,
    ``split`` programs share K, ``unroll`` chunks (64 columns BF16, 128 FP8) a warp and loop turn.
    ``stages`` > 1 lets Triton stream that many turns through shared memory; 1 prefetches one turn into registers.
    ``registers`` caps a thread's registers, 0 for no cap: below what the loop needs, it spills.
    """

    kw: int = 4
    rw: int = 1
    r: int = 1
    split: int = 1
    unroll: int = 1
    stages: int = 1
    registers: int = 0

    @property
    def num_warps(self) -> int:
        """Warps of one program."""
        return self.kw * self.rw


SPACE = (
    SkinnyConfig(4, 1, 1, 1, 1),
    SkinnyConfig(4, 1, 1, 1, 2),
    SkinnyConfig(8, 1, 1, 1, 1),
    SkinnyConfig(8, 1, 1, 1, 2),
    SkinnyConfig(8, 1, 2, 1, 1),
    SkinnyConfig(4, 1, 1, 4, 1),
    SkinnyConfig(4, 1, 1, 8, 2),
    SkinnyConfig(4, 2, 1, 8, 1),
    SkinnyConfig(2, 2, 1, 16, 1),
    SkinnyConfig(16, 1, 1, 1, 1),
    SkinnyConfig(16, 1, 1, 2, 1),
    SkinnyConfig(4, 1, 1, 1, 1, 4),
    SkinnyConfig(8, 1, 1, 1, 1, 4),
    SkinnyConfig(4, 1, 1, 4, 1, 3),
    SkinnyConfig(4, 1, 2, 2, 1, 3),
)


def default_config(rows: int, chunks: int, sms: int = 132) -> SkinnyConfig:
    """Choose by rule: K over up to 8 warps with two turns each left, then split K until two programs an SM exist."""
    kw = 4
    while kw < 8 and chunks >= 4 * kw:
        kw *= 2
    split = 1
    while -(-rows // 16) * split < 2 * sms and chunks >= 2 * kw * split:
        split *= 2
    return SkinnyConfig(kw, 1, 1, split, 1)


@triton.jit
def _finish(
    acc, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr, block, part, rows, T: tl.constexpr,
    TN: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    OUT_BF16: tl.constexpr,
):  # fmt: skip
    """Reduce over the split, add bias and residual, store."""
    row = block * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TN)
    at = token[None, :] * rows + row[:, None]
    ok = (row < rows)[:, None] & (token < T)[None, :]
    if SPLIT > 1:
        tl.store(partial_ptr + part * T * rows + at, acc, mask=ok)
        if not arrive(counter_ptr + block, SPLIT):
            return
        acc = tl.zeros((ROWS, TN), tl.float32)
        for other in range(SPLIT):
            acc += tl.load(partial_ptr + other * T * rows + at, mask=ok, other=0.0, cache_modifier=".cg")
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32)
    if OUT_BF16:
        tl.store(y_ptr + at, acc.to(tl.bfloat16), mask=ok)
    else:
        tl.store(y_ptr + at, acc, mask=ok)


@triton.jit
def skinny_bf16_kernel(
    w_ptr,
    x_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    columns,
    T: tl.constexpr,
    TN: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OUT_BF16: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    acc = products_bf16(
        w_ptr, x_ptr, block, part, rows, columns, T, TN, KW, RW, R, SPLIT, TURNS, UNROLL, STAGED, OVERLAP
    )
    _finish(
        acc, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr, block, part, rows, T, TN, RW * R * 16, SPLIT,
        BIAS, RESIDUAL, OUT_BF16,
    )  # fmt: skip


@triton.jit
def skinny_fp8_kernel(
    w_ptr,
    w_scale_ptr,
    x_ptr,
    x_scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    columns,
    T: tl.constexpr,
    TN: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OUT_BF16: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    acc = products_fp8(
        w_ptr,
        w_scale_ptr,
        x_ptr,
        x_scale_ptr,
        block,
        part,
        rows,
        columns,
        T,
        TN,
        KW,
        RW,
        R,
        SPLIT,
        TURNS,
        UNROLL,
        STAGED,
        OVERLAP,
    )
    _finish(
        acc, bias_ptr, residual_ptr, y_ptr, partial_ptr, counter_ptr, block, part, rows, T, TN, RW * R * 16, SPLIT,
        BIAS, RESIDUAL, OUT_BF16,
    )  # fmt: skip


def floor(tokens: int, rows: int, columns: int, weight_bytes: int) -> Floor:
    """Return the floor; ``weight_bytes`` is 2 (BF16) or 1 (FP8, its scales counted)."""
    weights = rows * columns
    scales = 0 if weight_bytes == 2 else 4 * (-(-rows // 128)) * (columns // 128)
    halves = 1 if tokens <= 8 else 2
    return Floor(
        weights * weight_bytes + scales + tokens * columns * weight_bytes,
        2 * tokens * rows,
        weights * ((2 * (halves + 1)) if weight_bytes == 2 else (1 + 2 * halves + 28)) // 16,
    )


def cut(config: SkinnyConfig, tokens: int, chunks: int, overlap: bool = False) -> dict[str, Any]:
    """Return the compile-time constants, warps and stages of a launch."""
    a_warp = -(-chunks // (config.kw * config.split))
    unroll = min(config.unroll, power_of_2(a_warp))
    return {
        "T": tokens,
        "TN": 8 if tokens <= 8 else 16,
        "KW": config.kw,
        "RW": config.rw,
        "R": config.r,
        "SPLIT": config.split,
        "TURNS": -(-a_warp // unroll),
        "UNROLL": unroll,
        "STAGED": config.stages > 1,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
        "num_warps": config.num_warps,
        "num_stages": config.stages,
        **({"maxnreg": config.registers} if config.registers else {}),
    }


def check_config(kernel: str, config: SkinnyConfig) -> None:
    """Raise InputError unless every field is a power of two and the warps fit a program."""
    for name in ("kw", "rw", "r", "split", "unroll"):
        value = getattr(config, name)
        require(kernel, value >= 1 and value == power_of_2(value), f"config.{name}={value} is not a power of two")
    require(kernel, config.num_warps <= 16, f"config uses {config.num_warps} warps, the kernel takes up to 16")


def _check(
    kernel: str, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, chunk: int, config: SkinnyConfig | None
) -> tuple[int, int, int, SkinnyConfig]:
    expect(kernel, "w", w, dtype, (None, None))
    rows, columns = w.shape
    expect(kernel, "x", x, dtype, (None, columns), device=w.device)
    tokens = x.shape[0]
    require(kernel, 1 <= tokens <= 16, f"x holds {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, columns % chunk == 0, f"K={columns} is not a multiple of {chunk}")
    config = config or default_config(rows, columns // chunk)
    check_config(kernel, config)
    return tokens, rows, columns, config


def _extras(
    kernel: str, x: torch.Tensor, tokens: int, rows: int, config: SkinnyConfig, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor | None, out_dtype: torch.dtype, workspace: Workspace | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:  # fmt: skip
    if bias is not None:
        expect(kernel, "bias", bias, torch.bfloat16, (rows,), device=x.device)
    if residual is not None:
        expect(kernel, "residual", residual, torch.bfloat16, (tokens, rows), device=x.device)
    require(kernel, out_dtype in (torch.bfloat16, torch.float32), f"out_dtype={out_dtype} is neither bf16 nor fp32")
    if out is None:
        out = torch.empty(tokens, rows, dtype=out_dtype, device=x.device)
    expect(kernel, "out", out, (torch.bfloat16, torch.float32), (tokens, rows), device=x.device)
    blocks = -(-rows // (config.rw * config.r * 16))
    partial, counters = out, out
    if config.split > 1:
        workspace = workspace or Workspace(x.device)
        partial, counters = workspace.take(kernel, config.split * tokens * rows, blocks)
    return out, partial, counters, blocks


def skinny_bf16(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    workspace: Workspace | None = None,
    config: SkinnyConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``x @ w.T``, [T, N]. x bf16[T, K], w bf16[N, K], bias bf16[N], residual bf16[T, N].

    ``overlap``: overlap.py. Raises InputError before launch for shapes or types that do not fit.
    """
    kernel = "skinny_bf16"
    tokens, rows, columns, config = _check(kernel, x, w, torch.bfloat16, CHUNK_BF16, config)
    out, partial, counters, blocks = _extras(kernel, x, tokens, rows, config, bias, residual, out, out_dtype, workspace)
    skinny_bf16_kernel[(blocks, config.split)](
        w, x, x if bias is None else bias, x if residual is None else residual, out, partial, counters, rows, columns,
        BIAS=bias is not None, RESIDUAL=residual is not None, OUT_BF16=out.dtype == torch.bfloat16,
        **cut(config, tokens, columns // CHUNK_BF16, overlap),
    )  # fmt: skip
    return out


def skinny_fp8(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    workspace: Workspace | None = None,
    config: SkinnyConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return the dequantised ``x @ w.T``, [T, N]; e4m3 operands and fp32 scales as in the module text.

    ``overlap``: overlap.py. Raises InputError before launch for shapes or types that do not fit.
    """
    kernel = "skinny_fp8"
    tokens, rows, columns, config = _check(kernel, x, w, torch.float8_e4m3fn, CHUNK_FP8, config)
    expect(kernel, "x_scales", x_scales, torch.float32, (tokens, columns // 128), device=x.device)
    expect(kernel, "w_scales", w_scales, torch.float32, (-(-rows // 128), columns // 128), device=x.device)
    out, partial, counters, blocks = _extras(kernel, x, tokens, rows, config, bias, residual, out, out_dtype, workspace)
    skinny_fp8_kernel[(blocks, config.split)](
        w, w_scales, x, x_scales, x if bias is None else bias, x if residual is None else residual, out, partial,
        counters, rows, columns, BIAS=bias is not None, RESIDUAL=residual is not None,
        OUT_BF16=out.dtype == torch.bfloat16, **cut(config, tokens, columns // CHUNK_FP8, overlap),
    )  # fmt: skip
    return out

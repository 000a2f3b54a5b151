"""RMSNorm of the residual stream, with the residual add in front and FP8 quantisation behind, in one launch.

Reference (fp32): ``s = x + residual`` (stored back as bf16), ``y = s / sqrt(mean(s^2) + eps) * weight``; quantised:
groups of 128 columns, ``scale = max|y| / 448`` (or the next power of two, UE8M0), ``q = e4m3(y / scale)``.

Shapes: x, residual bf16[T, H]; weight bf16[H]; y bf16[T, H]; q e4m3[T, H] with scales fp32[T, H/128].
Byte floor: x, residual and weight read, residual and y (or q and scales) written. Instruction floor: about 12 per
element. One program a token: at T = 1 the launch itself is the cost, which is what fusing it away shows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.e4m3 import GROUP, quantise_groups
from workbench.kernels.floor import Floor
from workbench.kernels.overlap import wait_for_previous


@dataclass(frozen=True, slots=True)
class NormConfig:
    """``num_warps`` of the one program a token gets."""

    num_warps: int = 8


SPACE = (NormConfig(4), NormConfig(8), NormConfig(16))


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    q_ptr,
    scale_ptr,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WRITE_Y: tl.constexpr,
    QUANTISE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < hidden
    weight = tl.load(weight_ptr + column, mask=ok, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    x = tl.load(x_ptr + token * hidden + column, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + token * hidden + column, mask=ok, other=0.0).to(tl.float32)
        tl.store(residual_ptr + token * hidden + column, x.to(tl.bfloat16), mask=ok)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / hidden + eps) * weight
    if WRITE_Y:
        tl.store(y_ptr + token * hidden + column, y.to(tl.bfloat16), mask=ok)
    if QUANTISE:
        quantised, scale = quantise_groups(y, BLOCK // 128, POWER_OF_2)
        tl.store(q_ptr + token * hidden + column, quantised.reshape(BLOCK), mask=ok)
        group = tl.arange(0, BLOCK // 128)
        tl.store(scale_ptr + token * (hidden // 128) + group, scale, mask=group < hidden // 128)


def floor(tokens: int, hidden: int, *, residual: bool, quantise: bool) -> Floor:
    """Return the floor; with ``quantise`` the output is e4m3 and scales instead of bf16."""
    elements = tokens * hidden
    read = 2 * elements * (2 if residual else 1) + 2 * hidden
    written = (2 * elements if residual else 0) + (elements + elements // 32 if quantise else 2 * elements)
    return Floor(read, written, 12 * elements)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: NormConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return ``y``, bf16[T, H]. ``residual`` bf16[T, H] is updated in place to x + residual.

    ``overlap``: overlap.py. Raises InputError before launch for shapes or types that do not fit.
    """
    tokens, hidden = _check(x, weight, residual)
    if out is None:
        out = torch.empty_like(x)
    expect("rms_norm", "out", out, torch.bfloat16, (tokens, hidden), device=x.device)
    rms_norm_kernel[(tokens,)](
        x, x if residual is None else residual, weight, out, x, x, hidden, eps, BLOCK=max(128, power_of_2(hidden)),
        RESIDUAL=residual is not None, WRITE_Y=True, QUANTISE=False, POWER_OF_2=False,
        OVERLAP=overlap, launch_pdl=overlap,
        num_warps=(config or NormConfig()).num_warps,
    )  # fmt: skip
    return out


def rms_norm_quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    power_of_2_scales: bool = False,
    y: torch.Tensor | None = None,
    config: NormConfig | None = None,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(q, scales)``: e4m3[T, H] and fp32[T, H/128]; also writes bf16 ``y`` where given.

    ``overlap``: overlap.py.
    Raises InputError before launch for shapes or types that do not fit; H must be a multiple of 128.
    """
    tokens, hidden = _check(x, weight, residual)
    require("rms_norm_quantise", hidden % GROUP == 0, f"hidden={hidden} is not a multiple of {GROUP}")
    if y is not None:
        expect("rms_norm_quantise", "y", y, torch.bfloat16, (tokens, hidden), device=x.device)
    q = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, hidden // GROUP, dtype=torch.float32, device=x.device)
    rms_norm_kernel[(tokens,)](
        x, x if residual is None else residual, weight, x if y is None else y, q, scales, hidden, eps,
        BLOCK=power_of_2(hidden), RESIDUAL=residual is not None, WRITE_Y=y is not None, QUANTISE=True,
        POWER_OF_2=power_of_2_scales, OVERLAP=overlap, launch_pdl=overlap,
        num_warps=(config or NormConfig()).num_warps,
    )  # fmt: skip
    return q, scales


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> tuple[int, int]:
    expect("rms_norm", "x", x, torch.bfloat16, (None, None))
    tokens, hidden = x.shape
    expect("rms_norm", "weight", weight, torch.bfloat16, (hidden,), device=x.device)
    require("rms_norm", 1 <= hidden <= 16384, f"hidden={hidden}, the kernel takes up to 16384")
    if residual is not None:
        expect("rms_norm", "residual", residual, torch.bfloat16, (tokens, hidden), device=x.device)
    return tokens, hidden

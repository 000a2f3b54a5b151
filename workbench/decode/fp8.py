"""FP8 e4m3 in plain torch: weights in blocks of 128 x 128, activations in groups along the last axis.

Both take the smallest power of two as scale that clips nothing (UE8M0, as DeepSeek-V3.2's ``scale_fmt``), so that a
dequantised value is exact in bfloat16 and quantising it again changes nothing. Groups of 128 are DeepSeek-V3's live
activation form, groups of 32 are MXFP8's (OCP MX v1.0), which W4A8 expert kernels take.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.errors import InputError

BLOCK = 128
"""Rows and columns of a weight block that share one scale."""

MX_GROUP = 32
"""Activations that share one scale in MXFP8."""

LARGEST = 448.0
"""Largest e4m3 value; there is no infinity."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """A matrix in block FP8. ``values``: e4m3 [N, K]; ``scales``: float32 [ceil(N/128), ceil(K/128)]."""

    values: Tensor
    scales: Tensor


def quantize_blocks(matrix: Tensor) -> Fp8:
    """Quantise ``matrix`` [N, K] by blocks of 128 x 128; partial blocks at the edges have a scale of their own.

    Raises InputError unless it is two-dimensional.
    """
    if matrix.ndim != 2:
        raise InputError(f"fp8: shape {tuple(matrix.shape)}: blocks of {BLOCK} x {BLOCK} need a matrix")
    rows, columns = matrix.shape
    padded = F.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = _scale(blocks.abs().amax((1, 3)))
    values = _round(blocks / scales[:, None, :, None]).view_as(padded)
    return Fp8(values[:rows, :columns].contiguous(), scales)


def dequantize_blocks(q: Fp8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of ``q``, [N, K], in ``dtype``; exact in float32 and bfloat16."""
    rows, columns = q.values.shape
    scales = q.scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (q.values.float() * scales).to(dtype)


def fake_quantize_groups(x: Tensor, group: int = MX_GROUP) -> Tensor:
    """Return ``x`` [..., K] as groups of ``group`` columns hold it in e4m3, in ``x``'s dtype.

    Raises InputError unless K is a multiple of ``group``.
    """
    if x.shape[-1] % group:
        raise InputError(f"fp8: shape {tuple(x.shape)}: the last axis must be a multiple of {group}")
    groups = x.float().reshape(*x.shape[:-1], -1, group)
    scales = _scale(groups.abs().amax(-1, keepdim=True))
    return (_round(groups / scales).float() * scales).flatten(-2).to(x.dtype)


def _scale(top: Tensor) -> Tensor:
    """Return the power of two at or above ``top`` / 448, by the bits of the float32; 1 where ``top`` is 0."""
    bits = (top / LARGEST).view(torch.int32)
    return torch.where(top > 0, ((bits + 0x7F_FFFF) & 0x7F80_0000).view(torch.float32), 1.0)


def _round(x: Tensor) -> Tensor:
    """Round to e4m3, nearest even; the clamp catches what a rounded quotient adds at the border."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

"""OCP MXFP4 in plain torch: the reference codec that kernels and training are checked against.

An MXFP4 block is 32 consecutive E2M1 elements of the last axis and one E8M0 scale, 2^(byte - 127); 4.25 bits a value.
The format is OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3; the byte layout is that of the gpt-oss
checkpoints (``blocks`` and ``scales``, low nibble = even index). docs/reference/fp4.md states every rule.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from workbench.decode import e2m1
from workbench.decode.blocks import split, to_blocks
from workbench.decode.straight_through import straight_through
from workbench.errors import InputError

BLOCK = 32
"""Elements that share one scale, along the last axis."""

SCALE_BIAS = 127
"""A scale byte ``e`` stands for 2^(e - 127)."""

SCALE_NAN = 0xFF
"""The scale byte that makes its whole block NaN; E8M0 has neither zero nor infinity."""

BITS_PER_VALUE = 4 + 8 / BLOCK
"""Storage cost of one value, its share of the scale included."""

ScaleRounding = Literal["up", "ocp"]
"""How a block's largest magnitude, ``amax``, becomes a power-of-two scale.

``up``   2^ceil(log2(amax / 6)): the smallest scale that clips nothing (the default of triton_kernels).
``ocp``  2^floor(log2(amax / 4)): the conversion of the OCP specification; maxima in (6, 8) scales saturate at 6.
"""


@dataclass(frozen=True, slots=True)
class MxFp4:
    """A tensor [..., K] in MXFP4. ``blocks``: uint8 [..., K/2], two codes a byte; ``scales``: uint8 [..., K/32]."""

    blocks: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        """Raise InputError if the two do not describe the same tensor."""
        if self.blocks.dtype != torch.uint8 or self.scales.dtype != torch.uint8:
            raise InputError(f"mxfp4: blocks are {self.blocks.dtype}, scales {self.scales.dtype}; both must be uint8")
        blocks, scales = tuple(self.blocks.shape), tuple(self.scales.shape)
        if not scales or blocks != (*scales[:-1], scales[-1] * BLOCK // 2):
            raise InputError(f"mxfp4: blocks {blocks} do not fit scales {scales}; expected [..., K/2] and [..., K/32]")


def quantize(x: Tensor, rounding: ScaleRounding = "up") -> MxFp4:
    """Quantise ``x`` (float32, bfloat16 or float16, [..., K], K a multiple of 32) along its last axis.

    Elements round to nearest, ties to even, and saturate at +-6 scales. A block that holds a NaN or an infinity gets
    scale 0xFF and codes 0; a block of zeros gets scale 0. Raises InputError for another shape, dtype or rounding.
    """
    blocks = to_blocks(x, BLOCK, "mxfp4")
    exponent = _shared_exponent(blocks, rounding)
    scaled = torch.where(exponent == SCALE_NAN, 0.0, blocks * _reciprocal(exponent))
    return MxFp4(e2m1.pack(e2m1.encode(scaled).flatten(-2)), exponent.squeeze(-1).to(torch.uint8))


def dequantize(q: MxFp4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of ``q``, [..., K], in ``dtype``.

    float32 holds every MXFP4 value exactly, down to 2^-128; products beyond its range become infinite. Narrower
    dtypes round once more.
    """
    values = split(e2m1.decode(e2m1.unpack(q.blocks)), BLOCK)
    return (values * scale_value(q.scales).unsqueeze(-1)).flatten(-2).to(dtype)


def fake_quantize(x: Tensor, rounding: ScaleRounding = "up") -> Tensor:
    """Return ``dequantize(quantize(x, rounding), x.dtype)`` without packing, with a straight-through gradient.

    The gradient passes unchanged through every element, saturated ones included: the scale follows ``amax``, so a
    clipped maximum is still the element that decides the block's range. Same inputs and errors as :func:`quantize`.
    """
    blocks = to_blocks(x.detach(), BLOCK, "mxfp4")
    exponent = _shared_exponent(blocks, rounding)
    magnitude = e2m1.nearest(blocks.abs() * _reciprocal(exponent))
    values = torch.copysign(magnitude, blocks) * scale_value(exponent)
    return straight_through(x, values.flatten(-2).to(x.dtype))


def scale_value(scales: Tensor) -> Tensor:
    """Return 2^(byte - 127) as float32 for scale bytes (integers of any shape); 0xFF gives NaN.

    The byte is the exponent field of a float32, except for byte 0, which is the subnormal 2^-127.
    """
    exponent = scales.to(torch.int32)
    value = torch.where(exponent == 0, 0x0040_0000, exponent << 23).view(torch.float32)
    return torch.where(exponent == SCALE_NAN, float("nan"), value)


def _shared_exponent(blocks: Tensor, rounding: ScaleRounding) -> Tensor:
    """Return the scale byte of each block as int32 [..., K/32, 1].

    Works on the bits of the float32: their order is the order of magnitudes, and NaN and infinity come last. A
    floating-point log2 would be off by one near powers of two.
    """
    amax = (blocks.view(torch.int32) & 0x7FFF_FFFF).amax(-1, keepdim=True)
    if rounding == "up":
        # 6 = 1.5 * 2^2: one exponent more exactly when the mantissa exceeds 1.5, that is when this sum carries.
        exponent = ((amax + 0x003F_FFFF) >> 23) - 2
    elif rounding == "ocp":
        exponent = (amax >> 23) - 2
    else:
        raise InputError(f"mxfp4: unknown scale rounding {rounding!r}; use {' or '.join(get_args(ScaleRounding))}")
    # Below 2^-127 (zero and subnormal maxima) the smallest scale serves.
    return torch.where(amax >= 0x7F80_0000, SCALE_NAN, exponent.clamp(min=0))


def _reciprocal(exponent: Tensor) -> Tensor:
    """Return 2^(127 - exponent) as float32; exact, since finite blocks have exponents of 0 to 253. NaN blocks: any."""
    return ((254 - exponent).clamp(min=1) << 23).view(torch.float32)

"""E2M1, the 4-bit element of MXFP4 and NVFP4: one sign, two exponent bits (bias 1), one mantissa bit.

The sixteen codes stand for +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}; there is no infinity and no NaN (OCP Microscaling
Formats v1.0, section 5.3.3). Everything here is element-wise arithmetic without lookup tables, so it runs on any
device, moves nothing between host and device, and fuses under ``torch.compile``. It only multiplies by powers of
two: compiled code may approximate a division.
"""

import torch
from torch import Tensor

MAX = 6.0
"""Largest magnitude; larger values saturate to it."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0 to 7; code ``8 + i`` is its negative."""

SIGN = 0x8
"""The sign bit of a code."""


def nearest(magnitude: Tensor) -> Tensor:
    """Round non-negative ``magnitude`` (any shape, float32) to the nearest E2M1 magnitude; ties go to the even code.

    The grid is even within [0, 2], [2, 4] and [4, 6], so rounding to a multiple of that range's step is exact, and
    an even multiple is an even code. Values above 6, infinity included, give 6; NaN stays NaN.
    """
    clipped = magnitude.clamp(max=MAX)
    below_2, below_4 = clipped < 2, clipped < 4
    steps_per_unit = torch.where(below_2, 2.0, torch.where(below_4, 1.0, 0.5))
    step = torch.where(below_2, 0.5, torch.where(below_4, 1.0, 2.0))
    return torch.round(clipped * steps_per_unit) * step


def encode(values: Tensor) -> Tensor:
    """Round ``values`` (any shape, float32, already divided by their scale) to codes, uint8 in 0..15.

    Nearest, ties to the even code, saturating at +-6. The sign of zero is kept: -0.0 and small negative values give
    code 8. NaN has no code; callers must replace it first.
    """
    magnitude = nearest(values.abs())
    # The code is concave and piecewise linear in the value: slope 2 up to 2, slope 1 up to 4, slope 1/2 up to 6.
    code = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4).to(torch.uint8)
    return torch.where(torch.signbit(values), code | SIGN, code)


def decode(codes: Tensor) -> Tensor:
    """Return the float32 values of ``codes`` (uint8 in 0..15, any shape); code 8 gives -0.0."""
    code = (codes & 0x7).to(torch.float32)
    magnitude = torch.maximum(torch.maximum(code * 0.5, code - 2), code * 2 - 8)
    return torch.where((codes & SIGN) != 0, -magnitude, magnitude)


def pack(codes: Tensor) -> Tensor:
    """Pack codes, uint8 [..., K] with K even, two a byte, the even index in the low nibble: uint8 [..., K/2]."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return even | (odd << 4)


def unpack(packed: Tensor) -> Tensor:
    """Undo :func:`pack`: uint8 [..., K/2] to codes, uint8 [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)

"""NVFP4 in plain torch: E2M1 elements, one E4M3 scale per 16, one FP32 scale per tensor; 4.5 bits a value.

NVFP4 is NVIDIA's format, not an OCP one. The two-level rule is that of NVIDIA Model Optimizer (``NVFP4QTensor``),
operation for operation; blocks with a non-finite element are the one addition. docs/reference/fp4.md states every rule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.decode import e2m1
from workbench.decode.blocks import split, to_blocks
from workbench.decode.straight_through import straight_through
from workbench.errors import InputError

BLOCK = 16
"""Elements that share one E4M3 scale, along the last axis."""

SCALE_MAX = 448.0
"""Largest E4M3 value."""

SCALE_MIN = 2.0**-9
"""Smallest positive E4M3 value, a subnormal; smaller block scales are raised to it."""

TENSOR_SCALE_MIN = 2.0**-117
"""Smallest tensor scale: its product with the smallest block scale is still a normal float32."""

BITS_PER_VALUE = 4 + 8 / BLOCK
"""Storage cost of one value, its share of the block scale included; the tensor scale is not counted."""


@dataclass(frozen=True, slots=True)
class NvFp4:
    """A tensor [..., K] in NVFP4: value = E2M1 element * block scale * tensor scale.

    ``blocks``: uint8 [..., K/2], two codes a byte; ``scales``: float8_e4m3fn [..., K/16]; ``tensor_scale``: float32,
    a scalar or anything that broadcasts against ``scales`` (one per expert, say, as [experts, 1, 1]).
    """

    blocks: Tensor
    scales: Tensor
    tensor_scale: Tensor

    def __post_init__(self) -> None:
        """Raise InputError if the three do not describe the same tensor."""
        found = (self.blocks.dtype, self.scales.dtype, self.tensor_scale.dtype)
        if found != (torch.uint8, torch.float8_e4m3fn, torch.float32):
            raise InputError(f"nvfp4: blocks, scales, tensor_scale are {found}; need uint8, float8_e4m3fn, float32")
        blocks, scales = tuple(self.blocks.shape), tuple(self.scales.shape)
        if not scales or blocks != (*scales[:-1], scales[-1] * BLOCK // 2):
            raise InputError(f"nvfp4: blocks {blocks} do not fit scales {scales}; expected [..., K/2] and [..., K/16]")
        _check_tensor_scale(self.tensor_scale, scales)


def quantize(x: Tensor, tensor_scale: Tensor | None = None) -> NvFp4:
    """Quantise ``x`` (float32, bfloat16 or float16, [..., K], K a multiple of 16) along its last axis.

    ``tensor_scale``: see :class:`NvFp4`; default amax / (6 * 448) over the whole tensor. Elements round to nearest,
    ties to even, and saturate at +-6 scales: E4M3 rounds to nearest, so a block's maximum may clip. A block that
    holds a NaN or an infinity gets a NaN scale and codes 0, and does not count in the tensor's amax; a block of zeros
    gets scale 1. Raises InputError for another shape or dtype.
    """
    blocks = to_blocks(x, BLOCK, "nvfp4")
    scales, tensor_scale = _scales(blocks, tensor_scale)
    unit = (scales.to(torch.float32) * tensor_scale).unsqueeze(-1)
    scaled = torch.where(unit.isnan(), 0.0, blocks / unit)
    return NvFp4(e2m1.pack(e2m1.encode(scaled).flatten(-2)), scales, tensor_scale)


def dequantize(q: NvFp4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of ``q``, [..., K], in ``dtype``: element * (block scale * tensor scale), in float32."""
    values = split(e2m1.decode(e2m1.unpack(q.blocks)), BLOCK)
    unit = (q.scales.to(torch.float32) * q.tensor_scale).unsqueeze(-1)
    return (values * unit).flatten(-2).to(dtype)


def fake_quantize(x: Tensor, tensor_scale: Tensor | None = None) -> Tensor:
    """Return ``dequantize(quantize(x, tensor_scale), x.dtype)`` without packing, with a straight-through gradient.

    The gradient passes unchanged through every element and not at all to ``tensor_scale``. Compiled for a GPU, the
    division may be off by an ulp and turn a tie; MXFP4, which only multiplies by powers of two, has no such case.
    """
    blocks = to_blocks(x.detach(), BLOCK, "nvfp4")
    scales, tensor_scale = _scales(blocks, tensor_scale)
    unit = (scales.to(torch.float32) * tensor_scale).unsqueeze(-1)
    values = torch.copysign(e2m1.nearest((blocks / unit).abs()), blocks) * unit
    return straight_through(x, values.flatten(-2).to(x.dtype))


def _scales(blocks: Tensor, tensor_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the block scales, float8_e4m3fn [..., K/16], and the tensor scale, float32."""
    amax = blocks.abs().amax(-1)
    finite = amax.isfinite()
    if tensor_scale is None:
        # A leading zero gives an empty tensor a maximum.
        largest = torch.where(finite, amax, 0.0).flatten()
        largest = torch.cat((largest.new_zeros(1), largest)).amax()
        # A tensor, not a Python number: torch on CUDA divides by a number as a product with its reciprocal, an ulp off.
        tensor_scale = (largest / largest.new_full((), e2m1.MAX * SCALE_MAX)).clamp(min=TENSOR_SCALE_MIN)
    else:
        _check_tensor_scale(tensor_scale, tuple(amax.shape))
    scale = amax / (e2m1.MAX * tensor_scale)
    scale = torch.where(scale == 0, 1.0, scale.clamp(min=SCALE_MIN, max=SCALE_MAX))
    return torch.where(finite, scale, float("nan")).to(torch.float8_e4m3fn), tensor_scale


def _check_tensor_scale(tensor_scale: Tensor, scales: tuple[int, ...]) -> None:
    shape = tuple(tensor_scale.shape)
    fits = len(shape) <= len(scales) and all(a in (1, b) for a, b in zip(shape[::-1], scales[::-1], strict=False))
    if not fits or tensor_scale.dtype != torch.float32:
        raise InputError(f"nvfp4: tensor_scale {shape} {tensor_scale.dtype} must be float32 and fit scales {scales}")

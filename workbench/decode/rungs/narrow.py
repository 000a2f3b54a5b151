"""Routed experts in block FP8 as published: e4m3 with one float32 scale a 128 x 128 block (DeepSeek-V3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.decode.experts import Half
from workbench.decode.fp8 import BLOCK, Fp8
from workbench.errors import InputError


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """One layer's experts. Per projection: ``values`` e4m3 [E, N, K], ``scales`` float32 [E, N/128, K/128].

    ``gate_up`` has all gate rows first. Raises InputError where N or K is no multiple of 128: a block that straddles
    gate and up, or a short one, is nothing that the kernels read.
    """

    gate_up: Fp8
    down: Fp8

    def __post_init__(self) -> None:
        for name, part, halves in (("gate_up", self.gate_up, 2), ("down", self.down, 1)):
            experts, rows, columns = part.values.shape
            if rows % (halves * BLOCK) or columns % BLOCK:
                raise InputError(f"fp8 experts: {name} of {rows} x {columns}: needs whole blocks of {BLOCK} x {BLOCK}")
            if part.scales.shape != (experts, rows // BLOCK, columns // BLOCK):
                raise InputError(f"fp8 experts: {name}: scales {tuple(part.scales.shape)} do not fit the values")

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return sum(part.values.nbytes + part.scales.nbytes for part in (self.gate_up, self.down))

    def rows(self, half: Half, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the projections of experts ``ids`` [...], [..., N, K] in ``dtype``."""
        part: Fp8 = getattr(self, half)
        _, rows, columns = part.values.shape
        # As bytes, because not every device indexes e4m3.
        values = part.values.view(torch.uint8)[ids].view(torch.float8_e4m3fn).to(dtype)
        blocks = values.view(*ids.shape, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = part.scales[ids].to(dtype)[..., :, None, :, None]
        return (blocks * scales).view(*ids.shape, rows, columns)


def draw_fp8(shape: torch.Size, generator: torch.Generator) -> Fp8:
    """Return random block FP8 [E, N, K] of standard deviation near K^-1/2, drawn as bits.

    Every value has a random sign and mantissa and one of four neighbouring exponents, every block one of three
    neighbouring powers of two as its scale (exact in bfloat16): drawing normal numbers and rounding them would take
    several times as long and as much memory.
    """
    experts, rows, columns = shape
    device = generator.device
    values = draw_bytes(experts * rows * columns, generator)
    values.bitwise_and_(0x9F).bitwise_or_(0x20)  # sign, 0 1 e e, mantissa: magnitudes 0.125 to 1.875
    size = (experts, -(-rows // BLOCK), -(-columns // BLOCK))
    steps = torch.randint(-1, 2, size, device=device, generator=generator)
    scales = torch.exp2((steps + round_log2(columns**-0.5 / BITS_RMS)).float())
    return Fp8(values.view(torch.float8_e4m3fn).view(experts, rows, columns), scales)


BITS_RMS = 0.84
"""Root mean square of the magnitudes 0.125 to 1.875, four exponents and eight mantissas alike."""


def round_log2(x: float) -> int:
    """Return the exponent of the power of two nearest to ``x`` on a logarithmic scale."""
    return round(torch.tensor(x).log2().item())


def draw_bytes(count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` random bytes, uint8, drawn eight at a time."""
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    words.random_(-(1 << 63), None, generator=generator)
    return words.view(torch.uint8)[:count]

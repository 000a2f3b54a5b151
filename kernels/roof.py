"""Read roof: the bandwidth at which this card streams a buffer that no cache holds.

Reference: ``buffer.sum()``. Shape: ``int32[n]``, n a multiple of the block. Byte floor: ``4 n`` read, 4 written per
program. Instruction floor: one integer add per 4 bytes. Every other kernel's share of the roof divides by this
number from the same run; the datasheet value stands beside it, never instead of it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workbench.kernels.contract import expect, require
from workbench.kernels.floor import Floor

#: Why the kernel may use local memory. On sm_90 it does not.
SPILLS = (
    "on sm_100 and sm_103 ptxas spills one register: 4 bytes stored before the loop and loaded in each pass, beside "
    "the 128 bytes a thread reads from memory in a pass"
)


@dataclass(frozen=True, slots=True)
class RoofConfig:
    """``block`` int32 words per load step and program; ``programs`` in the grid, each strides over the buffer."""

    block: int = 8192
    programs: int = 1056
    num_warps: int = 8


SPACE = tuple(RoofConfig(block, programs) for block in (4096, 8192) for programs in (528, 1056, 2112, 4224))


@triton.jit
def read_roof_kernel(buffer_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    start = pid.to(tl.int64) * BLOCK
    while start < n:
        total += tl.load(buffer_ptr + start + lanes, mask=start + lanes < n, other=0)
        start += stride
    tl.store(out_ptr + pid, tl.sum(total, 0))


def floor(words: int, config: RoofConfig) -> Floor:
    """Return the floor for a buffer of ``words`` int32."""
    return Floor(4 * words, 4 * config.programs, words)


def read_roof(buffer: torch.Tensor, out: torch.Tensor, config: RoofConfig | None = None) -> torch.Tensor:
    """Sum ``buffer`` (int32[n]) into per-program partial sums ``out`` (int32[programs]); wraps like int32 does.

    Raises InputError for wrong types or an ``out`` that does not match ``config.programs``.
    """
    config = config or RoofConfig()
    expect("read_roof", "buffer", buffer, torch.int32, (None,))
    expect("read_roof", "out", out, torch.int32, (config.programs,), device=buffer.device)
    require("read_roof", buffer.numel() > 0, "buffer is empty")
    read_roof_kernel[(config.programs,)](buffer, out, buffer.numel(), BLOCK=config.block, num_warps=config.num_warps)
    return out

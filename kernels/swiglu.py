"""The activation between a dense FFN's two products: ``h = silu(gate) * up`` in one launch.

Reference (fp32): gate_up bf16[T, 2 I], gate first; h bf16[T, I]. Byte floor: 6 bytes an element of h. Instruction
floor: about 8 an element. As small operators it is three launches.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from workbench.kernels.contract import expect, require
from workbench.kernels.floor import Floor
from workbench.kernels.overlap import wait_for_previous

#: Elements of one program.
BLOCK = 512


@triton.jit
def swiglu_kernel(gate_up_ptr, h_ptr, inter, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < inter
    wait_for_previous(OVERLAP)
    gate = tl.load(gate_up_ptr + token * 2 * inter + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * inter + inter + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(h_ptr + token * inter + column, (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16), mask=ok)


def floor(tokens: int, inter: int) -> Floor:
    """Return the floor."""
    return Floor(4 * tokens * inter, 2 * tokens * inter, 8 * tokens * inter)


def swiglu(gate_up: torch.Tensor, *, overlap: bool = False) -> torch.Tensor:
    """Return h, bf16[T, I], of ``gate_up`` bf16[T, 2 I]. ``overlap``: overlap.py. Raises InputError before launch."""
    expect("swiglu", "gate_up", gate_up, torch.bfloat16, (None, None))
    tokens, width = gate_up.shape
    require("swiglu", width % 2 == 0, f"gate_up has {width} columns, an odd number")
    h = torch.empty(tokens, width // 2, dtype=torch.bfloat16, device=gate_up.device)
    swiglu_kernel[(tokens, -(-(width // 2) // BLOCK))](
        gate_up, h, width // 2, BLOCK=BLOCK, OVERLAP=overlap, launch_pdl=overlap, num_warps=4
    )
    return h

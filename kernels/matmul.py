"""bf16 products for the tensor core that also run in Triton's interpreter, which has no bf16 arithmetic."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators

import triton
import triton.language as tl

from workbench.kernels.contract import EMULATED


@triton.jit
def widen(x):
    """bf16 to fp32 by bits: exact for every value, subnormals included (the interpreter's conversion loses those)."""
    return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def dot_bf16(a, b, acc=None):
    """``a @ b`` of bf16 tiles in fp32, plus ``acc``."""
    if EMULATED:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)

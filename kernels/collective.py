"""A stand-in for a collective on one GPU: one program that waits for a stated time while the stream waits for it.

What ranks exchange behind attention and behind the experts costs latency, not bandwidth, at a few tokens (8.3 µs for a
fused all-reduce of GLM-5.2 at TP8, sgl-project/sglang#30959). The launch is an ordinary one: it begins when its
predecessor has completed and its successor begins when it has, as with a real exchange. No byte is moved; times are
modelled, and reports name the kernel ``collective_standin_kernel``.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from workbench.kernels.contract import EMULATED, expect, require

#: Longest stand-in, ns: a mistake in units shall not hang the device.
LONGEST_NS = 10_000_000


@triton.jit
def collective_standin_kernel(out_ptr, nanoseconds):
    waited = nanoseconds.to(tl.int64)
    if not EMULATED:
        begun = tl.extra.cuda.globaltimer()
        waited = begun - begun
        while waited < nanoseconds:
            waited = tl.extra.cuda.globaltimer() - begun
    tl.store(out_ptr, waited)


def collective_standin(out: torch.Tensor, nanoseconds: int) -> None:
    """Wait ``nanoseconds`` on the device, in stream order; ``out`` int64[1] gets the time waited.

    ``%globaltimer`` ticks every 32 ns to 1 µs, so a wait is up to a tick longer. Raises InputError before launch.
    """
    expect("collective_standin", "out", out, torch.int64, (1,))
    require("collective_standin", 0 < nanoseconds <= LONGEST_NS, f"{nanoseconds} ns is not between 1 and {LONGEST_NS}")
    collective_standin_kernel[(1,)](out, nanoseconds, num_warps=1)

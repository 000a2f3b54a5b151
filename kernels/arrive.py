"""The last program to arrive reduces: how a split kernel ends without a second launch.

Source: the semaphore split-K of CUTLASS and Triton's stream-K tutorials. Partial sums are stored, the barrier and
the acquire-release add order them before the count, and the last arriver reads them past L1 (``.cg``) in a fixed
order, so that a result does not depend on which program came last.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr, arrivals):
    """Count this program in. True for the last of ``arrivals``, which also resets the counter for the next launch."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    last = before == arrivals - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last

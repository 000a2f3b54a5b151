"""Kernels that tell the device's clock: needs Triton at import, so ``workbench.probes.marker`` imports it late.

``%globaltimer`` counts nanoseconds (in steps of 32 on an H200) and is the one clock that every kernel can read. No
reference, byte model or tuning space: they compute nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def clock_stamp(out):  # type: ignore[no-untyped-def]
    """Store ``%globaltimer`` twice: out int64 [2], when the kernel starts and just before it ends. One program."""
    tl.store(out, globaltimer())
    tl.store(out + 1, globaltimer())


@triton.jit
def clock_edge(out):  # type: ignore[no-untyped-def]
    """As ``clock_stamp``, under another name: instruments tell the stamps of their own capture by theirs."""
    tl.store(out, globaltimer())
    tl.store(out + 1, globaltimer())


@triton.jit
def clock_pulse(out, length_ns):  # type: ignore[no-untyped-def]
    """Keep one program an SM busy for ``length_ns``, most of it waiting for memory: counters of busy SMs see it as well
    as those of stalled warps. out int64 [programs, 2], start and end of each; the time of an earlier pulse, or 0."""
    program = tl.program_id(0)
    start = globaltimer()
    now = start
    while now < start + length_ns:
        # What is there is earlier than now: the loop goes on when it has come.
        now = tl.maximum(globaltimer(), tl.load(out + 2 * program, volatile=True))
    tl.store(out + 2 * program, start)
    tl.store(out + 2 * program + 1, globaltimer())


@triton.jit
def clock_echo(request, reply, count, limit_ns):  # type: ignore[no-untyped-def]
    """Answer the host: when ``request`` (host memory, int64 [1]) exceeds i, store ``%globaltimer`` in ``reply[i]``.

    ``reply``: host memory, int64 [count]. Ends after ``count`` answers, or after ``limit_ns`` whatever happens, so that
    a host that died leaves nothing behind. One program.
    """
    deadline = globaltimer() + limit_ns
    index = 0
    while index < count:
        asked = tl.load(request, volatile=True)
        if asked > index:
            # Read in the branch: before it, the load may still be on its way to the host's memory.
            tl.store(reply + index, globaltimer(), cache_modifier=".wt")
            index += 1
        else:
            if globaltimer() > deadline:
                index = count

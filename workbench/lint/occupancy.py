"""How many programs of a kernel one SM can hold, and which resource sets that limit.

The limits are table "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide; the rounding
(registers in units of 256 a warp, warps on four sub-partitions, shared memory in units of 128 bytes with 1 KiB of the
driver's a program) is that of the occupancy calculator in the CUDA toolkit (``cuda_occupancy.h``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.errors import InputError

REGISTERS_PER_PART = 16384
PARTS = 4
REGISTER_UNIT = 256
SHARED_UNIT = 128
RESERVED_SHARED = 1024
"""Bytes of shared memory the driver takes for every program."""


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one SM holds: resident ``warps`` and ``programs`` at most, and bytes of shared memory.

    ``shared_per_program``: the most one program can ask for.
    """

    warps: int
    programs: int
    shared_bytes: int
    shared_per_program: int


LIMITS: Mapping[int, SmLimits] = {
    80: SmLimits(64, 32, 164 << 10, 163 << 10),
    86: SmLimits(48, 16, 100 << 10, 99 << 10),
    89: SmLimits(48, 24, 100 << 10, 99 << 10),
    90: SmLimits(64, 32, 228 << 10, 227 << 10),
    100: SmLimits(64, 32, 228 << 10, 227 << 10),
    103: SmLimits(64, 32, 228 << 10, 227 << 10),
    120: SmLimits(48, 24, 100 << 10, 99 << 10),
    121: SmLimits(48, 24, 100 << 10, 99 << 10),
}
"""By compute capability times ten."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """``programs`` an SM can hold at once; ``share`` of its warps these are; ``limiter``: the resource that runs out.

    Static: a launch can stay below it (too few programs, a cluster, carve-out of shared memory for L1).
    """

    programs: int
    share: float
    limiter: str


def sm_limits(target: int) -> SmLimits:
    """Return the limits of compute capability ``target`` (90, 100 …). Raises InputError for one not in the table."""
    if target not in LIMITS:
        raise InputError(f"target sm_{target}: is unknown", hint=f"one of {', '.join(f'sm_{key}' for key in LIMITS)}")
    return LIMITS[target]


def occupancy(target: int, *, registers: int, shared_bytes: int, num_warps: int) -> Occupancy:
    """Return the residency that ``registers`` a thread and ``shared_bytes`` and ``num_warps`` a program allow.

    Resources that run out together are all named. 0 programs: the kernel cannot be launched.
    """
    limits = sm_limits(target)
    a_warp = -(-max(registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
    a_program = -(-(shared_bytes + RESERVED_SHARED) // SHARED_UNIT) * SHARED_UNIT
    fits = shared_bytes <= limits.shared_per_program
    allowed = {
        "registers": REGISTERS_PER_PART // a_warp * PARTS // num_warps,
        "shared memory": limits.shared_bytes // a_program if fits else 0,
        "warps": limits.warps // num_warps,
        "programs": limits.programs,
    }
    programs = min(allowed.values())
    limiter = " and ".join(name for name, count in allowed.items() if count == programs)
    return Occupancy(programs, programs * num_warps / limits.warps, limiter)

"""What may be said of a trace, and what a check found wrong with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Severity = Literal["info", "warning", "error"]

Claim = Literal[
    "steps",
    "step-time",
    "device-time",
    "kernel-sums",
    "bandwidth",
    "counts",
    "causes",
    "order",
    "counters",
]

CLAIMS: Mapping[Claim, str] = MappingProxyType(
    {
        "steps": "where decode steps begin and end",
        "step-time": "how long a step takes without instruments",
        "device-time": "how long kernels ran, and when the device was busy or idle",
        "kernel-sums": "time by kernel as the sum of durations",
        "bandwidth": "bytes per second of a kernel, from its duration in the trace",
        "counts": "how many kernels and calls there were",
        "causes": "which call launched a kernel, and what the host did in a gap",
        "order": "which of host and device came first: launch delays and launch gaps",
        "counters": "what hardware counters say",
    }
)

FEW = 0.01
"""Share of rows below which a loss does not change what is said of times."""

RESIDUAL_NS = 2_000
"""Clocks that agree better than this need no word."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something wrong, in one line. ``count``: how many rows, or calls, it concerns."""

    id: str
    severity: Severity
    message: str
    count: int = 0
    refuses: tuple[Claim, ...] = ()

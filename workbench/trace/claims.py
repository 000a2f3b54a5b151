"""What may be said of a trace, and what a check found wrong with it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from workbench.trace.bundle import Bundle

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
    """Something wrong, in one line. ``count``: how many rows, or calls, it concerns. ``variants``: those that it
    concerns, the others are as sound as without it; empty: the whole bundle."""

    id: str
    severity: Severity
    message: str
    count: int = 0
    refuses: tuple[Claim, ...] = ()
    variants: tuple[str, ...] = ()

    def concerns(self, variant: str) -> bool:
        """Return whether it says anything about ``variant``."""
        return not self.variants or variant in self.variants

    @property
    def reason(self) -> str:
        """The id, with the variants where it does not concern all."""
        return f"{self.id} ({', '.join(self.variants)})" if self.variants else self.id


def scoped(bundle: Bundle, variant: str | None, checks: Iterable[Check]) -> Iterator[Check]:
    """Yield ``checks`` as those of ``variant`` alone; unchanged where the bundle holds no other, or for None."""
    several = len(bundle.manifest.variants) > 1
    for check in checks:
        if variant is None or not several:
            yield check
        else:
            yield replace(check, message=f"{variant}: {check.message}", variants=(variant,))

"""The verdict on a bundle's trace, before any diagnosis: what is wrong with it, and what may not be said because of it.

Each check has an id, a severity and the claims that it refuses. What was lost of one variant refuses nothing of another
(``Verdict.of``), and what one instrument lost refuses only what rests on it. Nothing here changes a table; a check that
finds nothing wrong is silent. What no check can see (counters that were never asked for, say) is in table ``limits``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from workbench.trace.bundle import Bundle
from workbench.trace.claims import CLAIMS, Check, Claim, Severity
from workbench.trace.launch_checks import graphs, launches, orphans
from workbench.trace.record_checks import clocks, counters, losses, overhead, overlaps, times, window
from workbench.trace.step_checks import steps

__all__ = ["CLAIMS", "Check", "Claim", "Severity", "Verdict", "verdict"]

_RANK: Mapping[Severity, int] = MappingProxyType({"error": 0, "warning": 1, "info": 2})

_JUDGES: tuple[Callable[[Bundle], Iterable[Check]], ...] = (
    window,
    launches,
    orphans,
    graphs,
    overlaps,
    times,
    steps,
    clocks,
    counters,
    overhead,
    losses,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that is wrong with a trace, the worst first."""

    checks: tuple[Check, ...]

    def of(self, variant: str) -> "Verdict":
        """Return the verdict on one variant: the checks that concern it."""
        own = [check for check in self.checks if check.concerns(variant)]
        said = [check.message.removeprefix(f"{variant}: ") if check.variants else check.message for check in own]
        return Verdict(tuple(replace(check, message=text, variants=()) for check, text in zip(own, said, strict=True)))

    @property
    def refusals(self) -> dict[Claim, tuple[str, ...]]:
        """Return the claims that may not be made, each with the ids of the checks that refuse it, and the variants of
        which it may not be made where those are not all."""
        found: dict[Claim, tuple[str, ...]] = {}
        for claim in CLAIMS:
            reasons = tuple(check.reason for check in self.checks if claim in check.refuses)
            if reasons:
                found[claim] = reasons
        return found

    @property
    def severity(self) -> Severity:
        """Return the worst severity; info where nothing is wrong."""
        return self.checks[0].severity if self.checks else "info"

    def allows(self, claim: Claim) -> bool:
        """Return whether ``claim`` may be made: of every variant, unless the verdict is that on one."""
        return claim not in self.refusals

    def lines(self) -> list[str]:
        """Return the verdict in lines: each check, then what may not be said."""
        lines = [f"{check.severity}: {check.message} [{check.id}]" for check in self.checks]
        refused = self.refusals.items()
        return [*lines, *(f"not said: {CLAIMS[claim]} ({', '.join(reasons)})" for claim, reasons in refused)]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        return {
            "severity": self.severity,
            "checks": [
                {
                    "id": check.id,
                    "severity": check.severity,
                    "message": check.message,
                    "count": check.count,
                    "refuses": list(check.refuses),
                    "variants": list(check.variants),
                }
                for check in self.checks
            ],
            "refusals": {claim: list(reasons) for claim, reasons in self.refusals.items()},
        }


def verdict(bundle: Bundle) -> Verdict:
    """Judge ``bundle``: its traced rows, its counters, its clocks and its losses. Raises InputError where a table is
    damaged."""
    checks: list[Check] = []
    for judge in _JUDGES:
        checks += judge(bundle)
    return Verdict(tuple(sorted(checks, key=lambda check: (_RANK[check.severity], check.id))))

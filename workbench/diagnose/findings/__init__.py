"""Detectors: each module looks for one kind of loss or doubt in a bundle and returns findings.

A detector is a function ``(Facts) -> list[Finding]``; ``DETECTORS`` lists them in no particular order.
"""

from collections.abc import Callable

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding, ranked
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict

Detector = Callable[[Facts], list[Finding]]

DETECTORS: tuple[Detector, ...] = ()


def find(bundle: Bundle, variant: str, judged: Verdict | None = None) -> tuple[Finding, ...]:
    """Return all findings about ``variant``, ranked. Raises InputError where there is no such variant."""
    facts = Facts(bundle, variant, judged)
    return ranked([finding for detector in DETECTORS for finding in detector(facts)])

"""A finding: one loss or one doubt, with its evidence, what it is worth in tok/s, and what to try.

The same object is what the terminal, the report, the dashboard and ``--json`` show. Detectors make it
(``workbench.diagnose.findings``); each ``id`` has a page in docs/findings/.
"""

from dataclasses import dataclass
from typing import Any, Literal

from workbench.quantity import Quantity

Severity = Literal["critical", "major", "minor", "note"]
"""critical: what is shown cannot be trusted, or output may be wrong. major: at least a tenth of the tok/s.
minor: less. note: worth knowing, nothing to win by itself."""

Confidence = Literal["high", "medium", "low"]
"""high: seen directly in this bundle. medium: follows from a rule applied to what was seen. low: one of several
readings of the same evidence."""

SEVERITIES: tuple[Severity, ...] = ("critical", "major", "minor", "note")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One row of evidence: a number and where it is in the bundle.

    ``table`` names the bundle's table; ``ids`` are values of that table's key column for the rows meant, the most
    telling first (empty: the whole table, or a table without a key). ``what`` says what the number is.
    """

    what: str
    quantity: Quantity
    table: str = ""
    ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"what": self.what, **self.quantity.to_json(), "table": self.table, "ids": list(self.ids)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about one variant.

    ``id``: kebab-case kind, the name of its page. ``title``: a few words. ``sentence``: what is wrong, in numbers.
    ``cause``: the accounting cause whose time it would give back, if one. ``recoverable``: tok/s gained if it were
    gone, with ``low`` and ``high`` (None: not known, the remedy says how to find out). ``remedy``: what to try first.
    ``location``: call site, kernel or file, where one is known. ``explains``: ids of findings that this one causes.
    ``seen``: it rests on what is there or not (a call in every step), not on a time, so noise of times is no doubt.
    """

    id: str
    severity: Severity
    variant: str
    title: str
    sentence: str
    remedy: str
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    cause: str = ""
    recoverable: Quantity | None = None
    location: str = ""
    explains: tuple[str, ...] = ()
    seen: bool = False

    @property
    def page(self) -> str:
        """The page that explains this kind of finding, relative to the repository."""
        return f"docs/findings/{self.id}.md"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, absent where nothing is known."""
        return {
            "id": self.id,
            "severity": self.severity,
            "variant": self.variant,
            "title": self.title,
            "sentence": self.sentence,
            "cause": self.cause,
            "recoverable": self.recoverable.to_json() if self.recoverable else None,
            "remedy": self.remedy,
            "confidence": self.confidence,
            "location": self.location,
            "explains": list(self.explains),
            "evidence": [row.to_json() for row in self.evidence],
            "page": self.page,
        }


def ranked(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return ``findings`` in the order they are shown: doubts first, then by tok/s, then by severity and id."""

    def key(finding: Finding) -> tuple[bool, float, int, str, str]:
        worth = finding.recoverable.value if finding.recoverable else 0.0
        return (
            finding.severity != "critical",
            -worth,
            SEVERITIES.index(finding.severity),
            finding.id,
            finding.variant,
        )

    return tuple(sorted(findings, key=key))

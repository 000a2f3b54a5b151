"""How often the diagnosis names a planted fault, what it says where there is none, and how good its tok/s are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find
from workbench.faults.case import Case
from workbench.faults.run import Place
from workbench.quantity import Tag
from workbench.trace.bundle import Bundle

SCHEMA = "workbench.faults/1"
NONE = "none"
"""Expected of what looks like a fault and is none: nothing beyond what the clean twin has."""


@dataclass(frozen=True, slots=True)
class Score:
    """One case. ``found``: ids of what was found, ranked. ``rank``: place of the finding that names the fault, from 1.

    ``predicted``: tok/s once the fault is gone, by that finding; ``clean``: tok/s measured without it; ``tag``: what
    the prediction rests on. ``clean_found``: findings about the clean twin that claim a loss. ``why``: the reason where
    the case was not scored.
    """

    case: Case
    found: tuple[str, ...] = ()
    rank: int | None = None
    predicted: float | None = None
    clean: float | None = None
    tag: Tag | None = None
    clean_found: tuple[str, ...] = ()
    why: str = ""

    @property
    def scored(self) -> bool:
        """Whether there was a bundle to score."""
        return not self.why

    @property
    def error(self) -> float | None:
        """What-if error: predicted over clean tok/s, less 1."""
        return self.predicted / self.clean - 1 if self.predicted and self.clean else None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "fault": self.case.name,
            "family": self.case.fault.family,
            "expect": list(self.case.fault.expect),
            "scored": self.scored,
            "why": self.why,
            "rank": self.rank,
            "found": list(self.found),
            "clean_found": list(self.clean_found),
            "predicted_tok_s": self.predicted,
            "clean_tok_s": self.clean,
            "whatif_tag": self.tag,
            "whatif_error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The scores of the suite."""

    scores: tuple[Score, ...]

    @property
    def scored(self) -> tuple[Score, ...]:
        """Cases that had a bundle."""
        return tuple(score for score in self.scores if score.scored)

    def top(self, places: int) -> float | None:
        """Return the share of scored cases whose fault is among the first ``places`` findings; None without cases."""
        if not self.scored:
            return None
        return sum(score.rank is not None and score.rank <= places for score in self.scored) / len(self.scored)

    @property
    def false_findings(self) -> tuple[tuple[str, str, str], ...]:
        """Findings about clean twins, each once: (scenario, clean variant, finding)."""
        rows = [
            (score.case.scenario.name, score.case.fault.clean, found)
            for score in self.scored
            for found in score.clean_found
        ]
        return tuple(dict.fromkeys(rows))

    def whatif_error(self, *tags: Tag) -> float | None:
        """Return the median absolute what-if error of the predictions with one of ``tags``; None without any.

        A measured prediction is the clean twin's own tok/s, so it has no error to speak of.
        """
        errors = [abs(score.error) for score in self.scored if score.error is not None and score.tag in tags]
        return median(errors) if errors else None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "schema": SCHEMA,
            "cases": len(self.scores),
            "scored": len(self.scored),
            "top_1": self.top(1),
            "top_3": self.top(3),
            "false_findings": [list(row) for row in self.false_findings],
            "whatif_error_median": self.whatif_error("estimated"),
            "whatif_error_median_modelled": self.whatif_error("modelled"),
            "scores": [score.to_json() for score in self.scores],
        }


def score_all(places: Iterable[Place]) -> Report:
    """Diagnose every bundle of ``places`` and compare with what was planted. Raises InputError where a bundle is
    damaged."""
    return Report(tuple(score(one) for one in places))


def score(place: Place) -> Score:
    """Score one case."""
    case = place.case
    if place.bundle is None:
        return Score(case, why=place.why)
    with Bundle.open(place.bundle) as bundle:
        name = case.variant if case.trace is None else bundle.manifest.variants[0].name
        if name not in {record.name for record in bundle.manifest.variants}:
            return Score(case, why=f"{place.bundle}: recorded before variant {name!r} was part of the scenario")
        findings = find(bundle, name)
        own = Facts(bundle, name).tok_s
        clean_found, clean = _clean(place, bundle)
        own_found = _of_source(place)
    if case.fault.expect == [NONE]:
        rank = None if {_label(one) for one in findings if _claims(one)} - own_found else 1
        return Score(case, tuple(map(_label, findings)), rank)
    # A real trace has losses of its own, and its findings are set aside: what counts is what the fault added.
    findings = tuple(one for one in findings if case.trace is None or _label(one) not in own_found)
    rank = _rank(case, findings)
    predicted, tag = None, None
    if rank is not None and own is not None and (worth := findings[rank - 1].recoverable) is not None:
        predicted, tag = own.value + worth.value, worth.tag
    return Score(case, tuple(map(_label, findings)), rank, predicted, clean, tag, clean_found)


def _clean(place: Place, bundle: Bundle) -> tuple[tuple[str, ...], float | None]:
    """Return what is found about the clean twin, and its tok/s; for a data fault, what its source already had of it."""
    case = place.case
    if case.trace is not None:
        return tuple(sorted(_of_source(place) & set(case.fault.expect))), None
    twin = case.fault.clean
    if twin not in {record.name for record in bundle.manifest.variants}:
        return (), None
    rate = Facts(bundle, twin).tok_s
    found = find(bundle, twin)
    return tuple(_label(one) for one in found if _claims(one)), rate.value if rate else None


def _of_source(place: Place) -> frozenset[str]:
    """Return what is found about the trace that a data fault is planted in; nothing for faults of a run."""
    if place.case.trace is None or place.clean is None:
        return frozenset()
    with Bundle.open(place.clean) as source:
        return frozenset(_label(one) for one in find(source, source.manifest.variants[0].name))


def names(finding: Finding, expect: Sequence[str]) -> bool:
    """Return whether ``finding`` is one of ``expect``, each an id or id@location."""
    return finding.id in expect or _label(finding) in expect


def _rank(case: Case, findings: Sequence[Finding]) -> int | None:
    for place, finding in enumerate(findings, start=1):
        if names(finding, case.fault.expect):
            return place
    return None


def _claims(finding: Finding) -> bool:
    """Return whether ``finding`` claims a loss or a doubt; a note does neither."""
    return finding.severity != "note"


def _label(finding: Finding) -> str:
    return f"{finding.id}@{finding.location}" if finding.id == "data-quality" else finding.id

"""How often the diagnosis names a planted fault, what it says where there is none, and how good its tok/s are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find, find_in
from workbench.faults.case import Case
from workbench.faults.difference import Added, Half, added, label, threshold
from workbench.faults.run import Place
from workbench.quantity import Tag
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict, verdict

SCHEMA = "workbench.faults/2"
NONE = "none"
"""Expected of what looks like a fault and is none: nothing beyond what the clean twin has."""


@dataclass(frozen=True, slots=True)
class Score:
    """One case. ``found``: ids of what the fault added to its clean twin's findings, ranked by growth; all findings
    where there is no twin. ``rank``: place of the finding that names the fault, from 1; ``absolute``: its place among
    all findings about the variant.

    ``predicted``: tok/s once the fault is gone, by that finding; ``clean``: tok/s measured without it; ``tag``: what
    the prediction rests on. ``false``: what one half of the clean twin's steps has beyond the other half.
    ``clean_found``: findings about the clean twin that claim a loss. ``why``: the reason where the case was not scored.
    """

    case: Case
    found: tuple[str, ...] = ()
    rank: int | None = None
    absolute: int | None = None
    predicted: float | None = None
    clean: float | None = None
    tag: Tag | None = None
    false: tuple[str, ...] = ()
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
            "rank_absolute": self.absolute,
            "found": list(self.found),
            "false_found": list(self.false),
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

    def top(self, places: int, *, absolute: bool = False) -> float | None:
        """Return the share of scored cases whose fault is among the first ``places`` findings that it added;
        ``absolute``: among all findings. None without cases."""
        ranks = [score.absolute if absolute else score.rank for score in self.scored]
        return sum(rank is not None and rank <= places for rank in ranks) / len(ranks) if ranks else None

    @property
    def false_findings(self) -> tuple[tuple[str, str, str], ...]:
        """What one half of a clean twin's steps has beyond the other, each once: (scenario, clean variant, finding)."""
        return self._of_twins("false")

    @property
    def clean_findings(self) -> tuple[tuple[str, str, str], ...]:
        """All findings about clean twins that claim a loss, each once: (scenario, clean variant, finding)."""
        return self._of_twins("clean_found")

    def _of_twins(self, field: str) -> tuple[tuple[str, str, str], ...]:
        rows = [
            (score.case.scenario.name, score.case.fault.clean, found)
            for score in self.scored
            for found in getattr(score, field)
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
            "top_1_absolute": self.top(1, absolute=True),
            "top_3_absolute": self.top(3, absolute=True),
            "false_findings": [list(row) for row in self.false_findings],
            "clean_findings": [list(row) for row in self.clean_findings],
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
        judged = verdict(bundle)
        name = case.variant if case.trace is None else bundle.manifest.variants[0].name
        if name not in {record.name for record in bundle.manifest.variants}:
            return Score(case, why=f"{place.bundle}: recorded before variant {name!r} was part of the scenario")
        own = Facts(bundle, name, judged)
        if case.needs_gpu and own.split is None:
            lost = "its kernels were not" if own.counters_hold else "neither its kernels nor its counters were"
            return Score(case, why=f"{lost} recorded: the steps' times alone name no cause")
        findings = find_in(own)
        twin, clean_findings, false = _clean(place, bundle, judged)
        least = 0.0 if twin is None else threshold(own, twin)
    # A real trace, like a clean rung, has losses of its own: what counts is what the fault added.
    compared = twin is not None or case.trace is not None
    more = added(findings, clean_findings, least) if compared else tuple(Added(one, None) for one in findings)
    if case.fault.expect == [NONE]:
        rank = None if any(_claims(one.finding) for one in more) else 1
        return Score(case, tuple(label(one.finding) for one in more), rank, absolute=rank)
    rank = _rank(case, [one.finding for one in more])
    absolute = _rank(case, findings if case.trace is None else [one.finding for one in more])
    predicted, tag = None, None
    if rank is not None:
        named = more[rank - 1].finding
        predicted, tag = _predicted(named, clean_findings, own, twin), named.recoverable and named.recoverable.tag
    return Score(
        case,
        tuple(label(one.finding) for one in more),
        rank,
        absolute,
        predicted,
        twin.tok_s.value if twin is not None and twin.tok_s else None,
        tag or None,
        false,
        tuple(label(one) for one in clean_findings if _claims(one)) if case.trace is None else (),
    )


def _clean(place: Place, bundle: Bundle, judged: Verdict) -> tuple[Facts | None, tuple[Finding, ...], tuple[str, ...]]:
    """Return the clean twin, its findings, and what differs between the two halves of its clean steps.

    For a data fault: None, the findings about the trace that it was done to, and those of them that are expected.
    """
    case = place.case
    if case.trace is not None:
        found = _of_source(place)
        return None, found, tuple(sorted({label(one) for one in found} & set(case.fault.expect)))
    twin = case.fault.clean
    if twin not in {record.name for record in bundle.manifest.variants}:
        return None, (), ()
    facts = Facts(bundle, twin, judged)
    halves = [Half(bundle, twin, judged, second=second) for second in (False, True)]
    found_in = [find_in(half) for half in halves]
    least = max(threshold(*halves), threshold(*reversed(halves)))
    first, second = found_in
    more = (*added(first, second, least), *added(second, first, least))
    false = [one for one in more if _claims(one.finding)]
    return facts, find_in(facts), tuple(dict.fromkeys(label(one.finding) for one in false))


def _predicted(named: Finding, clean: Sequence[Finding], own: Facts, twin: Facts | None) -> float | None:
    """Return the tok/s that the finding promises: without what it says is lost, less what the twin loses to it too."""
    if named.recoverable is None or own.tok_s is None:
        return None
    rate, worth = own.tok_s.value, named.recoverable.value
    same = [one.recoverable.value for one in clean if label(one) == label(named) and one.recoverable is not None]
    if twin is None or twin.tok_s is None or not same:
        return rate + worth
    # In time a token: what goes is the loss here less the loss there.
    lost = worth / (rate * (rate + worth)) - max(same) / (twin.tok_s.value * (twin.tok_s.value + max(same)))
    left = 1 / rate - lost
    return 1 / left if left > 0 else None


def _of_source(place: Place) -> tuple[Finding, ...]:
    """Return what is found about the trace that a data fault is planted in; nothing for faults of a run."""
    if place.case.trace is None or place.clean is None:
        return ()
    with Bundle.open(place.clean) as source:
        return find(source, source.manifest.variants[0].name)


def names(finding: Finding, expect: Sequence[str]) -> bool:
    """Return whether ``finding`` is one of ``expect``, each an id or id@location."""
    return finding.id in expect or label(finding) in expect


def _rank(case: Case, findings: Sequence[Finding]) -> int | None:
    for place, finding in enumerate(findings, start=1):
        if names(finding, case.fault.expect):
            return place
    return None


def _claims(finding: Finding) -> bool:
    """Return whether ``finding`` claims a loss or a doubt; a note does neither."""
    return finding.severity != "note"

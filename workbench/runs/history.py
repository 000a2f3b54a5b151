"""How a scenario's speed went from run to run."""

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.diagnose.summary import Diagnosis
from workbench.runs.catalogue import RunEntry
from workbench.runs.changes import Change, changes


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One run of one variant: tok/s, accept length, and the median step in ms."""

    run: RunEntry
    tok_s: float
    accept_length: float
    step_p50: float


@dataclass(frozen=True, slots=True)
class Series:
    """One variant of one scenario on one device, in order of time, and where its tok/s changed its level."""

    scenario: str
    device: str
    variant: str
    points: tuple[HistoryPoint, ...]
    changes: tuple[Change, ...]


def history(diagnosed: Sequence[tuple[RunEntry, Diagnosis]]) -> tuple[Series, ...]:
    """Return every series of ``diagnosed`` runs. Runs on different devices are never one series."""
    grouped: dict[tuple[str, str, str], list[HistoryPoint]] = {}
    for entry, diagnosis in sorted(diagnosed, key=lambda item: (item[0].created, item[0].name)):
        for variant in diagnosis.variants:
            point = HistoryPoint(entry, variant.tok_s.value, variant.accept_length.value, variant.step_p50.value)
            grouped.setdefault((entry.scenario, entry.device, variant.name), []).append(point)
    return tuple(
        Series(*key, tuple(points), changes([point.tok_s for point in points if point.tok_s > 0]))
        for key, points in grouped.items()
    )

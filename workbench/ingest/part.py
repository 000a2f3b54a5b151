"""What one file without a time line of its own adds to a bundle: counters, profiled kernels, facts."""

from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.ingest.losses import Losses

Source = Literal["kineto", "nsys", "ncu", "proton", "log", "benchmark"]
"""What made a file; ``manifest.source`` of a bundle that holds nothing else."""

SUMMARY_SOURCES = ("aiperf", "sglang.benchmark", "proton")
"""``source`` of counters that sum up a whole run: one reading each, of no length, at no known time."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CleanStep:
    """What a step takes without a profiler by one line of a log or one result: ns at ``batch`` sequences together.

    ``at_ns``: when, on the file's clock; None where that is not known.
    """

    ns: float
    batch: int
    at_ns: int | None = None


@dataclass(slots=True)
class Part:
    """Rows of one file by table, without ``variant``; times in ns on the file's own clock.

    ``utc_offset_ns`` added to a time gives UTC; None where the file does not say. ``local_time``: its times are of a
    clock on the wall whose offset from UTC it does not state. ``records``: lines, launches or numbers read.
    """

    source: Source
    what: str
    losses: Losses
    tables: dict[str, list[Row]] = field(default_factory=dict)
    limits: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    device: str = ""
    utc_offset_ns: int | None = None
    local_time: bool = False
    clean_steps: list[CleanStep] = field(default_factory=list)
    records: int = 0

    @property
    def span(self) -> tuple[int, int] | None:
        """First start and last end of its counters; None without any."""
        rows = self.tables.get("counters", [])
        return (min(row["start_ns"] for row in rows), max(row["end_ns"] for row in rows)) if rows else None


def limit(instrument: str, what: str, why: str, fallback: str = "", fix: str = "") -> dict[str, str]:
    """Return a row of table ``limits``, without its variant."""
    return {"instrument": instrument, "what": what, "why": why, "fallback": fallback, "fix": fix}


def counter(source: str, name: str, value: float, unit: str, start_ns: int = 0, end_ns: int = 0) -> Row:
    """Return a row of table ``counters`` about the whole engine, without its variant."""
    return {
        "source": source,
        "name": name[:400],
        "start_ns": start_ns,
        "end_ns": end_ns,
        "value": float(value),
        "unit": unit[:60],
    }

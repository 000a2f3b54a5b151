"""What a bundle without a time line says: profiled kernels one by one, or counters of a log, a tree, a benchmark."""

from dataclasses import dataclass
from typing import Any

from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find
from workbench.quantity import Quantity, Tag
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict, verdict

SCHEMA = "workbench.sources/1"
CLIENT = ("aiperf", "sglang.benchmark")


@dataclass(frozen=True, slots=True)
class CounterSummary:
    """One counter over all its samples: how many, median, least and most."""

    source: str
    name: str
    samples: int
    median: Quantity
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """Launches of one name that Nsight Compute replayed; numbers are medians of a launch, None: not collected."""

    name: str
    launches: int
    replay: Quantity | None
    read: Quantity | None
    occupancy: Quantity | None
    registers: int | None
    local_loads: Quantity | None


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """Everything there is to show. ``findings`` are those that need no steps."""

    notes: tuple[str, ...]
    verdict: Verdict
    kernels: tuple[ProfiledKernel, ...]
    counters: tuple[CounterSummary, ...]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "schema": SCHEMA,
            "notes": list(self.notes),
            "verdict": self.verdict.to_json(),
            "kernels": [
                {
                    "name": one.name,
                    "launches": one.launches,
                    "registers": one.registers,
                    **{
                        key: quantity.to_json() if quantity else None
                        for key, quantity in (
                            ("replay", one.replay),
                            ("read", one.read),
                            ("occupancy", one.occupancy),
                            ("local_loads", one.local_loads),
                        )
                    },
                }
                for one in self.kernels
            ],
            "counters": [
                {
                    "source": one.source,
                    "name": one.name,
                    "samples": one.samples,
                    "median": one.median.to_json(),
                    "least": one.least,
                    "most": one.most,
                }
                for one in self.counters
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }


_COUNTERS = """
SELECT source, name, any_value(unit) AS unit, count(*) AS samples, median(value) AS median, min(value) AS least,
       max(value) AS most, min(rowid) AS place
FROM (SELECT *, row_number() OVER () AS rowid FROM counters) WHERE source <> 'ncu'
GROUP BY source, name ORDER BY source, place
"""
_KERNELS = """
WITH value AS (
    SELECT start_ns, end_ns, device,
           max(value) FILTER (name = 'dram__bytes_read.sum') AS read,
           max(value) FILTER (name = 'sm__warps_active.avg.pct_of_peak_sustained_active') AS occupancy,
           max(value) FILTER (regexp_matches(name, 'op_local_ld|mem_local_op_ld|register_spilling$')) AS local_loads
    FROM counters WHERE source = 'ncu' GROUP BY ALL
)
SELECT kernels.name, count(*) AS launches, median(nullif(kernels.end_ns - kernels.start_ns, 0)) AS replay,
       median(read) AS read, median(occupancy) AS occupancy, max(registers) AS registers,
       median(local_loads) AS local_loads
FROM kernels LEFT JOIN value USING (start_ns, end_ns, device) GROUP BY kernels.name ORDER BY sum(end_ns - start_ns) DESC
"""


def has_time_line(bundle: Bundle) -> bool:
    """Return whether kernels or steps of ``bundle`` have a place in time; without, ``summarise`` says what there is."""
    source = bundle.manifest.source
    if source in ("ncu", "log", "benchmark"):
        return False
    return source != "proton" or (bundle.rows("kernels") > 0 and not bundle.rows("lanes"))


def summarise(bundle: Bundle) -> SourceSummary:
    """Return the summary of ``bundle``."""
    judged = verdict(bundle)
    profiled = bundle.manifest.source == "ncu" and bundle.rows("kernels")
    return SourceSummary(
        notes=tuple(bundle.manifest.notes),
        verdict=judged,
        kernels=tuple(_kernel(row) for row in bundle.query(_KERNELS).to_pylist()) if profiled else (),
        counters=tuple(_counter(row) for row in bundle.query(_COUNTERS).to_pylist()),
        findings=find(bundle, bundle.manifest.variants[0].name, judged),
    )


def _counter(row: dict[str, Any]) -> CounterSummary:
    estimate = row["name"].startswith("estimated_")
    tag: Tag = "estimated" if estimate else "measured"
    note = "the engine's own estimate" if estimate else "as its client saw it" if row["source"] in CLIENT else ""
    middle = Quantity(row["median"], row["unit"], tag, note=note)
    return CounterSummary(row["source"], row["name"], row["samples"], middle, row["least"], row["most"])


def _kernel(row: dict[str, Any]) -> ProfiledKernel:
    def measured(key: str, unit: str, factor: float = 1.0) -> Quantity | None:
        value = row[key]
        return None if value is None else Quantity(value * factor, unit, "measured", note="in a replay")

    return ProfiledKernel(
        name=row["name"],
        launches=row["launches"],
        replay=measured("replay", "us", 1e-3),
        read=measured("read", "B"),
        occupancy=measured("occupancy", "%"),
        registers=row["registers"],
        local_loads=measured("local_loads", ""),
    )

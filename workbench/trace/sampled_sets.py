"""Which steps of the sampled pass belong to which set of counters."""

from bisect import bisect

import pyarrow as pa
import pyarrow.compute as pc

from workbench.trace.bursts import SAMPLER


class SampledSets:
    """Which set of counters a sampled step was sampled with: they follow on each other, each over steps of its own."""

    def __init__(self, counters: pa.Table) -> None:
        self._begins: dict[str, list[int]] = {}
        series = counters.filter(pc.starts_with(counters["source"], SAMPLER))
        first = series.group_by(["variant", "source"]).aggregate([("start_ns", "min")]).to_pylist()
        for row in sorted(first, key=lambda row: row["start_ns_min"]):
            self._begins.setdefault(row["variant"], []).append(row["start_ns_min"])

    def of(self, variant: str, kind: str, end_ns: int) -> int:
        """Return the set's number for a step of pass ``kind`` that ends at ``end_ns``; 0 for those of other passes."""
        return bisect(self._begins.get(variant, []), end_ns) if kind == "sampled" else 0

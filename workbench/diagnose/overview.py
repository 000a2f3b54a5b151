"""What can be said of an ingested trace: the verdict, and as far as it allows busy and idle, traced steps, gaps."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.busy import CATEGORIES, Busy, activities, busy, busy_by_step
from workbench.diagnose.gaps import GapCause, explain, gaps
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict, verdict

SCHEMA = "workbench.trace/1"
GAPS = 3


@dataclass(frozen=True, slots=True)
class StepOverview:
    """Steps of one device as traced. ``parts`` are medians in ms by the categories of ``busy``, so need not add up."""

    device: int
    steps: int
    median: Quantity
    shortest: Quantity
    longest: Quantity
    parts: dict[str, Quantity]


@dataclass(frozen=True, slots=True)
class FloorOverview:
    """The byte model of one step: bytes one rank reads, and the time that takes at each roof in ms; all modelled."""

    bytes_per_step: Quantity
    at_roof: tuple[Quantity, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """One ingested trace. What the verdict refuses is left out."""

    device: str
    notes: tuple[str, ...]
    verdict: Verdict
    busy: tuple[Busy, ...]
    steps: tuple[StepOverview, ...]
    gaps: tuple[GapCause, ...]
    floor: FloorOverview | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; absent where nothing is known."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "notes": list(self.notes),
            "verdict": self.verdict.to_json(),
            "busy": [one.to_json() for one in self.busy],
            "steps": [
                {
                    "device": one.device,
                    "steps": one.steps,
                    "median": one.median.to_json(),
                    "shortest": one.shortest.to_json(),
                    "longest": one.longest.to_json(),
                    "median_parts": {name: part.to_json() for name, part in one.parts.items()},
                }
                for one in self.steps
            ],
            "gaps": [cause.to_json() for cause in self.gaps],
            "floor": self.floor
            and {
                "bytes_per_step": self.floor.bytes_per_step.to_json(),
                "at_roof": [roof.to_json() for roof in self.floor.at_roof],
            },
        }


def overview(bundle: Bundle) -> Overview:
    """Return the overview of an ingested ``bundle``."""
    variant = bundle.manifest.variants[0].name
    judged = verdict(bundle)
    timed = judged.allows("device-time")
    by_step = busy_by_step(bundle, variant) if timed and judged.allows("steps") else {}
    explained = activities(bundle, variant) if timed and judged.allows("causes") else ()
    longest = sorted((gap for activity in explained for gap in gaps(activity, GAPS)), key=lambda gap: -gap.ns)
    return Overview(
        device=str(bundle.manifest.device.get("name", "")),
        notes=tuple(bundle.manifest.notes),
        verdict=judged,
        busy=busy(bundle, variant) if timed else (),
        steps=tuple(_steps(device, rows) for device, rows in by_step.items() if rows),
        gaps=tuple(explain(bundle, variant, gap) for gap in longest[:GAPS]),
        floor=_floor(bundle, variant),
    )


def _steps(device: int, rows: tuple[Busy, ...]) -> StepOverview:
    walls = np.array([row.window_ns for row in rows]) / 1e6
    parts = np.array([row.by_category for row in rows]) / 1e6

    def traced(value: float) -> Quantity:
        return Quantity(float(value), "ms", "measured", note="with the profiler on")

    return StepOverview(
        device=device,
        steps=len(rows),
        median=traced(np.median(walls)),
        shortest=traced(walls.min()),
        longest=traced(walls.max()),
        parts={name: traced(np.median(parts[:, column])) for column, name in enumerate(CATEGORIES)},
    )


def _floor(bundle: Bundle, variant: str) -> FloorOverview | None:
    sql = "SELECT sum(read_bytes)::BIGINT AS total, max(width) AS width FROM tensors WHERE variant = ?"
    row = bundle.query(sql, [variant]).to_pylist()[0]
    if not row["total"]:
        return None
    roofs = bundle.query("SELECT name, bytes_per_s, note FROM roofs ORDER BY bytes_per_s DESC").to_pylist()
    note = f"one rank, verify width {row['width']}"
    return FloorOverview(
        Quantity(float(row["total"]), "B", "modelled", note=note),
        tuple(
            Quantity(row["total"] / roof["bytes_per_s"] * 1e3, "ms", "modelled", note=f"{roof['name']}: {roof['note']}")
            for roof in roofs
        ),
    )

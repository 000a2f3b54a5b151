"""Where the traced steps of an engine begin and end on the device, by the marks that it left in its own trace.

A step of an engine that runs in another process is recorded from one arrival of tokens at its client to the next. Its
message path delays the first arrivals of a request and then catches up (SGLang 0.5.17 on an H200: by 3 ms over eight
steps), so a few traced steps hold fewer or more kernels than as many forwards. The marks do not drift.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.diagnose.settings import variant_settings
from workbench.ingest.markers import ENGINE_STEP, parse_marker
from workbench.trace.bundle import Bundle

Ints = npt.NDArray[np.int64]

_MARKS = (
    "SELECT name, thread, start_ns, end_ns FROM host WHERE variant = ? AND category = 'annotation' ORDER BY start_ns"
)

_LAUNCHED = """
SELECT h.thread, h.start_ns AS moment, min(k.start_ns) AS first
FROM host h JOIN kernels k ON k.correlation = h.correlation AND k.variant = h.variant
WHERE h.variant = ? AND h.correlation IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """Start and end of decode steps on the device, ns: from first activity to the next step's first. The last one of a
    trace is left out: whether all of it was recorded, nothing says."""

    start: Ints
    end: Ints


def device_steps(bundle: Bundle, variant: str) -> DeviceSteps | None:
    """Return the traced decode steps of ``variant`` as its engine marked them; None where it is no engine of its own,
    or left no marks."""
    if variant_settings(bundle)[variant]["engine"].get("kind", "workbench") == "workbench":
        return None
    marks = bundle.query(_MARKS, [variant]).to_pylist()
    whole = [mark for mark in marks if mark["name"] == ENGINE_STEP]
    forwards = [(mark, marker) for mark in marks if (marker := parse_marker(str(mark["name"])))]
    launched = bundle.query(_LAUNCHED, [variant]).to_pylist()
    found: list[tuple[int, bool]] = []
    for unit in whole:
        kinds = {marker.kind for mark, marker in forwards if _within(mark["start_ns"], mark["thread"], unit)}
        own = [row for row in launched if _within(row["moment"], row["thread"], unit)]
        if own:
            decodes = bool(kinds & {"decode", "verify"}) and not kinds & {"prefill", "mixed"}
            found.append((min(row["first"] for row in own), decodes))
    found.sort()
    steps = [(first, after) for (first, decodes), (after, _) in pairwise(found) if decodes and after > first]
    if not steps:
        return None
    start, end = np.array(steps, np.int64).T
    return DeviceSteps(start, end)


def _within(moment: int, thread: object, unit: dict[str, Any]) -> bool:
    return bool(thread == unit["thread"] and unit["start_ns"] <= moment < unit["end_ns"])

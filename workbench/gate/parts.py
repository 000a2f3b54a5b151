"""What a traced step is made of: operators or kernels by name, and the time in which none ran, by phase."""

import re
from dataclasses import dataclass
from typing import Literal

from workbench.trace.bundle import Bundle

Kind = Literal["operator", "kernel", "idle"]


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """An operator or kernel, or (``idle``) the time of a phase in which none ran. ``phase`` is empty for kernels."""

    kind: Kind
    name: str
    phase: str

    def __str__(self) -> str:
        where = f" in {self.phase}" if self.phase else ""
        return f"{self.name}{where}"


@dataclass(frozen=True, slots=True)
class Part:
    """``share`` of the traced step time, 0 to 1, and ``calls`` per traced step (0 for idle time)."""

    share: float
    calls: float


# Self time: an operator that calls another does not count it again.
_OPERATORS = """
WITH traced AS (
    SELECT step_id FROM steps WHERE variant = ? AND run_pass = 'traced' AND NOT warmup
), ops AS (
    SELECT host_id, parent_id, name, phase, end_ns - start_ns AS wall
    FROM host JOIN traced USING (step_id) WHERE variant = ? AND category = 'op' AND phase IS NOT NULL
), inner_time AS (
    SELECT parent_id AS host_id, sum(wall) AS wall FROM ops GROUP BY parent_id
)
SELECT name, phase, sum(ops.wall - coalesce(inner_time.wall, 0))::DOUBLE AS time, count(*) AS calls
FROM ops LEFT JOIN inner_time USING (host_id) GROUP BY name, phase
"""
_KERNELS = """
SELECT name, '' AS phase, sum(rows.end_ns - rows.start_ns)::DOUBLE AS time, count(*) AS calls
FROM kernels rows JOIN steps USING (variant, step_id)
WHERE variant = ? AND run_pass = 'traced' AND NOT warmup GROUP BY name
"""
_PHASES = """
SELECT count(*) AS steps, sum(draft_end_ns - start_ns)::DOUBLE AS draft,
       sum(forward_end_ns - draft_end_ns)::DOUBLE AS forward, sum(end_ns - forward_end_ns)::DOUBLE AS verify
FROM steps WHERE variant = ? AND run_pass = 'traced' AND NOT warmup
"""


def parts_of(bundle: Bundle, variant: str) -> dict[PartName, Part]:
    """Return the parts of the traced steps of ``variant``; their shares sum to 1. Empty where nothing was traced.

    Kernels where the run has them, else host operators. Kernels that overlap are counted twice, which makes the time
    outside kernels smaller than it was, below 0 even.
    """
    found = bundle.query(_PHASES, [variant]).to_pylist()[0]
    steps = int(found.pop("steps"))
    wall = sum(found.values()) if steps else 0.0
    if not wall:
        return {}
    kernels = bundle.query(_KERNELS, [variant]).to_pylist()
    if kernels:
        parts = _collect("kernel", kernels, wall, steps)
        rest = 1 - sum(part.share for part in parts.values())
        return {**parts, PartName("idle", "time outside kernels", ""): Part(rest, 0.0)}
    operators = bundle.query(_OPERATORS, [variant, variant]).to_pylist()
    if not operators:
        return {}
    parts = _collect("operator", operators, wall, steps)
    for phase, time in found.items():
        rest = time / wall - sum(part.share for name, part in parts.items() if name.phase == phase)
        parts[PartName("idle", "time outside operators", phase)] = Part(rest, 0.0)
    return parts


def _collect(kind: Kind, rows: list[dict[str, float | str]], wall: float, steps: int) -> dict[PartName, Part]:
    totals: dict[PartName, tuple[float, float]] = {}
    for row in rows:
        name = PartName(kind, plain_name(str(row["name"])), str(row["phase"]))
        time, calls = totals.get(name, (0.0, 0.0))
        totals[name] = (time + float(row["time"]), calls + float(row["calls"]))
    return {name: Part(time / wall, calls / steps) for name, (time, calls) in totals.items()}


def plain_name(name: str) -> str:
    """Return a kernel's name without template arguments, parameters and return type, which differ between builds."""
    if "(anonymous namespace)" in name:
        name = name.replace("(anonymous namespace)", "anonymous")
    if "(" not in name and "<" not in name:
        return name
    plain, depth = [], 0
    for char in name:
        depth += (char in "<(") - (char in ">)")
        if depth <= 0 and char not in ">)":
            plain.append(char)
        if depth == 1 and char == "(":
            break
    words = re.split(r"\s+", "".join(plain).strip())
    return words[-1] or name

"""The kernels of a trace by name: how long any of that name ran, how often, and the shape it was launched with.

Time is the union of the name's intervals on each device, added up over devices. Kernels of two names that overlap count
for both, so the shares of busy time can add up to more than 1.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.diagnose.busy import Busy
from workbench.diagnose.intervals import merge
from workbench.diagnose.kernel_classes import short_name
from workbench.diagnose.load_split import find_hardware
from workbench.diagnose.steps import Ints
from workbench.lint.occupancy import LIMITS, occupancy
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel was launched. ``grid`` and ``block`` as x, y, z; None: the trace does not say.

    ``occupancy``: share of an SM's warps the launch allows: measured where the profiler recorded it, estimated where it
    follows from registers and shared memory, with the resource that sets it in the note.
    """

    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    registers: int | None
    shared_bytes: int | None
    local_bytes: int | None
    occupancy: Quantity | None


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """All executions of one name. ``launch``: the shape most of the time went to, one of ``shapes``.

    ``ns``: union of its intervals. ``busy_share``: of the time in which the devices ran anything. ``in_steps``: how
    many executions belong to a step.
    """

    name: str
    kind: str
    executions: int
    in_steps: int
    ns: int
    busy_share: float
    mean_ns: float
    longest_ns: int
    launch: Launch
    shapes: int

    @property
    def short_name(self) -> str:
        """The name without return type, template arguments and parameters."""
        return short_name(self.name)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; times in ns, measured with the profiler on."""
        return {
            "name": self.name,
            "kind": self.kind,
            "executions": self.executions,
            "in_steps": self.in_steps,
            "ns": self.ns,
            "busy_share": self.busy_share,
            "mean_ns": self.mean_ns,
            "longest_ns": self.longest_ns,
            "shapes": self.shapes,
            "grid": self.launch.grid,
            "block": self.launch.block,
            "registers": self.launch.registers,
            "shared_bytes": self.launch.shared_bytes,
            "local_bytes": self.launch.local_bytes,
            "occupancy_limit": self.launch.occupancy and self.launch.occupancy.to_json(),
        }


_SHAPES = """
SELECT name, max(kind) AS kind, count(*) AS executions, count(step_id) AS in_steps,
       sum((end_ns - start_ns)::HUGEINT)::DOUBLE AS total_ns, max(end_ns - start_ns) AS longest_ns,
       grid_x, grid_y, grid_z, block_x, block_y, block_z, registers, occupancy_limit, local_bytes_per_thread,
       coalesce(shared_bytes, shared_static_bytes + shared_dynamic_bytes) AS shared
FROM kernels WHERE variant = ?
GROUP BY ALL ORDER BY name, total_ns DESC
"""
_TIMES = "SELECT name, device, start_ns, end_ns FROM kernels WHERE variant = ?"


def kernels_by_name(bundle: Bundle, variant: str, busy: tuple[Busy, ...]) -> tuple[NamedKernel, ...]:
    """Return the names of ``variant``, the one that ran longest first. ``busy``: of its devices, for the shares."""
    total = sum(one.busy_ns for one in busy)
    target = _target(bundle)
    unions = _unions(bundle, variant)
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in bundle.query(_SHAPES, [variant]).to_pylist():
        shapes.setdefault(row["name"], []).append(row)
    found = []
    for name, rows in shapes.items():
        executions = sum(row["executions"] for row in rows)
        found.append(
            NamedKernel(
                name=name,
                kind=rows[0]["kind"],
                executions=executions,
                in_steps=sum(row["in_steps"] for row in rows),
                ns=unions[name],
                busy_share=unions[name] / total if total else 0.0,
                mean_ns=sum(row["total_ns"] for row in rows) / executions,
                longest_ns=max(row["longest_ns"] for row in rows),
                launch=_launch(rows[0], target),
                shapes=len(rows),
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.ns, one.name)))


def _unions(bundle: Bundle, variant: str) -> dict[str, int]:
    table = bundle.query(_TIMES, [variant])
    names = table.column("name").combine_chunks().dictionary_encode()
    device, start, end = (table.column(key).to_numpy().astype(np.int64) for key in ("device", "start_ns", "end_ns"))
    _, ordinals = np.unique(device, return_inverse=True)
    code = names.indices.to_numpy().astype(np.int64)
    group = ordinals * max(len(names.dictionary), 1) + code
    order = np.argsort(group, kind="stable")
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    found = dict.fromkeys(names.dictionary.to_pylist(), 0)
    texts = names.dictionary.to_pylist()
    parts: list[Ints] = np.split(order, bounds) if len(order) else []
    for rows in parts:
        starts, ends = merge(start[rows], end[rows])
        found[texts[code[rows[0]]]] += int((ends - starts).sum())
    return found


def _launch(row: dict[str, Any], target: int | None) -> Launch:
    grid, block = (_extent(row, name) for name in ("grid", "block"))
    registers, shared = row["registers"], row["shared"]
    share = None
    if row["occupancy_limit"] is not None:
        share = Quantity(row["occupancy_limit"], "share", "measured")
    elif target is not None and block and registers and shared is not None and row["kind"] == "kernel":
        warps = -(-block[0] * block[1] * block[2] // 32)
        limit = occupancy(target, registers=registers, shared_bytes=shared, num_warps=max(warps, 1))
        share = Quantity(limit.share, "share", "estimated", note=limit.limiter)
    return Launch(grid, block, registers, shared, row["local_bytes_per_thread"], share)


def _extent(row: dict[str, Any], name: str) -> tuple[int, int, int] | None:
    x, y, z = (row[f"{name}_{axis}"] for axis in "xyz")
    return None if x is None or y is None or z is None else (x, y, z)


def _target(bundle: Bundle) -> int | None:
    """Return the compute capability of the trace's device, times ten; None where it is not known."""
    hardware = find_hardware(bundle)
    architecture = hardware.architecture.removeprefix("sm_") if hardware else ""
    return int(architecture) if architecture.isdecimal() and int(architecture) in LIMITS else None

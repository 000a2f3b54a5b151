"""Data faults: what goes wrong between an engine and its bundle, done to the tables of a good one.

Every mutation is deterministic and takes the tables as they are read; nothing else of the bundle changes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError
from workbench.field_errors import suggestion
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.schema import TABLES, arrow_schema, table

Tables = dict[str, pa.Table]
Mutation = Callable[[Tables], None]

SKEW_NS = 400_000
"""By how much ``skew_clock`` moves the device's clock back; launch delays are some 10 us."""

BACK_NS = 3_600 * 10**9
TIMED = ("steps", "sequences", "host", "kernels", "syncs", "counters", "lanes")
"""Tables whose rows have times."""


def drop_kernels(tables: Tables) -> None:
    """Lose every fifth kernel, as a profiler does whose buffers fill up."""
    kernels = tables["kernels"]
    tables["kernels"] = kernels.filter(pa.array(np.arange(kernels.num_rows) % 5 != 2))


def drop_first_kernels(tables: Tables) -> None:
    """Lose the kernels of the first tenth of the time, as CUPTI does when it has just been switched on."""
    kernels = tables["kernels"]
    start = kernels["start_ns"].to_numpy()
    tables["kernels"] = kernels.filter(pa.array(start >= np.quantile(start, 0.1)))


def skew_clock(tables: Tables) -> None:
    """Move the device's clock back, so that kernels begin before they are launched."""
    kernels = tables["kernels"]
    for name in ("start_ns", "end_ns"):
        at = kernels.column_names.index(name)
        kernels = kernels.set_column(at, name, pc.subtract(kernels[name], SKEW_NS))
    tables["kernels"] = kernels


def lose_graph_nodes(tables: Tables) -> None:
    """Lose all kernels of every second graph replay, as a tool does that traces graphs whole."""
    kernels, host = tables["kernels"], tables["host"]
    replays = host.filter(pc.match_substring_regex(host["name"], "GraphLaunch"))["correlation"].to_pylist()
    lost = pa.array(sorted({one for one in replays if one is not None})[::2], pa.int64())
    tables["kernels"] = kernels.filter(pc.invert(pc.fill_null(pc.is_in(kernels["correlation"], lost), False)))


def empty_device(tables: Tables) -> None:
    """Lose every device row, as when another profiler holds CUPTI."""
    tables["kernels"] = tables["kernels"].slice(0, 0)


def stretch_kernel(tables: Tables) -> None:
    """Let one kernel last an hour: a record whose end was damaged."""
    kernels = tables["kernels"]
    ends = kernels["end_ns"].to_numpy().copy()
    ends[len(ends) // 2] += 3_600 * 10**9
    at = kernels.column_names.index("end_ns")
    tables["kernels"] = kernels.set_column(at, "end_ns", pa.array(ends))


def throttle(tables: Tables) -> None:
    """Add what NVML says while a power cap holds the clocks down, over the whole run."""
    _sample(tables, "throttle_sw_power_cap", "flag", lambda _: 1.0)
    _sample(tables, "sm_clock", "Hz", lambda index: (1.2 + 0.01 * (index % 3)) * 1e9)


def zero_counters(tables: Tables) -> None:
    """Add a counter set that reads zero throughout, as one does that the driver would not program."""
    for name in ("dram__bytes_read.sum", "sm__inst_issued.sum"):
        _sample(tables, name, "B", lambda _: 0.0)


def overlap_launches(tables: Tables) -> None:
    """Start the kernels of graph replays 0.5 us before the one ahead of them ends: programmatic dependent launch. No
    fault at all."""
    kernels = tables["kernels"].sort_by([("stream", "ascending"), ("start_ns", "ascending")])
    start, end, stream = (kernels[name].to_numpy().copy() for name in ("start_ns", "end_ns", "stream"))
    launch = pc.fill_null(kernels["correlation"], -1).to_numpy()
    same = (stream[1:] == stream[:-1]) & (launch[1:] == launch[:-1]) & (launch[1:] >= 0)
    behind = np.flatnonzero(same & (end[:-1] - start[:-1] > 1_000)) + 1
    start[behind] = np.minimum(start[behind], end[behind - 1] - 500)
    at = kernels.column_names.index("start_ns")
    tables["kernels"] = kernels.set_column(at, "start_ns", pa.array(np.minimum(start, end)))


def repeat_steps(tables: Tables) -> None:
    """Write every eighth step twice, as a recorder does that retries."""
    steps = tables["steps"]
    again = steps.filter(pa.array(np.arange(steps.num_rows) % 8 == 3))
    first = int(pc.max(steps["step_id"]).as_py() or 0) + 1
    at = steps.column_names.index("step_id")
    again = again.set_column(at, steps.schema.field(at), pa.array(np.arange(first, first + again.num_rows)))
    tables["steps"] = pa.concat_tables([steps, again])


def set_clock_back(tables: Tables) -> None:
    """Set the clock back by BACK_NS halfway through the first sequence, for all that is recorded from then on."""
    steps = tables["steps"]
    own = steps.filter(pc.equal(steps["sequence_id"], pc.min(steps["sequence_id"])))
    moment = int(np.median(own["start_ns"].to_numpy()))
    for name in TIMED:
        rows, ordered = tables[name], table(name).order
        if not rows.num_rows:
            continue
        later = pc.fill_null(pc.greater(rows[ordered[0]], moment), False)
        for column in ordered:
            moved = pc.if_else(later, pc.subtract(rows[column], BACK_NS), rows[column])
            at = rows.column_names.index(column)
            rows = rows.set_column(at, rows.schema.field(at), moved)
        tables[name] = rows


MUTATIONS: Mapping[str, Mutation] = MappingProxyType(
    {
        "drop-kernels": drop_kernels,
        "drop-first-kernels": drop_first_kernels,
        "skew-clock": skew_clock,
        "lose-graph-nodes": lose_graph_nodes,
        "empty-device": empty_device,
        "stretch-kernel": stretch_kernel,
        "throttle": throttle,
        "zero-counters": zero_counters,
        "overlap-launches": overlap_launches,
        "repeat-steps": repeat_steps,
        "set-clock-back": set_clock_back,
    }
)


def mutate(source: Bundle, name: str, out: Path) -> Path:
    """Write ``source`` with mutation ``name`` to the new folder ``out`` and return it. Raises InputError for an unknown
    name."""
    if name not in MUTATIONS:
        raise InputError(f"no mutation {name!r}", hint=suggestion(name, sorted(MUTATIONS)))
    tables = {one: source.table(one) for one in TABLES}
    MUTATIONS[name](tables)
    # Of no scenario: nobody may take it for the recording that it was made from.
    scenario = {**source.manifest.scenario, "name": f"{name}: {source.manifest.scenario.get('name', '')}"}
    manifest = msgspec.structs.replace(source.manifest, scenario=scenario)
    with BundleWriter.create(out, manifest) as writer:
        for one, data in tables.items():
            if data.num_rows:
                writer.append_table(one, data)
    return out


def _sample(tables: Tables, name: str, unit: str, value: Callable[[int], float], samples: int = 50) -> None:
    """Append ``samples`` readings of counter ``name`` over the time of the steps, or of the kernels."""
    timed = tables["steps"] if tables["steps"].num_rows else tables["kernels"]
    first, last = pc.min(timed["start_ns"]).as_py(), pc.max(timed["end_ns"]).as_py()
    moments = np.linspace(first, last, samples + 1).astype(np.int64)
    rows = [
        {
            "source": "planted",
            "name": name,
            "device": 0,
            "start_ns": int(moments[index]),
            "end_ns": int(moments[index + 1]),
            "value": value(index),
            "unit": unit,
        }
        for index in range(samples)
    ]
    added = pa.Table.from_pylist(rows, schema=arrow_schema("counters"))
    tables["counters"] = pa.concat_tables([tables["counters"], added.cast(tables["counters"].schema)])

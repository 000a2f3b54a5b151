"""Read what Nsight Compute measured of single kernels: a report (.ncu-rep), or its CSV.

ncu runs each kernel by itself, again and again until all its counters are read: durations are of such replays, with
clocks fixed and caches flushed unless it was told otherwise, and there is no time line. Rows of ``kernels`` are laid
end to end in the order of profiling so that each has a span to hang counters on; their places in time mean nothing.

Reports are read by NVIDIA's package ``ncu-report`` (proprietary, not needed for CSV). Metric names:
docs.nvidia.com/nsight-compute, metrics reference.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import InputError
from workbench.ingest.losses import Losses
from workbench.ingest.part import Part, Row, limit

PROBE = "ncu"

DURATION = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"
OCCUPANCY = "sm__maximum_warps_per_active_cycle_pct"
_ALIASES = {"gpu__time_duration.avg": DURATION, "gpu__time_duration.max": DURATION}
_SPILLS = (
    "sass__inst_executed_register_spilling",
    "smsp__sass_inst_executed_op_local_ld.sum",
    "smsp__inst_executed_op_local_ld.sum",
)
_LIMITERS = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps",
    "launch__occupancy_limit_blocks": "blocks",
    "launch__occupancy_limit_barriers": "barriers",
}

KEPT = (
    "gpu__time_duration", "gpu__dram_throughput", "gpu__compute_memory_throughput", "dram__", "lts__t_sectors",
    "lts__t_bytes", "lts__throughput", "l1tex__throughput", "sm__throughput", "sm__warps_active", "sm__maximum_warps",
    "sm__cycles_active", "sm__inst_executed", "smsp__inst_executed", "smsp__sass_inst_executed_op_local",
    "smsp__issue_active", "l1tex__t_sectors_pipe_lsu_mem_local", "l1tex__t_bytes_pipe_lsu_mem_local",
    "sass__inst_executed_register_spilling", "sass__inst_executed_shared", "derived__local_spilling",
    "derived__shared_spilling", "launch__waves_per_multiprocessor", "launch__occupancy", "launch__stack_size",
    "smsp__average_warps_issue_stalled",
)  # fmt: skip
"""Metrics that become counters, by the start of their names: a full report has thousands."""


@dataclass(slots=True)
class Launch:
    """One profiled launch: name, sizes, and metrics as (value, unit) in base units (ns, B, %, …)."""

    name: str
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    device: int = 0
    stream: int = 0
    capability: str = ""
    metrics: dict[str, tuple[float, str]] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """Return a metric's value; None where it was not collected."""
        return self.metrics[name][0] if name in self.metrics else None

    def whole(self, name: str) -> int | None:
        """Return a metric's value as an integer that fits int32."""
        value = self.value(name)
        return round(value) if value is not None and 0 <= value < 1 << 31 else None


def launches_part(path: Path, launches: Iterable[Launch], losses: Losses, *, device: str = "") -> Part:
    """Return the part of ``launches``. Raises InputError where there is none."""
    part = Part("ncu", "Nsight Compute", losses, device=device)
    kernels: list[Row] = []
    counters: list[Row] = []
    static: dict[tuple[str, str], Row] = {}
    moment, missing, kept = 0, 0, set[str]()
    for number, launch in enumerate(launches):
        for alias, name in _ALIASES.items():
            if name not in launch.metrics and alias in launch.metrics:
                launch.metrics[name] = launch.metrics[alias]
        duration = launch.value(DURATION)
        missing += duration is None
        end = moment + (round(duration) if duration is not None and 0 <= duration < 1e12 else 0)
        kernels.append(_kernel(launch, number, moment, end))
        for name, (value, unit) in launch.metrics.items():
            if name.startswith(KEPT) and name not in _LIMITERS:
                kept.add(name)
                row = {"source": PROBE, "name": name[:400], "device": launch.device, "start_ns": moment, "end_ns": end}
                counters.append(row | {"value": value, "unit": unit[:60]})
        static.setdefault((launch.name, launch.capability), _static(launch))
        moment = end
    if not kernels:
        raise InputError(f"{path}: nothing to read (no profiled kernel in it)", hint="profile at least one kernel")
    counters.sort(key=lambda row: (row["start_ns"], row["end_ns"]))
    part.tables = {"kernels": kernels, "counters": counters, "static": list(static.values())}
    part.records = len(kernels)
    part.notes = [
        f"{len(kernels)} launches that Nsight Compute replayed one by one: durations are of replays, and their places "
        "in time mean nothing"
    ]
    part.limits = list(_limits(kept, missing, len(kernels)))
    return part


def _kernel(launch: Launch, number: int, start: int, end: int) -> Row:
    row: Row = {
        "kernel_id": number,
        "name": launch.name[:4096],
        "kind": "kernel",
        "device": launch.device,
        "stream": launch.stream,
        "start_ns": start,
        "end_ns": end,
        "registers": launch.whole(REGISTERS),
        "shared_static_bytes": launch.whole("launch__shared_mem_per_block_static"),
        "shared_dynamic_bytes": launch.whole("launch__shared_mem_per_block_dynamic"),
        "shared_bytes": launch.whole("launch__shared_mem_per_block"),
        "occupancy_limit": _share(launch.value(OCCUPANCY)),
    }
    for side, sizes in (("grid", launch.grid), ("block", launch.block)):
        row |= dict(zip((f"{side}_x", f"{side}_y", f"{side}_z"), sizes or (None, None, None), strict=True))
    return row


def _static(launch: Launch) -> Row:
    limits = {name: launch.value(metric) for metric, name in _LIMITERS.items()}
    known = {name: value for name, value in limits.items() if value is not None}
    return {
        "kernel": launch.name[:4096],
        "target": f"sm_{launch.capability.replace('.', '')}" if launch.capability else "unknown",
        "registers": launch.whole(REGISTERS),
        "shared_bytes": launch.whole("launch__shared_mem_per_block_static"),
        "occupancy_limit": _share(launch.value(OCCUPANCY)),
        "limiter": min(known, key=lambda name: known[name]) if known else None,
    }


def _share(percent: float | None) -> float | None:
    return percent / 100 if percent is not None and 0 <= percent <= 100 else None


def _limits(kept: set[str], missing: int, launches: int) -> Iterable[dict[str, str]]:
    why = "Nsight Compute runs kernels by themselves"
    yield limit("steps", "decode steps, launch gaps, waits", why, "", "trace with nsys or torch.profiler")
    yield limit("kernels", "when kernels ran", why, "launches laid end to end in the order of profiling", "")
    yield limit(
        "kernels",
        "durations within a run",
        "each is of a replay: clocks fixed and caches flushed before it, unless ncu was told otherwise",
        "the replay's duration",
        "ncu --cache-control none --clock-control none",
    )
    if missing:
        what = f"durations of {missing} of {launches} launches"
        yield limit("kernels", what, f"{DURATION} was not collected", "", f"ncu --metrics {DURATION},…")
    if not any(name.startswith("dram__bytes") for name in kept):
        yield limit(PROBE, "DRAM bytes", "dram__bytes_* were not collected", "", "ncu --set full, or --metrics")
    if not any(name.startswith("sm__warps_active") for name in kept):
        yield limit(PROBE, "occupancy achieved", "sm__warps_active.* was not collected", "", "ncu --set full")
    if not any(name.startswith(_SPILLS) for name in kept):
        fix = "ncu --section InstructionStats --section SourceCounters"
        yield limit(PROBE, "register spills", "no counter of local loads was collected", "", fix)


BASE_UNITS = {
    "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12,
    "byte/second": 1.0, "kbyte/second": 1e3, "mbyte/second": 1e6, "gbyte/second": 1e9, "tbyte/second": 1e12,
    "byte/s": 1.0, "kbyte/s": 1e3, "mbyte/s": 1e6, "gbyte/s": 1e9, "tbyte/s": 1e12,
    "byte/block": 1.0, "kbyte/block": 1e3, "mbyte/block": 1e6,
}  # fmt: skip
"""ncu prints values in the unit that reads best; this brings them to ns, bytes and bytes a second."""


def in_base_unit(value: float, unit: str) -> tuple[float, str]:
    """Return value and unit in base units; as they are where the unit has no other."""
    plain = unit.strip()
    factor = BASE_UNITS.get(plain.lower())
    if factor is None:
        return value, plain
    first, _, per = plain.lower().partition("/")
    base = "B" if first.endswith("byte") else "ns"
    return value * factor, f"{base}/{'s' if per.startswith('s') else per}" if per else base


def number(value: Any) -> float | None:
    """Return a metric's value as printed or as stored; None for what is no finite number."""
    try:
        found = float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if abs(found) < 1e300 else None

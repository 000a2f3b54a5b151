"""Counters as tracks: those that every step is read by first, then power and clock, then the rest by name."""

import re
from collections.abc import Iterator

from workbench.timeline.read import columns, groups, ints, place
from workbench.timeline.samples import Samples
from workbench.timeline.track import SampleTrack, Weight
from workbench.trace.bundle import Bundle

MAIN = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"dram_read|dram__bytes_read|dram__sectors_read",
        r"dram_write|dram__bytes_write|dram__sectors_write",
        r"ctas_per_sm|ctas_active",
        r"warps_active",
        r"sm_active|sm__cycles_active",
        r"stalled_long_scoreboard",
        r"instructions_per_cycle",
        r"^power",
        r"^(sm|graphics)_clock$",
    )
)
"""Counters that are drawn by default, in their order."""

LABELS = {
    "dram_read_bytes": "HBM read",
    "dram_write_bytes": "HBM write",
    "ctas_per_sm": "CTAs per SM",
    "warps_active": "warps resident",
    "sm_active": "SMs active",
    "stalled_long_scoreboard": "warps waiting for memory, a scheduler",
    "stalled_short_scoreboard": "warps waiting for shared memory, a scheduler",
    "instructions_per_cycle": "instructions a cycle, an SM",
    "tensor_active": "tensor pipes active",
    "l2_hit": "L2 hits",
    "local_read_bytes": "local memory read",
    "local_write_bytes": "local memory written",
    "sm_clock": "SM clock",
    "mem_clock": "memory clock",
    "memory_used": "memory used",
    "pcie_rx": "PCIe received",
    "pcie_tx": "PCIe sent",
    "pcie_read_bytes": "PCIe reads by the device",
    "pcie_write_bytes": "PCIe writes by the device",
    "ecc_corrected": "corrected ECC errors",
    "ecc_uncorrected": "uncorrected ECC errors",
}
BYTE_UNITS = ("B", "bytes", "byte")
SECTOR_BYTES = 32

_COUNTERS = """
SELECT source, name, rank, device, unit, start_ns, end_ns, value FROM counters
WHERE (variant = $1 OR variant IS NULL) AND isfinite(value) AND (source <> 'ncu' OR end_ns > start_ns)
"""
"""Without medians over a kernel's replays, which have no place in time."""


def read_counters(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[SampleTrack]:
    """Yield a track a counter, device and rank."""
    table = columns(bundle, _COUNTERS, [variant])
    if not table.num_rows:
        return
    made = []
    found = list(groups(table, ("source", "name", "rank", "device", "unit"), left_out, "counters"))
    # What the first set has is not drawn again by default for a set that has it, too.
    first = {name for (source, name, *_), _ in found if ", " not in source}
    for (source, name, rank, device, unit), rows in found:
        start, end = ints(rows, "start_ns"), ints(rows, "end_ns")
        value = rows.column("value").to_numpy()
        order = next((at for at, pattern in enumerate(MAIN) if pattern.search(str(name))), len(MAIN))
        whose = str(source).partition(", ")[2]
        weight = _weight(str(unit), order < len(MAIN) and not (whose and name in first))
        if unit in BYTE_UNITS and (end > start).all():
            value, unit = value / (end - start), "GB/s"
        elif str(unit).startswith("sector") and (end > start).all():
            value, unit = SECTOR_BYTES * value / (end - start), "GB/s"
        elif unit == "Hz":
            value, unit = value / 1e6, "MHz"
        elif unit in BYTE_UNITS:
            value, unit = value / 1e9, "GB"
        elif unit == "B/s":
            value, unit = value / 1e9, "GB/s"
        track = SampleTrack(
            f"counter:{source}:{name}:{device}:{rank}",
            f"{LABELS.get(str(name), str(name).replace('_', ' '))}{place(device, rank)}"
            + (f" (set {whose})" if whose else ""),
            "counters",
            Samples(start, end, value),
            unit,
            weight,
        )
        made.append(((order, str(source) == "nvml", str(name), whose, str(device)), track))
    for _, track in sorted(made, key=lambda one: one[0]):
        yield track


def _weight(unit: str, main: bool) -> Weight:
    if unit == "flag":
        return "flag"
    if unit == "errors":
        return "errors"
    return "main" if main else "other"

"""The counters the sampler can read, as named sets that fit one hardware pass, and what their raw values mean.

A GPU counts only so many things at once, so a set is one repetition of the scenario. Each reading names the metrics
that yield it, best first: the sidecar takes the first that the chip knows and that still fits the pass. Metric names
as in CUPTI 13.4's metric library; which sets return samples was seen on GH100 (H200, driver 580.159, CUDA 13.0).

Traps: ``dramc__sectors`` are 32-byte sectors; ``.pct`` of a throughput or ratio metric is a fraction, not a percent,
so none is used here; ``sm__ctas_active.avg`` adds up over cycles, so CTAs per SM are its quotient by the cycles. Every
cause of stalls needs two passes but the two of the vendor's set, which go by its own names, and next to them nothing
else of an SM is accepted. Beside the registers allocated, warps read 0 throughout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import InputError

Values = npt.NDArray[np.float64]

CYCLES = "sm_cycles"
"""Cycles of an average SM in the sample: what summed-over-cycles counters are divided by. Not a row of its own."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One hardware metric, and what its value is multiplied by to give the reading."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One quantity. ``per_cycle``: its raw value adds up over cycles and is divided by ``CYCLES``.

    ``per_warp_slot``: divided by the warps an SM can hold as well. ``additive``: a longer sample has more of it, as of
    bytes; otherwise its mean over time is what counts.
    """

    name: str
    unit: str
    metrics: tuple[Metric, ...]
    meaning: str
    per_cycle: bool = False
    per_warp_slot: bool = False
    additive: bool = False


@dataclass(frozen=True, slots=True)
class CounterSet:
    """Readings that are taken together; those that do not fit are dropped from the end.

    ``vendor_set``: part of the name of the vendor's own single-pass set that the readings are scheduled in; empty:
    scheduled freely.
    """

    name: str
    meaning: str
    readings: tuple[Reading, ...]
    vendor_set: str = ""

    def reading(self, name: str) -> Reading:
        """Return the reading called ``name``; KeyError where the set has none."""
        return {reading.name: reading for reading in self.readings}[name]


SECTOR_BYTES = 32.0
SMS_PER_TPC = 2.0
TENSOR_PIPES = 4.0
"""Tensor pipes of an SM, whose cycles the real-time metric adds up: 4.0 a cycle was its most during large products."""


_CYCLES = Reading(CYCLES, "cycles", (Metric("sm__cycles_elapsed.avg"),), "cycles of an average SM", additive=True)
_DRAM_READ = Reading(
    "dram_read_bytes",
    "B",
    (
        Metric("dramc__sectors_op_read.sum", SECTOR_BYTES),
        Metric("dram__bytes_read.sum"),
        Metric("dram__sectors_read.sum", SECTOR_BYTES),
    ),
    "bytes read from device memory",
    additive=True,
)
_DRAM_WRITE = Reading(
    "dram_write_bytes",
    "B",
    (
        Metric("dramc__sectors_op_write.sum", SECTOR_BYTES),
        Metric("dram__bytes_write.sum"),
        Metric("dram__sectors_write.sum", SECTOR_BYTES),
    ),
    "bytes written to device memory",
    additive=True,
)
_CTAS = Reading(
    "ctas_per_sm",
    "CTAs/SM",
    (Metric("sm__ctas_active.avg"), Metric("tpc__ctas_active_realtime.avg", 1 / SMS_PER_TPC)),
    "CTAs resident on an average SM",
    per_cycle=True,
)
_SM_ACTIVE = Reading(
    "sm_active",
    "share",
    (Metric("sm__cycles_active.avg"),),
    "cycles in which an average SM held at least one warp",
    per_cycle=True,
)
_WARPS = Reading(
    "warps_active",
    "share",
    (Metric("tpc__warps_active_shader_cs_realtime.avg", 1 / SMS_PER_TPC), Metric("sm__warps_active.avg")),
    "resident warps of an average SM, of those it can hold: achieved occupancy, idle SMs included",
    per_cycle=True,
    per_warp_slot=True,
)
_PCIE = tuple(
    Reading(f"pcie_{way}_bytes", "B", (Metric(f"pcie__{way}_bytes.sum"),), f"PCIe bytes, {way}", additive=True)
    for way in ("read", "write")
)
_NVLINK = tuple(
    Reading(f"nvlink_{way}_bytes", "B", (Metric(f"nvl{way}__bytes.sum"),), f"NVLink bytes, {way}", additive=True)
    for way in ("rx", "tx")
)
_TENSOR = Reading(
    "tensor_active",
    "share",
    (
        Metric("sm__pipe_tensor_cycles_active_realtime.avg", 1 / TENSOR_PIPES),
        Metric("sm__pipe_tensor_cycles_active.avg"),
    ),
    "cycles in which an average SM's tensor pipes were busy",
    per_cycle=True,
)
_L2_HIT = Reading(
    "l2_hit",
    "share",
    (Metric("lts__average_t_sector_hit_rate_realtime.ratio"),),
    "sectors found in L2, of those looked up; no row where none were",
)
_INSTRUCTIONS = Reading(
    "instructions_per_cycle",
    "instructions/cycle",
    (Metric("sm__inst_executed_realtime.avg"), Metric("sm__inst_executed.avg")),
    "warp instructions an average SM executed a cycle, 4 at most",
    per_cycle=True,
)
_STALLS = tuple(
    Reading(
        f"stalled_{cause}",
        "warps/scheduler",
        (
            Metric(f"SM_C.TriageCompute.smsp__warps_issue_stalled_{cause}.avg"),
            Metric(f"smsp__warps_issue_stalled_{cause}.avg"),
        ),
        f"warps of an average scheduler that wait for {what}",
        per_cycle=True,
    )
    for cause, what in (("long_scoreboard", "global or local memory"), ("short_scoreboard", "shared memory or the XU"))
)
_REGISTERS = Reading(
    "registers_allocated",
    "registers/SM",
    (Metric("tpc__sm_rf_registers_allocated_shader_cs_realtime.avg", 1 / SMS_PER_TPC),),
    "registers allocated on an average SM",
    per_cycle=True,
)
_LOCAL = tuple(
    Reading(
        f"local_{word}_bytes",
        "B",
        (
            Metric(f"l1tex__t_sectors_pipe_lsu_mem_local_op_{op}.sum", SECTOR_BYTES),
            Metric(f"l1tex__t_sectors_pipe_lsu_mem_local_op_{op}_realtime.sum", SECTOR_BYTES),
            Metric(f"l1tex__t_bytes_pipe_lsu_mem_local_op_{op}.sum"),
        ),
        f"local memory {what} through L1: register spills, and arrays indexed at run time",
        additive=True,
    )
    for word, op, what in (("read", "ld", "loads"), ("write", "st", "stores"))
)

_ALL = (_CYCLES, _DRAM_READ, _DRAM_WRITE, _CTAS, _SM_ACTIVE, _WARPS, *_PCIE, _TENSOR, _L2_HIT, _INSTRUCTIONS)

SETS: Mapping[str, CounterSet] = MappingProxyType(
    {
        chosen.name: chosen
        for chosen in (
            CounterSet(
                "traffic",
                "what a step moves and how full the SMs are",
                (_CYCLES, _DRAM_READ, _DRAM_WRITE, _CTAS, _SM_ACTIVE, _WARPS, *_PCIE),
            ),
            CounterSet(
                "pipes",
                "what the SMs do with it",
                (_CYCLES, _DRAM_READ, _DRAM_WRITE, _CTAS, _WARPS, _TENSOR, _L2_HIT, _INSTRUCTIONS),
            ),
            CounterSet("local", "spill traffic", (_CYCLES, *_LOCAL, _WARPS)),
            CounterSet(
                "stalls",
                "why warps do not issue; nothing else of an SM fits beside it",
                (_CYCLES, *_STALLS),
                vendor_set="TriageCompute",
            ),
            CounterSet(
                "links",
                "traffic between GPUs; nothing on a machine with one GPU",
                (_CYCLES, *_NVLINK, *_PCIE, _SM_ACTIVE),
            ),
            CounterSet(
                "whole",
                "traffic, pipes and stalls at once, in the vendor's single-pass set for compute",
                (*_ALL, *_STALLS, _REGISTERS),
                vendor_set="TriageCompute",
            ),
        )
    }
)
"""Every set by name. Without its last readings, a set is still worth sampling. Each has a reading that says when SMs
are busy, by which it is placed on the run's clock, and told from one that counts nothing."""


def counter_set(name: str) -> CounterSet:
    """Return the set called ``name``; InputError where there is none."""
    if name not in SETS:
        raise InputError(f"counter set {name!r} is not known", hint=f"one of {', '.join(SETS)}")
    return SETS[name]


def plan(chosen: CounterSet, left_out: int = 0) -> dict[str, Any]:
    """Return ``chosen`` as the sidecar is told it, without its last ``left_out`` readings."""
    readings = chosen.readings[: len(chosen.readings) - left_out]
    return {
        "set": chosen.name,
        "vendor_set": chosen.vendor_set,
        "readings": [
            {"name": reading.name, "metrics": [metric.name for metric in reading.metrics]} for reading in readings
        ],
    }


def normalise(
    chosen: CounterSet, metrics: Mapping[str, str], raw: Mapping[str, Values], warps_per_sm: int
) -> Iterator[tuple[Reading, Values]]:
    """Yield each reading but the cycles with its values in ``Reading.unit``, one a sample.

    ``metrics``: the metric the sidecar took for each reading; ``raw``: its values, shape (samples,). A quotient by zero
    cycles, like a rate of nothing, is NaN.
    """
    cycles = raw.get(CYCLES)
    for name, metric in metrics.items():
        reading = chosen.reading(name)
        if name == CYCLES:
            continue
        values = raw[name] * next(known.scale for known in reading.metrics if known.name == metric)
        if reading.per_cycle:
            if cycles is None:
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                values = values / cycles / (warps_per_sm if reading.per_warp_slot else 1)
        yield reading, values

"""Files with a time line of device work: whichever tool wrote them, the same columns, and what they cannot tell."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from workbench.ingest import environment, proton, unknown
from workbench.ingest.bounded import Limits
from workbench.ingest.kineto import KinetoTrace, read_kineto
from workbench.ingest.launches import GRAPH_LAUNCH, named
from workbench.ingest.nsys import GRAPH, SYNC, NsysTrace, read_nsys
from workbench.ingest.part import Source, limit
from workbench.ingest.sniff import Format
from workbench.ingest.steps import FoundSteps

_SINCE_1970_NS = 10**18
"""Times above this count from 1970: 2001 and later."""


@dataclass(frozen=True, slots=True)
class TimeLine:
    """One trace. ``what`` wrote it; ``utc_offset_ns`` added to its times gives UTC, None where that is not known.

    ``unknown(found, modelled_bytes)`` gives the rows of ``limits``; ``counters(variant)`` further rows of ``counters``.
    """

    source: Source
    what: str
    trace: KinetoTrace
    utc_offset_ns: int | None
    unknown: Callable[[FoundSteps, bool], list[dict[str, str]]]
    counters: Callable[[str], Iterator[pa.Table]]


def read_time_line(path: Path, format_: Format, limits: Limits) -> TimeLine:
    """Read ``path``, a file of one of TIME_LINES. Raises InputError where it cannot be used."""
    return TIME_LINES[format_](path, limits)


def _kineto(path: Path, limits: Limits) -> TimeLine:
    trace = read_kineto(path, limits)
    offset = environment.base_ns(trace.header)
    if offset is None:
        starts = [column["start"].min() for column in (trace.host, trace.device) if len(column["start"])]
        offset = 0 if starts and min(starts) > _SINCE_1970_NS else None

    def missing(found: FoundSteps, modelled_bytes: bool) -> list[dict[str, str]]:
        return list(unknown.unknown(trace, found, modelled_bytes=modelled_bytes))

    return TimeLine("kineto", "torch.profiler", trace, offset, missing, _none)


def _nsys(path: Path, _limits: Limits) -> TimeLine:
    export = read_nsys(path)

    def missing(found: FoundSteps, modelled_bytes: bool) -> list[dict[str, str]]:
        return list(_nsys_limits(export, found, modelled_bytes=modelled_bytes))

    return TimeLine("nsys", "Nsight Systems", export.trace, export.utc_offset_ns, missing, export.metrics.tables)


def _proton(path: Path, limits: Limits) -> TimeLine:
    trace = proton.read_proton_trace(path, limits)

    def missing(_found: FoundSteps, _modelled_bytes: bool) -> list[dict[str, str]]:
        return proton.trace_limits()

    return TimeLine("proton", "Triton's Proton", trace, None, missing, _none)


def _none(_variant: str) -> Iterator[pa.Table]:
    return iter(())


TIME_LINES: Mapping[Format, Callable[[Path, Limits], TimeLine]] = {
    "kineto": _kineto,
    "nsys": _nsys,
    "proton-trace": _proton,
}
"""Readers of formats with a time line."""


def _nsys_limits(export: NsysTrace, found: FoundSteps, *, modelled_bytes: bool) -> Iterator[dict[str, str]]:
    """Yield what an export does not hold: by its format, its version, or what was asked for."""
    trace, asked = export.trace, "nsys was not asked for it"
    yield limit("steps", "step time without instruments", "nsys was on", "the traced step", "measure without it")
    if any(step.committed is None for step in found.steps) or not found.steps:
        yield limit("steps", "accept length", "Nsight Systems does not record it", "", "ingest the engine's log too")
    if export.metrics.reads_memory:
        why = "GPU metrics are whole percents of the peak"
        yield limit("pm_sampler", "bytes read, exactly", why, "percent times the peak stated", "workbench attach")
    elif export.metrics.series:
        yield limit("pm_sampler", "bytes read", "the sampled set has no DRAM reads", "", "--gpu-metrics-set")
    else:
        fallback = "bytes of the byte model over step time, tagged modelled" if modelled_bytes else ""
        yield limit("pm_sampler", "HBM throughput, occupancy measured", asked, fallback, "--gpu-metrics-devices=all")
    if SYNC not in export.tables:
        yield limit("syncs", "waits of streams", "no synchronisation was recorded", "calls that wait on the host", "")
    if export.whole_graphs or (GRAPH not in export.tables and _no_nodes(trace)):
        fix = "nsys profile --cuda-graph-trace=node"
        fallback = "a replay is one row" if export.whole_graphs else ""
        yield limit("kernels", "kernels inside graph replays", "graphs were traced whole", fallback, fix)
    if not np.any(trace.host["category"] == 3):
        yield limit("steps", "marks of steps", "no NVTX range was recorded", "replays, or kernels that repeat", "")
    if len(trace.device["start"]):
        for column, what in (
            ("localMemoryPerThread", "local memory of a thread"),
            ("graphNodeId", "nodes of CUDA graphs"),
            ("clusterX", "sizes of clusters"),
        ):
            if column not in export.columns:
                yield limit("kernels", what, "this version of the export does not hold it", "", "a newer nsys")
        yield limit("kernels", "occupancy limit", "Nsight Systems does not work it out", "from resources", "")


def _no_nodes(trace: KinetoTrace) -> bool:
    """Return whether graphs were replayed and no row says that it is part of one."""
    nodes = trace.device["graph_node"]
    return bool(len(named(trace, GRAPH_LAUNCH))) and not bool((nodes > 0).any()) and not _covered(trace)


def _covered(trace: KinetoTrace) -> bool:
    """Return whether some row carries the correlation of a replay."""
    calls: Any = trace.host["correlation"][named(trace, GRAPH_LAUNCH)]
    return bool(np.isin(trace.device["correlation"], calls[calls >= 0]).any())

"""Kernels, waits and host calls by torch.profiler (Kineto) on CUDA, read by the same reader as foreign traces.

Never started before the clean passes are over: a process that has profiled can stay slower (pytorch#146604). Tracing
the nodes of a graph stretches the step, 1.3 to 2.4 times: names, order and launch shapes are what it is for.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from workbench.ingest import environment
from workbench.ingest.columns import Ints
from workbench.ingest.kineto import HOST_CATEGORIES, KinetoTrace, read_kineto
from workbench.ingest.launches import match_launches
from workbench.ingest.steps import FoundSteps
from workbench.ingest.tables import Tables
from workbench.lint.occupancy import LIMITS, occupancy
from workbench.probes.host import MARKER, place_host, take_marks
from workbench.probes.marker import KERNELS, STAMP, Marker
from workbench.probes.marker_brackets import stamp_brackets
from workbench.probes.protocol import Capture, Missing
from workbench.trace.clocks import Bracket, Fit, fit

RUNNER_COLUMNS = ("variant", "step_id", "phase")
"""Columns of the reader's tables that only the runner knows."""

NO_LOCAL = Missing(
    "kernels",
    "local memory per thread of each launch",
    "Kineto does not write it",
    fallback="table static: local memory of the binaries, where they are known",
    fix="nsys or ncu write it",
)


class KernelsProbe:
    """Records launches, kernels, copies and waits of one device. ``marker`` ties the device's clock to ours.

    ``host``: keep operators and annotations; else only the runtime calls, which kernels are joined to. A probe is for
    one capture.
    """

    name = "kernels"

    def __init__(self, marker: Marker | None = None, *, host: bool = True) -> None:
        self._marker, self._host = marker, host
        self._profiler: Any = None
        self._readings: list[tuple[int, int]] = []
        self._begin: list[Bracket] = []

    def available(self) -> Missing | None:
        """Needs torch with Kineto and CUDA activities: no second profiler may hold CUPTI."""
        what = "kernel times, launch gaps and waits"
        if find_spec("torch") is None:
            return Missing(self.name, what, "torch is not installed", fix="pip install 'decode-workbench[decode]'")
        import torch

        supported: Any = torch.profiler.supported_activities  # untyped in torch
        activities = [str(one) for one in supported()]
        if not any("CUDA" in one for one in activities):
            return Missing(self.name, what, "this torch was built without CUPTI", fix="use an official CUDA build")
        return None

    def start(self) -> None:
        """Start the profiler, without stacks or shapes: both inflate the gaps being measured."""
        from torch.profiler import ProfilerActivity, profile

        self._begin = self._marker.sync() if self._marker else []
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        self._profiler = profile(activities=activities, acc_events=True, experimental_config=_config())
        self._profiler.__enter__()
        self._readings = take_marks()
        if self._marker:
            self._marker.stamps()  # forget those of before
            self._marker.marks()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Open a ``record_function`` span."""
        import torch

        span: AbstractContextManager[object] = torch.profiler.record_function(name)
        return span

    def stop(self) -> Capture:
        """Stop, export, read back. Raises InputError where the export cannot be read."""
        import torch

        profiler, self._profiler = self._profiler, None
        stamps: list[tuple[int, int]] = []
        try:
            if self._marker:
                self._marker.marks(last=True)
                stamps = self._marker.stamps()
            self._readings += take_marks()
            torch.cuda.synchronize()  # what is still queued belongs to the capture
        finally:
            profiler.__exit__(None, None, None)
        device_clock = self._marker.clock(self._begin) if self._marker else None
        host_residual_ns = self._marker.comparisons.host_residual_ns if self._marker else 0
        with tempfile.TemporaryDirectory(prefix="workbench-kineto-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace = read_kineto(path)
        return capture_of(trace, self._readings, stamps, device_clock, host_residual_ns, host=self._host)


def _config() -> Any:
    """Return the experimental configuration: waits as events of their own. None where this torch has no such option."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(enable_cuda_sync_events=True)
    except TypeError:
        return None


def capture_of(
    trace: KinetoTrace,
    readings: Sequence[tuple[int, int]],
    stamps: Sequence[tuple[int, int]],
    device_clock: Fit | None,
    host_residual_ns: int = 0,
    *,
    host: bool = True,
) -> Capture:
    """Return ``trace`` as tables on the bundle's clock, without what the instrument itself did.

    ``readings``: our clock before and after each MARKER span; ``stamps``: ``%globaltimer`` of each stamp of the marker,
    the first half from the beginning; ``device_clock`` places ``%globaltimer``, and ``host_residual_ns`` is how far the
    host's clock may be from it. Raises InputError where the markers are not in the trace: then nothing can be placed.
    """
    host_fit = _host_fit(trace, readings)
    host_fit = replace(host_fit, residual_ns=host_fit.residual_ns + host_residual_ns)
    missing = [NO_LOCAL]
    device_fit = _device_fit(trace, stamps, device_clock)
    if device_fit is None:
        device_fit = replace(host_fit, residual_ns=host_fit.residual_ns + _early_ns(trace))
        why = "no stamps of the marker kernels in the capture" if stamps else "no marker kernels were run"
        fallback = "Kineto's own alignment of device and host; residual: kernels that begin before their launch"
        missing.append(Missing("kernels", "device clock alignment to 2 us", why, fallback))
    return placed_capture(trace, host_fit, device_fit, missing=missing, host=host)


def placed_capture(
    trace: KinetoTrace, host_fit: Fit, device_fit: Fit, *, missing: Sequence[Missing], host: bool = True
) -> Capture:
    """Return ``trace`` as tables on the bundle's clock; ``host_fit`` places host rows, ``device_fit`` device rows."""
    trace = _placed(_without_markers(trace, host=host), host_fit, device_fit)
    tables = Tables(trace, FoundSteps("none", []), None, _threads_per_sm(trace))
    columns = {
        name: table
        for name, slices in (("kernels", tables.kernels()), ("host", tables.host()), ("syncs", tables.syncs()))
        if (table := _whole(slices)).num_rows
    }
    losses = [_placed_loss(row, host_fit) for row in trace.losses.rows()]
    if "kernels" in columns:
        columns["kernels"] = with_occupancy(columns["kernels"], _capability(trace))
    else:
        losses.append(_no_kernels(trace))
    return Capture(
        {},
        offset_ns=host_fit.offset_ns,
        residual_ns=max(host_fit.residual_ns, device_fit.residual_ns),
        missing=missing,
        losses=losses,
        columns=columns,
        clocks={"host": host_fit, "device": device_fit},
    )


def with_occupancy(kernels: pa.Table, capability: int) -> pa.Table:
    """Return ``kernels`` with ``occupancy_limit`` worked out where the profiler did not: from registers, shared memory
    and threads, for compute capability ``capability`` (90 …). What cannot be known stays null."""
    if capability not in LIMITS:
        return kernels
    names = ("registers", "shared_bytes", "block_x", "block_y", "block_z", "occupancy_limit")
    known: dict[tuple[Any, ...], float | None] = {}
    limits = []
    for row in zip(*(kernels.column(name).to_pylist() for name in names), strict=True):
        if row not in known:
            known[row] = row[-1] if row[-1] is not None else _limit(capability, *row[:-1])
        limits.append(known[row])
    at = kernels.column_names.index("occupancy_limit")
    return kernels.set_column(at, "occupancy_limit", pa.array(limits, pa.float64()))


def _limit(capability: int, registers: int | None, shared: int | None, *block: int | None) -> float | None:
    if registers is None or shared is None or None in block:
        return None
    threads = int(np.prod([size for size in block if size is not None]))
    if not 1 <= threads <= 1024:
        return None
    found = occupancy(capability, registers=registers, shared_bytes=shared, num_warps=-(-threads // 32))
    return found.share if found.programs else None


def _host_fit(trace: KinetoTrace, readings: Sequence[tuple[int, int]]) -> Fit:
    return place_host(readings, trace.host["start"][_named(trace, trace.host["name"], {MARKER})].tolist())


def _device_fit(trace: KinetoTrace, stamps: Sequence[tuple[int, int]], device_clock: Fit | None) -> Fit | None:
    if device_clock is None:
        return None
    rows = np.flatnonzero(_named(trace, trace.device["name"], {STAMP}))
    rows = rows[np.argsort(trace.device["start"][rows], kind="stable")]
    spans = list(zip(trace.device["start"][rows].tolist(), trace.device["end"][rows].tolist(), strict=True))
    half = len(stamps) // 2
    ends = [stamp_brackets(spans, part, device_clock) for part in (stamps[:half], stamps[half:])]
    begin, end = ends[0] or ends[1], ends[1] if ends[0] else []  # the profiler may lose the first kernels
    if not begin:
        return None
    placed = fit(begin, end)
    return replace(placed, residual_ns=placed.residual_ns + device_clock.residual_ns)


def _early_ns(trace: KinetoTrace) -> int:
    """Return by how much a kernel begins before its launch, at most: what host and device clocks disagree by."""
    launches = match_launches(trace)
    rows = np.flatnonzero(launches >= 0)
    early = trace.host["start"][launches[rows]] - trace.device["start"][rows]
    return max(0, int(early.max())) if len(early) else 0


def _named(trace: KinetoTrace, codes: Ints, names: set[str] | frozenset[str]) -> Any:
    wanted = [code for code, name in enumerate(trace.names) if name in names]
    return np.isin(codes, wanted)


def _without_markers(trace: KinetoTrace, *, host: bool) -> KinetoTrace:
    """Drop marker spans, marker kernels and their launches; unless ``host``, all host rows but runtime calls."""
    ours = _named(trace, trace.device["name"], KERNELS)
    calls = trace.device["correlation"][ours]
    runtime = trace.host["category"] == HOST_CATEGORIES.index("runtime")
    dropped = _named(trace, trace.host["name"], {MARKER}) | (runtime & np.isin(trace.host["correlation"], calls))
    if not host:
        dropped |= ~runtime
    return replace(trace, device=_rows(trace.device, ~ours), host=_rows(trace.host, ~dropped))


def _placed(trace: KinetoTrace, host_fit: Fit, device_fit: Fit) -> KinetoTrace:
    def moved(columns: dict[str, Ints], by: Fit) -> dict[str, Ints]:
        return columns | {name: by.place_all(columns[name]) for name in ("start", "end")}

    return replace(
        trace,
        device=moved(trace.device, device_fit),
        host=moved(trace.host, host_fit),
        syncs=moved(trace.syncs, host_fit),
    )


def _rows(columns: dict[str, Ints], kept: Any) -> dict[str, Ints]:
    return {name: values[kept] for name, values in columns.items()}


def _whole(slices: Iterator[pa.Table]) -> pa.Table:
    parts = list(slices)
    return pa.concat_tables(parts, promote_options="permissive").drop_columns(RUNNER_COLUMNS) if parts else pa.table({})


def _threads_per_sm(trace: KinetoTrace) -> dict[int, int]:
    return {
        ordinal: most
        for ordinal, entry in environment.devices(trace.header).items()
        if type(most := entry.get("maxThreadsPerMultiprocessor")) is int and most > 0
    }


def _capability(trace: KinetoTrace) -> int:
    """Return the first device's compute capability times ten, 0 where the trace does not say."""
    for entry in environment.devices(trace.header).values():
        major, minor = entry.get("computeMajor"), entry.get("computeMinor")
        if type(major) is int and type(minor) is int:
            return major * 10 + minor
    return 0


def _placed_loss(row: dict[str, Any], host_fit: Fit) -> dict[str, Any]:
    """Return a row of losses without the reader's name, its times on the bundle's clock."""
    times = {name: None if row[name] is None else host_fit.place(row[name]) for name in ("first_ns", "last_ns")}
    return {name: value for name, value in (row | times).items() if name != "probe"}


def _no_kernels(trace: KinetoTrace) -> dict[str, Any]:
    launches = int((trace.host["category"] == HOST_CATEGORIES.index("runtime")).sum())
    return {
        "kind": "no-device-rows",
        "count": max(1, launches),
        "first_ns": None,
        "last_ns": None,
        "severity": "data_loss",
        "detail": f"{launches} runtime calls and no kernel: another profiler holds CUPTI, or nothing ran",
    }

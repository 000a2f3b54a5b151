"""Read an SQLite export of Nsight Systems (``nsys export --type sqlite``) into the columns of a trace.

Tables exist only where something of their kind was recorded, and columns change with the version: each is looked up by
name, and what a version does not have is unknown. Times are ns since the session began. Tables and columns:
docs.nvidia.com/nsight-systems, exporter schema.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.ingest.columns import Columns, Ints, Names
from workbench.ingest.kineto import HOST_CATEGORIES, KinetoTrace
from workbench.ingest.kineto_events import MISSING
from workbench.ingest.losses import Losses
from workbench.ingest.nsys_metrics import Metrics, read_metrics
from workbench.ingest.nsys_session import note_rest, session_header, start_time
from workbench.ingest.sqlite_file import SqliteFile

PROBE = "nsys"

KERNEL, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
SYNC, GRAPH = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX, OVERHEAD, STRINGS = "NVTX_EVENTS", "PROFILER_OVERHEAD", "StringIds"

_KNOWN = {KERNEL, RUNTIME, MEMCPY, MEMSET, SYNC, GRAPH, NVTX}
DEVICE_COLUMNS = (
    "name",
    "kind",
    "start",
    "end",
    "device",
    "stream",
    "correlation",
    "graph_id",
    "graph_node",
    "grid_x",
    "grid_y",
    "grid_z",
    "block_x",
    "block_y",
    "block_z",
    "cluster_x",
    "cluster_y",
    "cluster_z",
    "registers",
    "shared",
    "shared_static",
    "shared_dynamic",
    "local",
    "bytes",
    "blocks_per_sm",
)
_SMALL = (*DEVICE_COLUMNS[9:19], "device")
"""Columns that a table holds as int32."""

_SPAN = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphId", "graphNodeId")
_LAUNCH = (
    "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "clusterX", "clusterY", "clusterZ", "registersPerThread",
    "sharedMemoryExecuted", "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread",
)  # fmt: skip
_COPIES = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
_MEMORY = dict(enumerate(("Pageable", "Pinned", "Device", "Array", "Managed", "Device", "Managed")))
_VERSION = re.compile(r"_v\d+$")


@dataclass(slots=True)
class NsysTrace:
    """An export in columns, its counters, and what the file holds. ``header`` is laid out as torch.profiler's."""

    trace: KinetoTrace
    metrics: Metrics
    utc_offset_ns: int | None
    tables: frozenset[str]
    columns: frozenset[str]
    whole_graphs: int


def is_nsys(tables: Iterable[str]) -> bool:
    """Return whether a database with these tables is an export of Nsight Systems."""
    names = set(tables)
    return STRINGS in names and bool(names & (_KNOWN | {"TARGET_INFO_GPU", "META_DATA_EXPORT", "GPU_METRICS"}))


def read_nsys(path: Path) -> NsysTrace:
    """Read the export in ``path``.

    Raises InputError where it is no SQLite database, not from Nsight Systems, or holds neither GPU work nor calls. A
    damaged or cut-off file is read as far as it goes; ``losses`` says what is missing.
    """
    losses = Losses(PROBE)
    file = SqliteFile(path, losses)
    try:
        if not is_nsys(file.tables):
            raise InputError(
                f"{path}: is an SQLite database, but not from Nsight Systems",
                hint="name what nsys export --type sqlite wrote",
            )
        return _Reader(path, file, losses).read()
    finally:
        file.close()


class _Reader:
    def __init__(self, path: Path, file: SqliteFile, losses: Losses) -> None:
        self._path = path
        self._file = file
        self._losses = losses
        self._names = Names()
        self._strings: dict[int, str] = {}
        self._device = Columns(*DEVICE_COLUMNS)
        self._host = Columns("name", "category", "start", "end", "process", "thread", "correlation")
        self._syncs = Columns("name", "kind", "start", "end", "device", "stream", "correlation")
        self._processes: dict[int, int] = {}
        self._rows = 0

    def read(self) -> NsysTrace:
        for block in self._file.rows(STRINGS, ("id", "value")):
            self._strings.update((key, text) for key, text in block if type(key) is int and isinstance(text, str))
        self._read_kernels()
        self._read_copies()
        graphs = self._read_graphs()
        self._read_host()
        self._read_syncs()
        header = session_header(self._file, self._strings)
        metrics = read_metrics(self._file, self._losses)
        note_rest(self._file, self._losses)
        if not self._device.rows and not self._host.rows and not metrics.samples:
            raise InputError(
                f"{self._path}: nothing to read (no CUDA activity, calls, NVTX or GPU metrics in it)",
                hint="profile with nsys profile --trace=cuda,nvtx",
            )
        trace = KinetoTrace(
            names=self._names.texts,
            device=self._device.finish(),
            host=self._host.finish(),
            syncs=self._syncs.finish(),
            marks={name: np.zeros(0, np.int64) for name in ("name", "start", "end", "device", "stream")},
            counters=[],
            header=header,
            threads={},
            losses=self._losses,
            events=self._rows + metrics.samples,
        )
        return NsysTrace(
            trace=trace,
            metrics=metrics,
            utc_offset_ns=start_time(self._file),
            tables=frozenset(self._file.tables),
            columns=self._file.tables.get(KERNEL, frozenset()),
            whole_graphs=graphs,
        )

    def _read_kernels(self) -> None:
        wanted = (*_SPAN, *_LAUNCH, "demangledName", "shortName", "mangledName")
        for block in self._file.rows(KERNEL, wanted):
            self._add_device(block, 0, [self._first_name(row[-3:]) for row in block], launch=True)

    def _first_name(self, ids: Sequence[Any]) -> str:
        """Return the first of these names that is there: an id of a string, or in old versions the text itself."""
        for one in ids:
            text = one if isinstance(one, str) else self._strings.get(one) if type(one) is int else None
            if text:
                return text
        return "(name lost)"

    def _read_copies(self) -> None:
        for block in self._file.rows(MEMCPY, (*_SPAN, "bytes", "copyKind", "srcKind", "dstKind")):
            names = []
            for *_, kind, source, target in block:
                ends = [
                    _MEMORY[end] if type(end) is int and 0 <= end < len(_MEMORY) else "" for end in (source, target)
                ]
                detail = f" ({ends[0]} -> {ends[1]})" if all(ends) else ""
                names.append(f"Memcpy {_COPIES.get(kind, 'of an unknown kind')}{detail}")
            self._add_device(block, 1, names)
        for block in self._file.rows(MEMSET, (*_SPAN, "bytes")):
            self._add_device(block, 2, ["Memset (Device)"] * len(block))

    def _read_graphs(self) -> int:
        """Add replays that were traced whole as one row each; return how many."""
        before = self._device.rows
        for block in self._file.rows(GRAPH, _SPAN):
            graphs = [row[6] if type(row[6]) is int else "?" for row in block]
            self._add_device(block, 0, [f"CUDA graph {graph} (a whole replay)" for graph in graphs])
        return self._device.rows - before

    def _add_device(self, block: list[tuple[Any, ...]], kind: int, names: list[str], *, launch: bool = False) -> None:
        self._rows += len(block)
        start, end, device, stream, correlation, process, graph, node = (self._ints(block, at) for at in range(8))
        columns = {name: np.full(len(block), MISSING, np.int64) for name in DEVICE_COLUMNS}
        columns |= {"start": start, "end": end, "device": device, "graph_id": graph, "graph_node": node}
        columns["stream"] = np.where(stream == MISSING, 0, stream)
        columns["correlation"] = self._correlation(correlation, process)
        columns["kind"] = np.full(len(block), kind, np.int64)
        columns["name"] = self._names.codes(names, len(block))
        if launch:
            given = [self._ints(block, 8 + at) for at in range(len(_LAUNCH))]
            columns |= dict(zip(DEVICE_COLUMNS[9:18], given[:9], strict=True))
            columns["registers"], executed, static, dynamic, local = given[9:]
            columns |= {"shared_static": static, "shared_dynamic": dynamic, "local": local}
            both = (static != MISSING) & (dynamic != MISSING)
            columns["shared"] = np.where(both, static + np.where(both, dynamic, 0), executed)
            for axis in "xyz":  # 0: not launched in clusters
                sizes = columns[f"cluster_{axis}"]
                columns[f"cluster_{axis}"] = np.where(sizes == 0, MISSING, sizes)
        elif kind:
            columns["bytes"] = self._ints(block, 8)
        for name in _SMALL:
            columns[name] = self._small(columns[name])
        usable = self._timed(start, end, "device rows") & (columns["device"] >= 0)
        self._lose("no-device", "device rows without a usable device", int((columns["device"] < 0).sum()))
        self._device.add({name: values[usable] for name, values in columns.items()})

    def _read_host(self) -> None:
        calls = ("start", "end", "globalTid", "correlationId", "nameId")
        for block in self._file.rows(RUNTIME, calls):
            texts = [_VERSION.sub("", self._strings.get(row[4], "")) or "(name lost)" for row in block]
            self._add_host(block, "runtime", texts, self._ints(block, 3))
        open_ranges = 0
        for block in self._file.rows(NVTX, ("start", "end", "globalTid", "text", "textId")):
            ranges = [row for row in block if row[1] is not None]
            open_ranges += len(block) - len(ranges)
            self._add_host(ranges, "annotation", [self._first_name(row[3:5]) for row in ranges], None)
        self._lose("not-kept-nvtx", "NVTX marks, and ranges without an end", open_ranges, "info")
        for block in self._file.rows(OVERHEAD, ("start", "end", "globalTid", "nameId")):
            self._add_host(block, "overhead", [self._first_name(row[3:4]) for row in block], None)

    def _add_host(
        self, block: list[tuple[Any, ...]], category: str, names: list[str], correlation: Ints | None
    ) -> None:
        if not block:
            return
        self._rows += len(block)
        start, end, thread = (self._ints(block, at) for at in range(3))
        known = np.where(thread == MISSING, 0, thread)
        process = (known >> 24) & 0xFFFFFF
        columns = {
            "name": self._names.codes(names, len(block)),
            "category": np.full(len(block), HOST_CATEGORIES.index(category), np.int64),
            "start": start,
            "end": end,
            "process": process,
            "thread": known & 0xFFFFFF,
            "correlation": np.full(len(block), MISSING, np.int64),
        }
        if correlation is not None:
            columns["correlation"] = self._correlation(correlation, known & ~np.int64(0xFFFFFF))
        usable = self._timed(start, end, "host rows")
        self._host.add({name: values[usable] for name, values in columns.items()})

    def _read_syncs(self) -> None:
        fields = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "syncType")
        for block in self._file.rows(SYNC, fields):
            self._rows += len(block)
            start, end, device, stream, correlation, process, kind = (self._ints(block, at) for at in range(7))
            columns = {
                "name": self._names.codes(["CUDA synchronisation"] * len(block), len(block)),
                "kind": np.where(kind == MISSING, 0, kind) - 1,
                "start": start,
                "end": end,
                "device": self._small(device),
                "stream": np.where(stream >= 1 << 31, MISSING, stream),  # of no stream
                "correlation": self._correlation(correlation, process),
            }
            known = (kind >= 1) & (kind <= 4)
            self._lose("unknown-sync", "synchronisations of an unknown kind", int((~known).sum()))
            usable = known & self._timed(start, end, "synchronisations")
            self._syncs.add({name: values[usable] for name, values in columns.items()})

    def _correlation(self, correlation: Ints, process: Ints) -> Ints:
        """Return correlations that are unique over processes: the first process keeps its own."""
        result = correlation.copy()
        for one in np.unique(process[process != MISSING]).tolist():
            number = self._processes.setdefault(int(one) & ~0xFFFFFF, len(self._processes))
            if number:
                own = (process == one) & (correlation >= 0) & (correlation < 1 << 40)
                result[own] += number << 40
        return result

    def _ints(self, block: list[tuple[Any, ...]], at: int) -> Ints:
        """Return a column as integers. SQLite keeps what it is given, whatever a column was declared as."""
        values = [row[at] for row in block]
        if set(map(type, values)) <= {int}:
            return np.array(values, np.int64)
        wrong = sum(value is not None and type(value) is not int for value in values)
        self._lose("unusable-field", "values that are no integers", wrong)
        return np.array([value if type(value) is int else MISSING for value in values], np.int64)

    def _timed(self, start: Ints, end: Ints, what: str) -> Any:
        usable = (start != MISSING) & (end != MISSING) & (end >= start) & (start > -(1 << 61)) & (end < 1 << 61)
        self._lose("unusable-time", f"{what} without usable times", int((~usable).sum()))
        return usable

    def _small(self, values: Ints) -> Ints:
        outside = (values != MISSING) & ((values < 0) | (values >= 1 << 31))
        self._lose("integer-out-of-range", "integers beyond 32 bits: left out", int(outside.sum()))
        return np.where(outside, MISSING, values)

    def _lose(self, kind: str, detail: str, count: int, severity: Any = "data_loss") -> None:
        self._losses.add(kind, severity, detail, count=count)

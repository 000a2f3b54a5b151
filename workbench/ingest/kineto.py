"""Read a trace of torch.profiler (Kineto) into columns: kernels, host rows, synchronisations, counters.

torch 1.13 to 2.14, NVIDIA and ROCm, .json or .json.gz. The file is read once, in chunks; nothing is dropped without a
row in the losses. Times are int64 nanoseconds on the trace's own clock, exact to the last digit written.
"""

from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import numpy as np

from workbench.errors import InputError
from workbench.ingest.bounded import Limits, read_blocks
from workbench.ingest.columns import Columns, Ints
from workbench.ingest.event_columns import EventColumns, Events
from workbench.ingest.json_stream import EventReader
from workbench.ingest.kineto_events import (
    EXACT_BELOW_US,
    MISSING,
    Args,
    Event,
    ExactEvent,
    decode_counters,
    decode_event,
    decode_events,
    decode_exact_events,
    microseconds_to_ns,
)
from workbench.ingest.losses import Losses, Severity

PROBE = "kineto"

DEVICE_KINDS = ("kernel", "memcpy", "memset")
"""Kinds of device rows; the column ``kind`` holds the index."""

HOST_CATEGORIES = ("op", "python", "runtime", "annotation", "overhead")
"""Categories of host rows; the column ``category`` holds the index."""

SYNC_KINDS = ("event", "stream_wait", "stream", "context")
"""Kinds of synchronisation; the column ``kind`` holds the index."""

# Capitalised names are those of versions before 1.13, some of which live on in forks.
_DEVICE = {"kernel": 0, "Kernel": 0, "gpu_memcpy": 1, "Memcpy": 1, "gpu_memset": 2, "Memset": 2}
_HOST = {
    "cpu_op": 0,
    "Operator": 0,
    "python_function": 1,
    "cuda_runtime": 2,
    "cuda_driver": 2,
    "hip_runtime": 2,
    "xpu_runtime": 2,
    "xpu_driver": 2,
    "Runtime": 2,
    "user_annotation": 3,
    "overhead": 4,
}
_SYNC = {"Event Sync": 0, "Stream Wait Event": 1, "Stream Sync": 2, "Context Sync": 3}
_HOST_FIELDS = frozenset({"ph", "cat", "name", "pid", "tid", "args", "correlation"})
_DEVICE_FIELDS = frozenset(
    {"ph", "cat", "name", "args", *(field.encode_name for field in msgspec.structs.fields(Args))}
)
_FIELDS_USED = dict.fromkeys(_HOST, _HOST_FIELDS)
"""Fields of an event that end up in a table, by category; _DEVICE_FIELDS where it is not here."""

_NOT_KEPT = {
    "cuda_event": "records of CUDA events: the waits for them are kept",
    "Trace": "the profiler's own span",
    "cpu_instant_event": "memory events",
}
_NOT_KEPT_PHASES = {
    "M": "names and order of processes and threads",
    "i": "instant events",
    "s": "arrows: the correlation that they repeat is kept",
    "f": "arrows: the correlation that they repeat is kept",
    "t": "arrows: the correlation that they repeat is kept",
}

_DEVICE_COLUMNS = (
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
    "registers",
    "shared",
    "bytes",
    "blocks_per_sm",
)
_DEVICE_INTEGERS = ("correlation", "device", "stream", "graph_id", "graph_node", "registers", "shared")
_HOST_COLUMNS = ("name", "category", "start", "end", "process", "thread", "correlation")
_SYNC_COLUMNS = ("name", "kind", "start", "end", "device", "stream", "correlation")
_MARK_COLUMNS = ("name", "start", "end", "device", "stream")

_RUNTIME = HOST_CATEGORIES.index("runtime")
_NO_ARGS = Args()


@dataclass(slots=True)
class KinetoTrace:
    """A trace in columns. ``names[code]`` is a name; absent integers are MISSING; rows are in the file's order.
    Readers of other profilers' time lines fill the same columns, and may add to ``device`` (``ingest.tables``).

    ``device`` holds kernels, copies and fills; ``marks`` the annotations as the profiler projected them onto the
    device; ``header`` the members beside the events. ``threads`` names threads whose id is text: their number is
    negative. ``events`` counts the events read, kept or not.
    """

    names: list[str]
    device: dict[str, Ints]
    host: dict[str, Ints]
    syncs: dict[str, Ints]
    marks: dict[str, Ints]
    counters: list[dict[str, Any]]
    header: dict[str, Any]
    threads: dict[int, str]
    losses: Losses
    events: int


def read_kineto(path: Path, limits: Limits = Limits()) -> KinetoTrace:  # noqa: B008
    """Read the trace in ``path``.

    Raises InputError where it is not a trace of torch.profiler, cannot be read, or exceeds ``limits``. A damaged or
    cut-off trace is read as far as it goes; ``losses`` says what is missing.
    """
    return _Collector(path, limits).read()


class _Collector:
    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        self._losses = Losses(PROBE)
        self._convert = EventColumns(self._losses)
        self._device = Columns(*_DEVICE_COLUMNS)
        self._host = Columns(*_HOST_COLUMNS)
        self._syncs = Columns(*_SYNC_COLUMNS)
        self._marks = Columns(*_MARK_COLUMNS)
        self._counters: list[dict[str, Any]] = []
        self._exact = False
        self._text = b""  # of the last chunk, for the counters in it
        blocks = read_blocks(path, self._losses, limits)
        self._reader: EventReader[Event | ExactEvent] = EventReader(
            blocks, self._losses, self._decode_list, self._decode_one, name=str(path)
        )

    def read(self) -> KinetoTrace:
        for events in self._reader.chunks():
            self._add(events)
        if not self._host.rows and not self._device.rows and not self._counters:
            what = "its list of events is empty" if not self._reader.events else "no event of torch.profiler in it"
            raise InputError(f"{self._path}: nothing to read ({what})", hint="name the file of export_chrome_trace")
        self._lose(
            "name-cut",
            "info",
            "names are kept up to 4096 characters",
            self._convert.names.cut + self._convert.threads.cut,
        )
        return KinetoTrace(
            names=self._convert.names.texts,
            device=self._device.finish(),
            host=self._host.finish(),
            syncs=self._syncs.finish(),
            marks=self._marks.finish(),
            counters=self._counters,
            header=self._header(),
            threads={-1 - number: text for number, text in enumerate(self._convert.threads.texts)},
            losses=self._losses,
            events=self._reader.events,
        )

    def _decode_list(self, text: bytes) -> Events:
        events: Events
        if not self._exact:
            events = decode_events(text)
            # A file counts from one origin, so that a few events tell whether its times need all their digits.
            times = [event.ts for event in (events[:1] + events[len(events) // 2 :][:1] + events[-1:])]
            self._exact = any(type(time) is float and abs(time) >= EXACT_BELOW_US for time in times)
        if self._exact:
            events = decode_exact_events(text)
        self._text = text
        return events

    def _decode_one(self, text: bytes) -> ExactEvent:
        event = decode_event(text)
        self._text = b""
        if event.ph == "C":
            self._add_counters(b"[" + text + b"]")
        used = _FIELDS_USED.get(event.cat, _DEVICE_FIELDS) if event.ph == "X" else frozenset[str]()
        if wrong := used.intersection(event.issues):
            detail = f"left out {', '.join(sorted(wrong))} of an unexpected type: {text[:80]!r}"
            self._lose("unusable-field", "data_loss", detail, len(wrong))
        return event

    def _add(self, events: Events) -> None:
        groups: defaultdict[str, list[Event | ExactEvent]] = defaultdict(list)
        others: defaultdict[str, int] = defaultdict(int)
        for event in events:
            if event.ph == "X":
                groups[event.cat].append(event)
            else:
                others[event.ph] += 1
        for category, group in groups.items():
            if category in _DEVICE:
                self._add_device(group, _DEVICE[category])
            elif category in _HOST:
                self._add_host(group, _HOST[category])
            elif category == "cuda_sync":
                self._add_syncs(group)
            elif category == "gpu_user_annotation":
                self._add_marks(group)
            elif category in _NOT_KEPT:
                self._lose(f"not-kept-{category}", "info", _NOT_KEPT[category], len(group))
            else:
                detail = f"events of unknown categories, such as {category[:60]!r}"
                self._lose("unknown-category", "data_loss", detail, len(group))
        for phase, count in others.items():
            if phase in _NOT_KEPT_PHASES:
                self._lose(f"not-kept-{phase}", "info", _NOT_KEPT_PHASES[phase], count)
            elif phase == "C":
                self._add_counters(self._text)
            else:
                self._lose("unknown-phase", "data_loss", f"events of unknown kinds, such as ph {phase[:20]!r}", count)

    def _add_device(self, events: Events, kind: int) -> None:
        args = [event.args or _NO_ARGS for event in events]
        columns = self._convert.common(events, "device rows", "data_loss")
        columns |= self._convert.integers(args, _DEVICE_INTEGERS)
        columns["kind"] = np.full(len(events), kind, np.int64)
        columns["device"] = self._convert.or_else(columns["device"], [event.pid for event in events], MISSING)
        columns["stream"] = self._convert.or_else(columns["stream"], [event.tid for event in events], 0)
        for side in ("grid", "block"):
            columns |= self._convert.sizes(args, side)
        columns["registers"] = self._convert.small(columns["registers"])
        columns["bytes"] = (
            self._convert.ints([_whole(arg.bytes) for arg in args]) if kind else self._convert.absent(len(events))
        )
        if set(map(type, map(attrgetter("occupancy"), args))) != {NoneType}:
            blocks = [arg.occupancy.blocks if arg.occupancy else MISSING for arg in args]
            columns["blocks_per_sm"] = self._convert.ints(blocks)
        else:
            columns["blocks_per_sm"] = self._convert.absent(len(events))
        usable = columns.pop("usable") & (columns["device"] >= 0) & (columns["device"] < 1 << 31)
        self._lose("no-device", "data_loss", "device rows without a usable device", int((~usable).sum()))
        self._device.add(_where(usable, columns))

    def _add_host(self, events: Events, category: int) -> None:
        columns = self._convert.common(events, "host rows", "data_loss" if category == _RUNTIME else "info")
        columns["category"] = np.full(len(events), category, np.int64)
        columns["process"] = self._convert.thread_ids(list(map(attrgetter("pid"), events)))
        columns["thread"] = self._convert.thread_ids(list(map(attrgetter("tid"), events)))
        columns |= self._convert.integers([event.args or _NO_ARGS for event in events], ("correlation",))
        self._host.add(_where(columns.pop("usable"), columns))

    def _add_syncs(self, events: Events) -> None:
        args = [event.args or _NO_ARGS for event in events]
        columns = self._convert.common(events, "synchronisations", "data_loss")
        columns |= self._convert.integers(args, ("device", "stream", "correlation"))
        kinds = [_sync_kind(arg.sync_kind or event.name) for event, arg in zip(events, args, strict=True)]
        columns["kind"] = np.array(kinds, np.int64)
        columns["device"] = self._convert.small(columns["device"])
        usable = columns.pop("usable") & (columns["kind"] >= 0)
        self._lose("unknown-sync", "data_loss", "synchronisations of an unknown kind", int((columns["kind"] < 0).sum()))
        self._syncs.add(_where(usable, columns))

    def _add_marks(self, events: Events) -> None:
        columns = self._convert.common(events, "annotations on the device", "info")
        columns["device"] = self._convert.thread_ids([event.pid for event in events])
        columns["stream"] = self._convert.thread_ids([event.tid for event in events])
        self._lose("not-kept-device-marks", "info", "annotations projected onto the device: derived", len(events))
        self._marks.add(_where(columns.pop("usable"), columns))

    def _add_counters(self, text: bytes) -> None:
        """Add the counters among the events in ``text``, decoded once more: their arguments have any names."""
        try:
            events = [event for event in decode_counters(text) if event.ph == "C"] if text else []
        except msgspec.ValidationError:
            self._lose("unusable-counter", "data_loss", f"a counter of unexpected types: {text[:80]!r}")
            return
        for event in events:
            ns = microseconds_to_ns(bytes(event.ts))
            values = event.args if isinstance(event.args, dict) else {}
            numbers = {key: float(value) for key, value in values.items() if _is_number(value)}
            if ns is None or not numbers:
                self._lose("unusable-counter", "data_loss", f"a counter without time or value: {event.name[:60]!r}")
                continue
            self._lose(
                "unusable-counter", "data_loss", "counter values that are no numbers", len(values) - len(numbers)
            )
            for key, value in numbers.items():
                name = event.name if len(values) == 1 else f"{event.name}: {key}"
                self._counters.append({"name": name[:400], "process": event.pid, "ns": ns, "value": value})

    def _header(self) -> dict[str, Any]:
        header: dict[str, Any] = {}
        for key, raw in self._reader.header.items():
            try:
                header[key] = msgspec.json.decode(raw)
            except (msgspec.MsgspecError, RecursionError):
                self._lose("header-damaged", "data_loss", f"member {key[:60]!r} cannot be read", 1)
        return header

    def _lose(self, kind: str, severity: Severity, detail: str, count: int = 1) -> None:
        self._losses.add(kind, severity, detail, count=count)


def _whole(value: int | str) -> int:
    if isinstance(value, int):
        return value
    return int(value) if value.isdecimal() and len(value) < 19 else MISSING


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _sync_kind(text: str) -> int:
    for name, kind in _SYNC.items():
        if text.startswith(name):
            return kind
    return -1


def _where(usable: Any, columns: dict[str, Ints]) -> dict[str, Ints]:
    return columns if usable.all() else {name: values[usable] for name, values in columns.items()}

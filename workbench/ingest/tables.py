"""A trace in columns as tables of the bundle, sorted by start, a slice at a time."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workbench.ingest.columns import Ints
from workbench.ingest.kineto import DEVICE_KINDS, HOST_CATEGORIES, SYNC_KINDS, KinetoTrace
from workbench.ingest.kineto_events import MISSING
from workbench.ingest.nesting import parents
from workbench.ingest.steps import FoundSteps, window_of
from workbench.trace.schema import PHASES

VARIANT = "trace"
"""The one variant of an ingested trace."""

SLICE_ROWS = 1 << 14

_SOME_READERS_GIVE = {
    "cluster_x": "cluster_x",
    "cluster_y": "cluster_y",
    "cluster_z": "cluster_z",
    "shared_static_bytes": "shared_static",
    "shared_dynamic_bytes": "shared_dynamic",
    "local_bytes_per_thread": "local",
}
"""Columns of table ``kernels`` that torch.profiler does not have, by the trace's column."""

# Calls that return when the device has done something, by what they wait for. Blocking copies wait for their stream.
_WAITS = (
    (re.compile(r"(?:cuda|hip)EventSynchronize|cuEventSynchronize"), "event"),
    (re.compile(r"(?:cuda|hip)StreamSynchronize\w*|cuStreamSynchronize\w*"), "stream"),
    (re.compile(r"(?:cuda|hip)DeviceSynchronize|cuCtxSynchronize\w*|hipCtxSynchronize"), "context"),
    (
        re.compile(r"(?:cuda|hip)Memcpy(?:2D|3D|ToSymbol|FromSymbol)?|hipMemcpyWithStream|hipMemcpy(?:DtoH|HtoD)"),
        "stream",
    ),
    (re.compile(r"cuMemcpy(?:DtoH|HtoD)_v2"), "stream"),
)


def step_rows(found: FoundSteps) -> list[dict[str, Any]]:
    """Return the rows of table ``steps``. They are traced: the profiler was on."""
    return [
        {
            "variant": VARIANT,
            "run_pass": "traced",
            "step_id": index,
            "index": index,
            "warmup": False,
            "start_ns": step.start,
            "draft_end_ns": step.draft_end,
            "forward_end_ns": step.forward_end,
            "end_ns": step.end,
            "context": step.context,
            "width": step.width,
            "drafted": step.drafted,
            "accepted": step.accepted,
            "committed": step.committed,
            "batch": step.batch,
            "mark": step.mark,
        }
        for index, step in enumerate(found.steps)
    ]


def counter_rows(trace: KinetoTrace) -> list[dict[str, Any]]:
    """Return the rows of table ``counters``; the trace does not say the unit."""
    rows = []
    for row in trace.counters:
        device = re.fullmatch(r"GPU (\d{1,4}) Counters", str(row["process"]))
        rows.append(
            {
                "variant": VARIANT,
                "source": "kineto",
                "name": row["name"],
                "device": int(device[1]) if device else None,
                "start_ns": row["ns"],
                "end_ns": row["ns"],
                "value": row["value"],
                "unit": "",
            }
        )
    return rows


class Tables:
    """The large tables of one trace, as slices to append."""

    def __init__(self, trace: KinetoTrace, found: FoundSteps, rank: int | None, threads_per_sm: dict[int, int]) -> None:
        self._trace = trace
        self._found = found
        self._rank = rank
        self._threads_per_sm = threads_per_sm
        self._texts = pa.array([name.encode("utf-8", "backslashreplace").decode() for name in trace.names], pa.string())
        host = trace.host
        self._host_order = np.lexsort((-host["end"], host["start"]))
        self._host_id = np.empty(len(self._host_order), np.int64)
        self._host_id[self._host_order] = np.arange(len(self._host_order))

    def host(self) -> Iterator[pa.Table]:
        """Yield table ``host``; ``host_id`` counts in order of start."""
        host = self._trace.host
        enclosing = parents(host["start"], host["end"], host["process"], host["thread"])
        parent = np.where(enclosing >= 0, self._host_id[enclosing], MISSING) if len(enclosing) else enclosing
        for rows in _slices(self._host_order):
            yield self._table(
                host["start"][rows],
                {
                    "host_id": _integers(self._host_id[rows]),
                    "parent_id": _integers(parent[rows]),
                    "thread": _integers(host["thread"][rows]),
                    "name": self._texts.take(pa.array(host["name"][rows])),
                    "category": pa.array(HOST_CATEGORIES).take(pa.array(host["category"][rows])),
                    "start_ns": _integers(host["start"][rows]),
                    "end_ns": _integers(host["end"][rows]),
                    "correlation": _integers(host["correlation"][rows]),
                },
            )

    def kernels(self) -> Iterator[pa.Table]:
        """Yield table ``kernels``; ``kernel_id`` counts in order of start."""
        device = self._trace.device
        order = np.lexsort((-device["end"], device["start"]))
        first = 0
        for rows in _slices(order):
            columns = {
                "kernel_id": _integers(np.arange(first, first + len(rows))),
                "name": self._texts.take(pa.array(device["name"][rows])),
                "kind": pa.array(DEVICE_KINDS).take(pa.array(device["kind"][rows])),
                "start_ns": _integers(device["start"][rows]),
                "end_ns": _integers(device["end"][rows]),
                "graph_node": _integers(device["graph_node"][rows]),
                "occupancy_limit": self._occupancy(rows),
                "copied_bytes": _integers(device["bytes"][rows]),
                "shared_bytes": _integers(device["shared"][rows]),
            }
            for name in ("device", "stream", "correlation", "graph_id", "registers"):
                columns[name] = _integers(device[name][rows])
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"):
                columns[name] = _integers(device[name][rows])
            columns |= {
                name: _integers(device[given][rows]) for name, given in _SOME_READERS_GIVE.items() if given in device
            }
            yield self._table(device["start"][rows], columns)
            first += len(rows)

    def syncs(self) -> Iterator[pa.Table]:
        """Yield table ``syncs``: records of the profiler, and calls that wait of which it has no record."""
        host, syncs = self._trace.host, self._trace.syncs
        calls = np.flatnonzero((host["category"] == HOST_CATEGORIES.index("runtime")) & (host["correlation"] > 0))
        by_correlation = dict(zip(host["correlation"][calls].tolist(), calls.tolist(), strict=True))
        rows = []
        for index in range(len(syncs["start"])):
            row = {name: int(column[index]) for name, column in syncs.items()}
            call = by_correlation.get(row["correlation"])
            kind = SYNC_KINDS[row["kind"]]
            waits = call is not None and kind != "stream_wait"
            rows.append(
                {
                    "kind": kind,
                    "name": self._trace.names[host["name"][call] if call is not None else row["name"]],
                    "thread": int(host["thread"][call]) if waits else None,
                    "device": _known(row["device"]),
                    "stream": _known(row["stream"]),
                    "start_ns": row["start"],
                    "end_ns": row["end"],
                    "correlation": _known(row["correlation"]),
                    "host_id": int(self._host_id[call]) if call is not None else None,
                }
            )
        recorded = set(syncs["correlation"].tolist())
        rows += self._waiting_calls(recorded)
        rows.sort(key=lambda row: (row["start_ns"], row["end_ns"]))
        for first in range(0, len(rows), SLICE_ROWS):
            chunk = rows[first : first + SLICE_ROWS]
            columns = {name: pa.array([row[name] for row in chunk]) for name in chunk[0]}
            yield self._table(np.array([row["start_ns"] for row in chunk], np.int64), columns)

    def _waiting_calls(self, recorded: set[int]) -> list[dict[str, Any]]:
        host = self._trace.host
        kinds = {}
        for code, name in enumerate(self._trace.names):
            for pattern, kind in _WAITS:
                if pattern.fullmatch(name):
                    kinds[code] = kind
        runtime = host["category"] == HOST_CATEGORIES.index("runtime")
        found = np.flatnonzero(runtime & np.isin(host["name"], list(kinds)))
        return [
            {
                "kind": kinds[int(host["name"][call])],
                "name": self._trace.names[host["name"][call]],
                "thread": int(host["thread"][call]),
                "device": None,
                "stream": None,
                "start_ns": int(host["start"][call]),
                "end_ns": int(host["end"][call]),
                "correlation": _known(int(host["correlation"][call])),
                "host_id": int(self._host_id[call]),
            }
            for call in found
            if int(host["correlation"][call]) not in recorded
        ]

    def _table(self, starts: Ints, columns: dict[str, Any]) -> pa.Table:
        """Return a slice with the columns that every table has: variant, rank, step and phase."""
        index, phase = window_of(self._found.steps, starts)
        if not self._found.phases:
            phase = np.full_like(phase, -1)
        count = len(starts)
        return pa.table(
            {
                "variant": pa.array([VARIANT] * count, pa.string()),
                "rank": pa.array([self._rank] * count, pa.int32()),
                **columns,
                "step_id": pa.array(index, mask=index < 0),
                "phase": pc.take(pa.array(PHASES), pa.array(np.maximum(phase, 0), mask=phase < 0)),
            }
        )

    def _occupancy(self, rows: Ints) -> pa.Array:
        """Return resident warps the launch allows, of the SM's maximum, where the profiler worked it out."""
        device = self._trace.device
        blocks = device["blocks_per_sm"][rows]
        sizes = [device[f"block_{letter}"][rows] for letter in "xyz"]
        known = blocks != MISSING
        threads = np.ones(len(rows), np.float64)
        for size in sizes:
            known &= size != MISSING
            threads *= size
        ordinals, inverse = np.unique(device["device"][rows], return_inverse=True)
        most = np.array([self._threads_per_sm.get(int(one), 0) for one in ordinals], np.float64)[inverse]
        known &= most > 0
        share = blocks * threads / np.where(most > 0, most, 1)
        known &= (share >= 0) & (share <= 1)
        return pa.array(share, mask=~known)


def _slices(order: Ints) -> Iterator[Ints]:
    for first in range(0, len(order), SLICE_ROWS):
        yield order[first : first + SLICE_ROWS]


def _integers(values: Ints) -> pa.Array:
    return pa.array(values, mask=values == MISSING)


def _known(value: int) -> int | None:
    return None if value == MISSING else value

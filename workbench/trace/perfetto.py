"""Export a bundle for ui.perfetto.dev: steps, phases, host, kernels, waits and counters on one time axis.

One process per variant and pass. Arrows lead from a launch on the host to its kernels. Written packet by packet,
so a trace of any size needs the memory of its tables and no more.
"""

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError
from workbench.trace.bundle import Bundle
from workbench.trace.schema import TABLES
from workbench.trace.track_events import Lanes, TrackEvents

Row = dict[str, Any]

_CHUNK = 1 << 14
_RANKS = {
    "steps": 0,
    "phases": 1,
    "accept length": 2,
    "host": 10,
    "waits": 20,
    "device": 30,
    "lanes": 40,
    "counters": 50,
}
_KERNEL_ARGS = [column.name for column in TABLES["kernels"].columns if not column.name.endswith(("_ns", "variant"))]


def write_perfetto(bundle: Bundle, path: str | Path) -> int:
    """Write ``bundle`` as a Perfetto trace to ``path`` (gzipped when it ends in .gz); return the number of packets.

    Raises InputError where a table is damaged, the bundle has no times at all, or ``path`` cannot be written.
    """
    target = Path(path)
    if not target.name:
        raise InputError(f"{str(path)!r}: not a file name", hint="name the trace file to write")
    earliest = _earliest(bundle)
    temporary = target.with_name(target.name + ".tmp")
    try:
        with ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(temporary.open("wb"))
            if target.suffix == ".gz":
                packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)
                file = cast(IO[bytes], stack.enter_context(packed))
            events = TrackEvents(file, shift_ns=max(0, -earliest))
            _Export(bundle, events).run()
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror})", hint="choose another path") from None
    finally:
        if temporary.is_file():
            temporary.unlink()
    return events.packets


NEAR_NS = 5_000_000
"""A row so close to a pass belongs to it: prefill and pulses lie around its steps."""


class _Export:
    """Draws the tables of one bundle; ``_processes`` are the groups opened so far, by variant and pass."""

    def __init__(self, bundle: Bundle, events: TrackEvents) -> None:
        self._bundle = bundle
        self._events = events
        self._processes: dict[tuple[str | None, str], int] = {}
        steps = bundle.table("steps")
        self._pass_of_step = dict(zip(steps["step_id"].to_pylist(), steps["run_pass"].to_pylist(), strict=True))
        self._spans = _pass_spans(steps)
        self._flows = _Flows(bundle.table("kernels"))

    def run(self) -> None:
        self._steps()
        self._sequences()
        self._host()
        self._kernels()
        self._syncs()
        self._lanes()
        self._counters()

    def _process(self, variant: str | None, run_pass: str) -> int:
        """Return the process of a variant's pass. Rows that belong to no variant share one."""
        key = (variant, run_pass)
        if key not in self._processes:
            self._processes[key] = self._events.process("run" if variant is None else f"{variant} · {run_pass}")
        return self._processes[key]

    def _process_of(self, row: Row) -> int:
        """Return the process of a row that a profiler wrote: of its step's pass, else of the traced one."""
        return self._process(row["variant"], self._pass_of_step.get(row.get("step_id"), "traced"))

    def _process_at(self, row: Row) -> int:
        """Return the process of the pass that a counter's row falls into; outside of all, the traced one's."""
        spans = self._spans.get(row["variant"], ())
        within = [span for span in spans if span[1] - NEAR_NS <= row["start_ns"] <= span[2] + NEAR_NS]
        return self._process(row["variant"], min(within, key=lambda span: span[2] - span[1])[0] if within else "traced")

    def _steps(self) -> None:
        tracks: dict[tuple[str, str], tuple[Lanes, Lanes, int]] = {}
        last: dict[tuple[str, str], int] = {}
        for row in _rows(self._bundle, "steps"):
            key = (row["variant"], row["run_pass"])
            process = self._process(*key)
            if key not in tracks:
                tracks[key] = (
                    Lanes(self._events, "steps", process, _RANKS["steps"]),
                    Lanes(self._events, "phases", process, _RANKS["phases"]),
                    self._events.counter_track("accept length", "tokens", process, _RANKS["accept length"]),
                )
            steps, phases, accept_length = tracks[key]
            names = (
                "step_id",
                "sequence_id",
                "index",
                "warmup",
                "context",
                "width",
                "drafted",
                "accepted",
                "committed",
                "batch",
                "mark",
            )
            args = {"accept_length" if name == "committed" else name: row[name] for name in names}
            start, draft_end, forward_end, end = (row[name] for name in TABLES["steps"].order)
            steps.add(start, end, _step_name(row), "step", args)
            for phase, begin, stop in (
                ("draft", start, draft_end),
                ("forward", draft_end, forward_end),
                ("verify", forward_end, end),
            ):
                if stop > begin:
                    phases.add(begin, stop, phase, "phase", {"step_id": row["step_id"]})
            if row["committed"] is not None:
                self._events.count(accept_length, start, row["committed"])
            last[key] = max(end, last.get(key, end))
        for key, (steps, phases, accept_length) in tracks.items():
            steps.close()
            phases.close()
            self._events.count(accept_length, last[key], 0)

    def _sequences(self) -> None:
        tracks: dict[int, Lanes] = {}
        for row in _rows(self._bundle, "sequences"):
            process = self._process(row["variant"], row["run_pass"])
            lanes = tracks.setdefault(process, Lanes(self._events, "prefill", process, _RANKS["steps"]))
            args = {name: row[name] for name in ("sequence_id", "prompt_id", "prompt_tokens", "new_tokens", "finish")}
            lanes.add(row["prefill_start_ns"], row["prefill_end_ns"], "prefill", "prefill", args)
        _close(tracks)

    def _host(self) -> None:
        tracks: dict[tuple[int, Any, int], Lanes] = {}
        for row in _rows(self._bundle, "host"):
            process = self._process_of(row)
            key = (process, row["rank"], row["thread"])
            if key not in tracks:
                tracks[key] = Lanes(self._events, f"thread {row['thread']}{_rank(row)}", process, _RANKS["host"])
            args = {name: row[name] for name in ("host_id", "step_id", "phase", "correlation")}
            flows = self._flows.of_launch(row["variant"], row["correlation"])
            tracks[key].add(row["start_ns"], row["end_ns"], row["name"], row["category"], args, flows)
        _close(tracks)

    def _kernels(self) -> None:
        tracks: dict[tuple[int, Any, int, int], Lanes] = {}
        for row in _rows(self._bundle, "kernels", numbered=True):
            process = self._process_of(row)
            key = (process, row["rank"], row["device"], row["stream"])
            if key not in tracks:
                name = f"device {row['device']} stream {row['stream']}{_rank(row)}"
                tracks[key] = Lanes(self._events, name, process, _RANKS["device"], nest=False)
            args = {name: row[name] for name in _KERNEL_ARGS if name != "name"}
            flows = self._flows.of_kernel(row["correlation"], row["row"])
            tracks[key].add(row["start_ns"], row["end_ns"], row["name"], row["kind"], args, flows)
        _close(tracks)

    def _syncs(self) -> None:
        tracks: dict[tuple[int, Any], Lanes] = {}
        for row in _rows(self._bundle, "syncs"):
            process = self._process_of(row)
            key = (process, row["rank"])
            if key not in tracks:
                tracks[key] = Lanes(self._events, f"waits{_rank(row)}", process, _RANKS["waits"], nest=False)
            args = {
                name: row[name] for name in ("kind", "thread", "device", "stream", "correlation", "step_id", "phase")
            }
            tracks[key].add(row["start_ns"], row["end_ns"], row["name"], "sync", args)
        _close(tracks)

    def _lanes(self) -> None:
        kernels = self._bundle.table("kernels")
        steps = dict(zip(kernels["kernel_id"].to_pylist(), kernels["step_id"].to_pylist(), strict=True))
        tracks: dict[tuple[int, int, int, int | None], Lanes] = {}
        for row in _rows(self._bundle, "lanes"):
            process = self._process_of({**row, "step_id": steps.get(row["kernel_id"])})
            key = (process, row["sm"], row["cta"], row["warp"])
            if key not in tracks:
                warp = "" if row["warp"] is None else f" warp {row['warp']}"
                tracks[key] = Lanes(self._events, f"SM {row['sm']} CTA {row['cta']}{warp}", process, _RANKS["lanes"])
            tracks[key].add(row["start_ns"], row["end_ns"], row["task"], row["kind"], {"kernel_id": row["kernel_id"]})
        _close(tracks)

    def _counters(self) -> None:
        tracks: dict[tuple[Any, ...], int] = {}
        for row in _rows(self._bundle, "counters"):
            if row["source"] == "ncu" and row["start_ns"] == row["end_ns"]:
                continue  # medians over a kernel's replays have no place in time
            process = self._process_at(row)
            key = (process, *(row[name] for name in ("source", "name", "rank", "device", "unit")))
            if key not in tracks:
                device = "" if row["device"] is None else f", device {row['device']}"
                name = f"{row['name']} ({row['source']}{device}){_rank(row)}"
                tracks[key] = self._events.counter_track(name, row["unit"], process, _RANKS["counters"])
            self._events.count(tracks[key], row["start_ns"], row["value"])


def _pass_spans(steps: pa.Table) -> dict[str, list[tuple[str, int, int]]]:
    """Return, by variant, the passes of its steps with the time they span."""
    found = steps.group_by(["variant", "run_pass"]).aggregate([("start_ns", "min"), ("end_ns", "max")]).to_pylist()
    spans: dict[str, list[tuple[str, int, int]]] = {}
    for row in found:
        spans.setdefault(row["variant"], []).append((row["run_pass"], row["start_ns_min"], row["end_ns_max"]))
    return spans


class _Flows:
    """Which launch leads to which kernels: a flow per kernel, its id the kernel's row plus 1."""

    def __init__(self, kernels: pa.Table) -> None:
        launched = pc.is_valid(kernels["correlation"]).to_numpy()
        self._by_variant: dict[str, tuple[Any, Any]] = {}
        variants = kernels["variant"]
        correlations = pc.fill_null(kernels["correlation"], 0).to_numpy()
        for variant in variants.unique().to_pylist():
            rows = np.flatnonzero(launched & pc.equal(variants, variant).to_numpy())
            rows = rows[np.argsort(correlations[rows], kind="stable")]
            self._by_variant[variant] = (correlations[rows], rows)

    def of_launch(self, variant: str, correlation: int | None) -> list[int]:
        """Return the flows that start at a host row."""
        if correlation is None or variant not in self._by_variant:
            return []
        sorted_correlations, rows = self._by_variant[variant]
        first, last = np.searchsorted(sorted_correlations, [correlation, correlation + 1])
        return [int(row) + 1 for row in rows[first:last]]

    def of_kernel(self, correlation: int | None, row: int) -> list[int]:
        """Return the flow that arrives at the kernel of ``row``."""
        return [] if correlation is None else [row + 1]


def _rows(bundle: Bundle, name: str, *, numbered: bool = False) -> Iterator[Row]:
    """Yield the rows of a table by start, the longer first where starts are equal; ``numbered`` adds ``row``.

    A chunk at a time: as Python objects, a large table would not fit.
    """
    table = bundle.table(name).combine_chunks()
    keys = [(TABLES[name].order[0], "ascending"), (TABLES[name].order[-1], "descending")]
    order = pc.sort_indices(table, sort_keys=keys)
    for first in range(0, len(order), _CHUNK):
        chosen = order.slice(first, _CHUNK)
        for index, row in zip(chosen.to_pylist(), table.take(chosen).to_pylist(), strict=True):
            yield row | {"row": index} if numbered else row


def _step_name(row: Row) -> str:
    if row["committed"] is None:
        return row["mark"] or "step"
    return f"step: {row['committed']} of {row['width']}"


def _close(tracks: dict[Any, Lanes]) -> None:
    for lanes in tracks.values():
        lanes.close()


def _rank(row: Row) -> str:
    return "" if row["rank"] is None else f", rank {row['rank']}"


def _earliest(bundle: Bundle) -> int:
    names = ("steps", "sequences", "host", "kernels", "syncs", "lanes", "counters")
    starts = [pc.min(bundle.table(name)[TABLES[name].order[0]]).as_py() for name in names]
    known = [start for start in starts if start is not None]
    if not known:
        raise InputError(f"{bundle.path}: no rows with times", hint="there is nothing to draw")
    return int(min(known))

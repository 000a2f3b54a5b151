"""A run while it goes: what its spool says now. Reads only what is flushed, at most a second old."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError
from workbench.quantity import Quantity
from workbench.runs.catalogue import RunEntry
from workbench.trace.lock import lock_owner
from workbench.trace.spool import SUFFIX, SpoolReader
from workbench.trace.writer import SPOOL

RECENT_STEPS = 600
RECENT_NS = 5_000_000_000
COUNTERS = 12


@dataclass(frozen=True, slots=True)
class LivePass:
    """One variant in one pass so far. ``recent_tok_s`` covers its last 5 s of steps, prefill between them included."""

    variant: str
    run_pass: str
    steps: int
    tokens: int | None
    tok_s: Quantity | None
    recent_tok_s: Quantity | None
    step_p50: Quantity
    last_ns: int


@dataclass(frozen=True, slots=True)
class LiveCounter:
    """The newest value of a counter."""

    name: str
    source: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Live:
    """A run as it stands. ``running``: its writer lives. ``recent``: end (s before the newest) and duration (ms) of the
    newest steps of whatever pass. ``passes``: the newest first."""

    running: bool
    state: str
    passes: tuple[LivePass, ...]
    recent: tuple[list[float], list[float]]
    counters: tuple[LiveCounter, ...]
    note: str


def live_view(entry: RunEntry) -> Live:
    """Return how the run stands. A run that has ended gives its state and nothing else.

    Raises InputError where its manifest cannot be read.
    """
    if entry.manifest is None:
        raise InputError(entry.error)
    if entry.manifest.state != "open":
        return Live(False, entry.manifest.state, (), ([], []), (), entry.manifest.failure)
    owner = lock_owner(entry.folder)
    running = owner is not None and owner.alive
    note = "" if running else "its process is gone: workbench check --salvage makes the bundle readable"
    steps = _columns(entry, "steps", ("variant", "run_pass", "warmup", "start_ns", "end_ns", "committed"))
    return Live(running, "open", _passes(steps), _recent(steps), _counters(entry), note)


def _columns(entry: RunEntry, table: str, names: tuple[str, ...]) -> pa.Table | None:
    """Return columns of a table's spool as far as it is written; None where there is none yet."""
    path = entry.folder / SPOOL / f"{table}{SUFFIX}"
    try:
        batches = list(SpoolReader(path, table).batches())
    except InputError:  # not begun, or sealed a moment ago
        return None
    made = pa.Table.from_batches(batches).select(list(names)) if batches else None
    return made if made is not None and made.num_rows else None


def _passes(steps: pa.Table | None) -> tuple[LivePass, ...]:
    if steps is None:
        return ()
    variant, run_pass = (steps.column(name).combine_chunks().dictionary_encode() for name in ("variant", "run_pass"))
    key = variant.indices.to_numpy().astype(np.int64) * len(run_pass.dictionary) + run_pass.indices.to_numpy()
    start, end = (steps.column(name).to_numpy() for name in ("start_ns", "end_ns"))
    committed = steps.column("committed").fill_null(-1).to_numpy()
    warm = steps.column("warmup").to_numpy()
    found = []
    for one in np.unique(key).tolist():
        own = key == one
        measured = own & ~warm if (own & ~warm).any() else own
        known = bool((committed[measured] >= 0).all())
        wall = end[measured] - start[measured]
        last = int(end[own].max())
        recent = measured & (end > last - RECENT_NS)
        span = last - int(start[recent].min()) if recent.any() else 0
        tokens = int(committed[measured].sum()) if known else None
        found.append(
            LivePass(
                variant=variant.dictionary[one // len(run_pass.dictionary)].as_py(),
                run_pass=run_pass.dictionary[one % len(run_pass.dictionary)].as_py(),
                steps=int(measured.sum()),
                tokens=tokens,
                tok_s=_rate(tokens, int(wall.sum()), "committed tokens over step time so far"),
                recent_tok_s=_rate(int(committed[recent].sum()) if known else None, span, "last 5 s"),
                step_p50=Quantity(float(np.median(wall)) / 1e6, "ms", "measured"),
                last_ns=last,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.last_ns))


def _rate(tokens: int | None, ns: int, note: str) -> Quantity | None:
    return Quantity(tokens / (ns / 1e9), "tok/s", "measured", note=note) if tokens is not None and ns > 0 else None


def _recent(steps: pa.Table | None) -> tuple[list[float], list[float]]:
    if steps is None:
        return [], []
    start, end = (steps.column(name).to_numpy() for name in ("start_ns", "end_ns"))
    newest = np.argsort(end, kind="stable")[-RECENT_STEPS:]
    return ((end[newest] - end.max()) / 1e9).tolist(), ((end - start)[newest] / 1e6).tolist()


def _counters(entry: RunEntry) -> tuple[LiveCounter, ...]:
    table = _columns(entry, "counters", ("source", "name", "start_ns", "value", "unit"))
    if table is None:
        return ()
    newest = table.group_by(["source", "name", "unit"]).aggregate([("start_ns", "max")]).to_pylist()
    found = []
    for row in sorted(newest, key=lambda row: (row["source"] != "nvml", row["source"], row["name"]))[:COUNTERS]:
        own = table.filter(
            (pc.field("source") == row["source"])
            & (pc.field("name") == row["name"])
            & (pc.field("start_ns") == row["start_ns_max"])
        )
        found.append(LiveCounter(row["name"], row["source"], own.column("value")[0].as_py(), row["unit"]))
    return tuple(found)

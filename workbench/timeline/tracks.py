"""The tracks of one variant's timeline, read once from the bundle: steps, host, waits, device, counters, marks.

Everything is kept as sorted arrays (28 bytes a span with its pyramid), so that a window needs no scan of a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from workbench.errors import InputError, UnfitError
from workbench.timeline.pyramid import Ints
from workbench.timeline.samples import Samples
from workbench.timeline.spans import Codes, Spans
from workbench.trace.bundle import Bundle

Group = Literal["steps", "host", "waits", "device", "counters"]

MAX_RESULT_BYTES = 4 << 30
MAX_TRACKS = 200
"""Tracks of one group beyond this are not read: a thread or a stream for every row is no timeline."""

COUNTER_ORDER = ("dram_read", "dram_write", "ctas_per_sm", "warps_active", "sm_active")
COUNTER_LABELS = {
    "dram_read_bytes": "HBM read",
    "dram_write_bytes": "HBM write",
    "ctas_per_sm": "CTAs per SM",
    "warps_active": "warps resident",
}
BYTE_UNITS = ("B", "bytes", "byte")


@dataclass(frozen=True, slots=True)
class SpanTrack:
    """Spans of one row of the timeline. ``names`` by code; ``table``: where ``ids`` of the spans point.

    ``gaps``: show the times that no span covers. ``nested``: spans lie within each other, as calls do.
    """

    key: str
    label: str
    group: Group
    spans: Spans
    names: tuple[str, ...]
    table: str = ""
    gaps: bool = False
    nested: bool = False


@dataclass(frozen=True, slots=True)
class SampleTrack:
    """Samples of one counter; ``unit`` is that of the values shown."""

    key: str
    label: str
    group: Group
    samples: Samples
    unit: str


Track = SpanTrack | SampleTrack


@dataclass(frozen=True, slots=True)
class Timeline:
    """One variant over one run. Times in ns on the bundle's clock; [start_ns, end_ns) holds every row but counters of
    the run that were read outside of it.

    ``passes``: first start and last end of each pass that has steps. ``moments``: steps worth a look, by name.
    ``left_out``: what was not read, and why.
    """

    variant: str
    start_ns: int
    end_ns: int
    tracks: tuple[Track, ...]
    passes: Mapping[str, tuple[int, int]]
    moments: Mapping[str, tuple[int, int]]
    left_out: tuple[str, ...] = field(default=())

    def track(self, key: str) -> Track:
        """Return the track called ``key``; InputError where there is none."""
        for track in self.tracks:
            if track.key == key:
                return track
        raise InputError(f"timeline: no track {key!r}")

    @property
    def events(self) -> int:
        """Spans and samples of all tracks; gaps are not counted."""
        return sum(
            len(track.samples) if isinstance(track, SampleTrack) else 0 if track.gaps else len(track.spans)
            for track in self.tracks
        )


def load_timeline(bundle: Bundle, variant: str) -> Timeline:
    """Read the timeline of ``variant``.

    Raises InputError where there is no such variant or a table is damaged, UnfitError where nothing has a time.
    """
    if variant not in {record.name for record in bundle.manifest.variants}:
        raise InputError(f"{bundle.path}: no variant {variant!r}")
    left_out: list[str] = []
    tracks: list[Track] = []
    for read in (_steps, _host, _syncs, _kernels, _counters):
        tracks += read(bundle, variant, left_out)
    filled = [track for track in tracks if len(_data(track))]
    # Counters of the whole run were read while other variants ran, too: they do not widen this one's window.
    bounds = [_bounds(track) for track in filled if track.group != "counters"] or [_bounds(track) for track in filled]
    if not bounds:
        raise UnfitError(f"{bundle.path}: variant {variant!r} has no row with a time", hint="there is nothing to draw")
    return Timeline(
        variant,
        min(first for first, _ in bounds),
        max(last for _, last in bounds),
        tuple(filled),
        _passes(bundle, variant),
        _moments(bundle, variant),
        tuple(left_out),
    )


def _data(track: Track) -> Spans | Samples:
    return track.samples if isinstance(track, SampleTrack) else track.spans


def _bounds(track: Track) -> tuple[int, int]:
    data = _data(track)
    last = int(data.reach[-1]) if isinstance(data, Spans) else int(max(data.end[-1], data.start[-1]))
    return int(data.start[0]), last + 1


def _columns(bundle: Bundle, sql: str, params: list[object]) -> pa.Table:
    return bundle.query(sql, params, max_bytes=MAX_RESULT_BYTES)


def _ints(table: pa.Table, name: str) -> Ints:
    values: Ints = table.column(name).to_numpy().astype(np.int64, copy=False)
    return values


# DuckDB numbers the names, so that a million equal ones are never Python objects.
_NAMED = """
WITH names AS (
    SELECT name, row_number() OVER (ORDER BY name) - 1 AS code
    FROM (SELECT DISTINCT name FROM {table} WHERE variant = $1)
)
"""
_NAMES = "SELECT DISTINCT name FROM {table} WHERE variant = $1 ORDER BY name"


def _names(bundle: Bundle, table: str, variant: str) -> tuple[str, ...]:
    return tuple(_columns(bundle, _NAMES.format(table=table), [variant]).column("name").to_pylist())


_STEPS = """
SELECT step_id, run_pass, start_ns, draft_end_ns, forward_end_ns, end_ns, coalesce(committed, -1) AS committed
FROM steps WHERE variant = $1 ORDER BY start_ns
"""


def _steps(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = _columns(bundle, _STEPS, [variant])
    if not table.num_rows:
        return
    start, draft, forward, end, ids, committed = (
        _ints(table, name) for name in ("start_ns", "draft_end_ns", "forward_end_ns", "end_ns", "step_id", "committed")
    )
    passes = table.column("run_pass").combine_chunks().dictionary_encode()
    names = tuple(f"{name} step" for name in passes.dictionary.to_pylist())
    spans = Spans(start, end, ids, passes.indices.to_numpy().astype(np.int32))
    yield SpanTrack("steps", "steps", "steps", spans, names, "steps")
    known = committed >= 0
    if known.any():
        samples = Samples(start[known], end[known], committed[known], ids[known])
        yield SampleTrack("accept", "accept length", "steps", samples, "tokens")
    parts = [(start, draft), (draft, forward), (forward, end)]
    begin, stop = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    codes = np.repeat(np.arange(3, dtype=np.int32), len(start))
    lasting = stop > begin
    spans = Spans(begin[lasting], stop[lasting], np.tile(ids, 3)[lasting], codes[lasting])
    yield SpanTrack("phases", "phases", "steps", spans, ("draft", "forward", "verify"), "steps")


_HOST = """
SELECT thread, rank, host_id, start_ns, end_ns, code FROM host JOIN names USING (name)
WHERE variant = $1 AND category <> 'annotation'
"""


def _host(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = _columns(bundle, _NAMED.format(table="host") + _HOST, [variant])
    if not table.num_rows:
        return
    names = _names(bundle, "host", variant)
    for (thread, rank), rows in _groups(table, ("thread", "rank"), left_out, "host threads"):
        label = f"thread {thread}{_of_rank(rank)}"
        yield SpanTrack(f"host:{thread}:{rank}", label, "host", _spans(rows, "host_id"), names, "host", nested=True)


_SYNCS = """
SELECT row_number() OVER () AS id, start_ns, end_ns, code FROM syncs JOIN names USING (name)
WHERE variant = $1
"""


def _syncs(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = _columns(bundle, _NAMED.format(table="syncs") + _SYNCS, [variant])
    if table.num_rows:
        yield SpanTrack("syncs", "syncs", "waits", _spans(table, "id"), _names(bundle, "syncs", variant), "syncs")


_KERNELS = """
SELECT device, stream, rank, kernel_id, start_ns, end_ns, code,
       coalesce(local_bytes_per_thread, 0) > 0 OR name IN (
           SELECT kernel FROM static WHERE (variant = $1 OR variant IS NULL)
           AND coalesce(spill_store_bytes, 0) + coalesce(spill_load_bytes, 0) > 0
       ) AS spills
FROM kernels JOIN names USING (name) WHERE variant = $1
"""


def _kernels(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = _columns(bundle, _NAMED.format(table="kernels") + _KERNELS, [variant])
    if not table.num_rows:
        return
    names = _names(bundle, "kernels", variant)
    streams = list(_groups(table, ("device", "rank", "stream"), left_out, "streams"))
    for (device, rank, stream), rows in streams:
        label = f"stream {stream}" + (f", device {device}" if device else "") + _of_rank(rank)
        key = f"kernels:{device}:{rank}:{stream}"
        yield SpanTrack(key, label, "device", _spans(rows, "kernel_id"), names, "kernels")
    for (device, rank), rows in _groups(table, ("device", "rank"), left_out, "devices"):
        label = "gaps" + (f", device {device}" if device else "") + _of_rank(rank)
        yield SpanTrack(f"gaps:{device}:{rank}", label, "device", _spans(rows, "kernel_id"), names, "", gaps=True)
    spilling = table.filter(table.column("spills"))
    if spilling.num_rows:
        yield SpanTrack("spills", "spilling kernels", "device", _spans(spilling, "kernel_id"), names, "kernels")


_COUNTERS = """
SELECT source, name, rank, device, unit, start_ns, end_ns, value FROM counters
WHERE (variant = $1 OR variant IS NULL) AND isfinite(value) AND (source <> 'ncu' OR end_ns > start_ns)
"""
"""Without medians over a kernel's replays, which have no place in time."""


def _counters(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = _columns(bundle, _COUNTERS, [variant])
    if not table.num_rows:
        return
    made = []
    for key, rows in _groups(table, ("source", "name", "rank", "device", "unit"), left_out, "counters"):
        source, name, rank, device, unit = key
        start, end = _ints(rows, "start_ns"), _ints(rows, "end_ns")
        value = rows.column("value").to_numpy()
        if unit in BYTE_UNITS and (end > start).all():
            value, unit = value / (end - start), "GB/s"
        elif str(unit).startswith("sector") and (end > start).all():
            value, unit = 32 * value / (end - start), "GB/s"
        elif unit == "Hz":
            value, unit = value / 1e6, "MHz"
        order = next((at for at, part in enumerate(COUNTER_ORDER) if part in str(name)), len(COUNTER_ORDER))
        where = (f", device {device}" if device else "") + _of_rank(rank)
        track = SampleTrack(
            f"counter:{source}:{name}:{device}:{rank}",
            f"{COUNTER_LABELS.get(str(name), name)}{where}",
            "counters",
            Samples(start, end, value),
            unit,
        )
        made.append(((order, str(source) == "nvml", str(name), str(device)), track))
    for _, track in sorted(made, key=lambda one: one[0]):
        yield track


def _spans(table: pa.Table, key: str) -> Spans:
    codes: Codes = table.column("code").to_numpy().astype(np.int32)
    return Spans(_ints(table, "start_ns"), _ints(table, "end_ns"), _ints(table, key), codes)


def _groups(
    table: pa.Table, by: tuple[str, ...], left_out: list[str], what: str
) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Yield the rows of each combination of the columns ``by``, the fullest first; at most MAX_TRACKS of them."""
    import pyarrow.compute as pc

    counts = table.group_by(list(by)).aggregate([([], "count_all")]).to_pylist()
    counts.sort(key=lambda row: (-row["count_all"], *(str(row[name]) for name in by)))
    if len(counts) > MAX_TRACKS:
        left_out.append(f"{len(counts) - MAX_TRACKS} of {len(counts)} {what}: only the {MAX_TRACKS} fullest are read")
    for row in counts[:MAX_TRACKS]:
        if len(counts) == 1:
            yield tuple(row[name] for name in by), table
            return
        mask = None
        for name in by:
            value = row[name]
            own = pc.is_null(table.column(name)) if value is None else pc.equal(table.column(name), value)
            mask = own if mask is None else pc.and_(mask, own)
        yield tuple(row[name] for name in by), table.filter(mask)


def _of_rank(rank: int | None) -> str:
    return "" if rank is None else f", rank {rank}"


def _passes(bundle: Bundle, variant: str) -> dict[str, tuple[int, int]]:
    sql = (
        "SELECT run_pass, min(start_ns) AS first, max(end_ns) AS last FROM steps WHERE variant = $1 "
        "GROUP BY run_pass ORDER BY first"
    )
    return {row["run_pass"]: (row["first"], row["last"]) for row in bundle.query(sql, [variant]).to_pylist()}


_MOMENTS = """
WITH own AS (
    SELECT step_id, start_ns, end_ns, end_ns - start_ns AS wall, run_pass = 'traced' AS traced FROM steps
    WHERE variant = $1 AND NOT warmup
), best AS (SELECT * FROM own WHERE traced OR NOT EXISTS (SELECT 1 FROM own WHERE traced))
(SELECT 'median step' AS name, start_ns, end_ns FROM best
 ORDER BY abs(wall - (SELECT median(wall) FROM best)), start_ns LIMIT 1)
UNION ALL (SELECT 'worst step', start_ns, end_ns FROM best ORDER BY wall DESC, start_ns LIMIT 1)
"""


def _moments(bundle: Bundle, variant: str) -> dict[str, tuple[int, int]]:
    """Return the median and the worst step, of the traced pass where there is one: there the most is known."""
    return {row["name"]: (row["start_ns"], row["end_ns"]) for row in bundle.query(_MOMENTS, [variant]).to_pylist()}

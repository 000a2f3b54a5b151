"""How tracks are read: columns of a query as arrays, rows by what they belong to."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from workbench.timeline.pyramid import Ints
from workbench.timeline.spans import Codes, Spans
from workbench.trace.bundle import Bundle

MAX_RESULT_BYTES = 4 << 30
MAX_TRACKS = 200
"""Tracks of one group beyond this are not read: a thread or a stream for every row is no timeline."""

# DuckDB numbers the names, so that a million equal ones are never Python objects.
NAMED = """
WITH names AS (
    SELECT name, row_number() OVER (ORDER BY name) - 1 AS code
    FROM (SELECT DISTINCT name FROM {table} WHERE variant = $1)
)
"""
_NAMES = "SELECT DISTINCT name FROM {table} WHERE variant = $1 ORDER BY name"


def columns(bundle: Bundle, sql: str, params: list[object]) -> pa.Table:
    """Return the rows of ``sql``. Raises InputError where a table is damaged or they are too many."""
    return bundle.query(sql, params, max_bytes=MAX_RESULT_BYTES)


def ints(table: pa.Table, name: str) -> Ints:
    """Return the column ``name`` as integers."""
    values: Ints = table.column(name).to_numpy().astype(np.int64, copy=False)
    return values


def names(bundle: Bundle, table: str, variant: str) -> tuple[str, ...]:
    """Return the names in ``table`` by the code that ``NAMED`` gives them."""
    return tuple(columns(bundle, _NAMES.format(table=table), [variant]).column("name").to_pylist())


def spans(table: pa.Table, key: str, pieces: Ints | None = None) -> Spans:
    """Return the rows as spans, ``key`` their ids."""
    codes: Codes = table.column("code").to_numpy().astype(np.int32)
    return Spans(ints(table, "start_ns"), ints(table, "end_ns"), ints(table, key), codes, pieces=pieces)


def groups(
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


def place(device: int | None, rank: int | None) -> str:
    """Return where a row was recorded, for its label; nothing for the only device."""
    return (f", device {device}" if device else "") + ("" if rank is None else f", rank {rank}")

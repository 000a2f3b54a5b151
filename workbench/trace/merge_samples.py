"""Counter samples merged into longer ones: what adds up stays exact, the rest becomes its mean over time."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workbench.trace.rows import conform, empty

ADDITIVE = ("B", "cycles")
"""Units of readings of which a longer sample has more; so have counters whose name ends in ``.sum``. All others are
rates, shares and levels: their mean over time is what counts."""

_KEYS = ("variant", "source", "name", "rank", "device", "unit")

Ints = npt.NDArray[np.int64]


def merge_samples(counters: pa.Table, bin_ns: int) -> pa.Table:
    """Return table ``counters`` with the samples of each series merged that begin in the same ``bin_ns``.

    Samples are merged only where one ends when the next begins, to within half of it: no gap disappears. Instant
    readings stay. ``bin_ns`` 0 merges nothing.
    """
    if not bin_ns or not counters.num_rows:
        return counters
    order = [(name, "ascending") for name in (*_KEYS, "start_ns", "end_ns")]
    rows = counters.sort_by(order)
    start, end = (np.asarray(rows[name].to_numpy(), np.int64) for name in ("start_ns", "end_ns"))
    value = np.asarray(rows["value"].to_numpy(), np.float64)
    series = _changes(rows)
    length = end - start
    gap = np.concatenate(([0], start[1:] - end[:-1]))
    cut = series | (np.abs(gap) > np.maximum(length, 1) / 2) | (length == 0)
    cut |= np.concatenate(([True], length[:-1] == 0))
    cut |= np.concatenate(([True], start[1:] // bin_ns != start[:-1] // bin_ns))
    first = np.flatnonzero(cut)
    last = np.append(first[1:], len(start)) - 1
    units, names = rows["unit"].to_pylist(), rows["name"].to_pylist()
    additive = np.array([units[at] in ADDITIVE or names[at].endswith(".sum") for at in first.tolist()], bool)
    total = np.add.reduceat(value, first)
    weight = np.add.reduceat(length.astype(np.float64), first)
    mean = np.divide(np.add.reduceat(value * length, first), weight, out=value[first].copy(), where=weight > 0)
    merged = rows.take(pa.array(first))
    for name, column in (("end_ns", end[last]), ("value", np.where(additive, total, mean))):
        merged = merged.set_column(merged.column_names.index(name), name, pa.array(column))
    result: pa.Table = conform("counters", merged) if len(first) else empty("counters")
    return result


def _changes(rows: pa.Table) -> npt.NDArray[np.bool_]:
    """Return where a row is of another series than the one before."""
    found = np.zeros(rows.num_rows, bool)
    found[0] = True
    for name in _KEYS:
        codes = rows[name].combine_chunks().dictionary_encode()
        numbers = codes.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        found[1:] |= numbers[1:] != numbers[:-1]
    return found

"""Counters of a watched server made few: a part of one burst as it was sampled, the rest merged.

Merged samples keep the sum of bytes and the mean of all else. What a mean over a merged sample would lose, they keep
beside it: the share of its time that was idle, and that a counter was above zero. So means come out as from the source.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from workbench.errors import InputError
from workbench.trace.bundle import Bundle
from workbench.trace.bursts import IDLE, NONZERO, SAMPLER, TRAFFIC, bursts, idle_below
from workbench.trace.merge_samples import merge_samples
from workbench.trace.rows import conform


def thin_bursts(source: Bundle, keep_ns: int, bin_ns: int) -> pa.Table:
    """Return the counters of ``source``: the sampler's samples of ``keep_ns`` as they are, where traffic is nearest the
    median, the others merged to ``bin_ns``. All that other instruments read stays.

    Raises InputError where ``source`` is the result of this: what was merged cannot be told apart again.
    """
    counters = source.table("counters")
    if pc.any(pc.equal(counters["name"], IDLE)).as_py():
        raise InputError(f"{source.path}: was thinned already", hint="thin the bundle that it was made of")
    found = bursts(source)
    if found is None or not bin_ns:
        return counters
    kept = _kept(counters, found.spans, keep_ns)
    sampled = np.asarray(pc.equal(counters["source"], SAMPLER).to_numpy(zero_copy_only=False), bool)
    start, end = (np.asarray(counters[name].to_numpy(), np.int64) for name in ("start_ns", "end_ns"))
    fine = (start >= kept[0]) & (end <= kept[1])
    rest = counters.filter(pa.array(sampled & ~fine))
    beside = [rest, *_beside(rest, idle_below(source))]
    return pa.concat_tables(
        [
            counters.filter(pa.array(~sampled | fine)),
            merge_samples(pa.concat_tables(beside), bin_ns),
        ]
    ).sort_by([(name, "ascending") for name in ("source", "name", "start_ns")])


def _kept(counters: pa.Table, spans: npt.NDArray[np.int64], keep_ns: int) -> tuple[int, int]:
    """Return start and end of what stays as it was sampled."""
    reads = counters.filter(pc.and_(pc.equal(counters["source"], SAMPLER), pc.equal(counters["name"], TRAFFIC)))
    start, value = reads["start_ns"].to_numpy(), reads["value"].to_numpy()
    parts, rates = [], []
    for first, last in spans.tolist():
        for begin in range(first, max(last - keep_ns, first) + 1, max(keep_ns, 1)):
            end = min(begin + keep_ns, last)
            parts.append((begin, end))
            rates.append(value[(start >= begin) & (start < end)].sum() / max(end - begin, 1))
    middle = np.median(rates)
    return parts[int(np.argmin([abs(rate - middle) for rate in rates]))]


def _beside(samples: pa.Table, idle: float | None) -> list[pa.Table]:
    """Return counters of 0 and 1, whose mean over a merged sample is the share of its time: idle, or above zero."""
    made = [
        _flags(own, beside, np.asarray(own["value"].to_numpy()) > 0)
        for name, beside in NONZERO.items()
        if (own := samples.filter(pc.equal(samples["name"], name))).num_rows
    ]
    moved = samples.filter(pc.equal(samples["name"], TRAFFIC)).sort_by("start_ns")
    written = samples.filter(pc.equal(samples["name"], "dram_write_bytes")).sort_by("start_ns")
    if idle is None or not moved.num_rows:
        return made
    value = np.asarray(moved["value"].to_numpy(), np.float64)
    if written.num_rows == moved.num_rows:
        value = value + np.asarray(written["value"].to_numpy(), np.float64)
    length = np.asarray(moved["end_ns"].to_numpy()) - np.asarray(moved["start_ns"].to_numpy())
    return [*made, _flags(moved, IDLE, value * 1e9 < idle * length)]


def _flags(samples: pa.Table, name: str, value: npt.NDArray[np.bool_]) -> pa.Table:
    columns = {
        "name": pa.array([name] * len(value), pa.string()),
        "unit": pa.array(["share"] * len(value), pa.string()),
        "value": pa.array(value.astype(np.float64)),
    }
    for column, data in columns.items():
        samples = samples.set_column(samples.column_names.index(column), column, data)
    result: pa.Table = conform("counters", samples)
    return result

"""What the sampler's sidecar wrote, made into rows: placed on the run's clock, cleaned, searched, normalised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workbench.errors import InputError
from workbench.probes.counter_sets import CounterSet, normalise
from workbench.trace.clocks import Bracket, Fit, Sample, Times, fit

SOURCE = "pm_sampler"
ACTIVITY = {"sm_active": 1.0, "warps_active": 64.0, "ctas_per_sm": 1.0, "stalled_long_scoreboard": 4.0}
"""Readings that say when SMs are busy, best first, and what makes one warp on every SM, waiting for memory, about 1 of
each: an SM of the data-centre GPUs since Volta holds 64 warps and has four schedulers."""

MARGIN_NS = 2_000_000
"""How far outside the capture the bulk of its samples may lie before their clock is taken for another one."""

FAR_NS = 600_000_000_000
"""Outside start and stop by more than this, a sample's time is damaged."""

EDGE_NS = 100_000
"""How much of a capture may lack samples at its ends: the last sample is not complete when counting is stopped."""

GAP = 1.5
"""Samples that begin so many intervals apart, at least, have a gap between them or are too long."""

LISTED_GAPS = 20

Values = npt.NDArray[np.float64]
Loss = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RawSamples:
    """Samples as decoded: ``times`` of shape (n, 2) on the source's clock, ``values`` of shape (n, readings)."""

    times: Times
    values: Values


@dataclass(frozen=True, slots=True)
class Samples:
    """Valid samples in order: ``start_ns`` and ``end_ns`` on the run's clock, shape (n,); ``values`` likewise first."""

    start_ns: Times
    end_ns: Times
    values: Values
    clock: Fit
    clock_name: str
    losses: list[Loss]


def read_spool(folder: Path, samples: int, readings: int) -> RawSamples:
    """Read what the sidecar wrote. InputError where the files are shorter than it said."""
    times = np.fromfile(folder / "times.i64", dtype="<i8")
    values = np.fromfile(folder / "values.f64", dtype="<f8")
    if len(times) < 2 * samples or len(values) < readings * samples:
        raise InputError(f"{folder}: holds fewer than the {samples} samples that the sampler wrote")
    return RawSamples(times[: 2 * samples].reshape(-1, 2), values[: readings * samples].reshape(samples, readings))


def place(raw: RawSamples, anchors: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> tuple[Fit, str]:
    """Return how ``raw`` is placed on the run's clock, and by which of the clocks that were bracketed.

    CUPTI stamps samples in Unix time where nothing else in the process uses CUPTI, in its own time otherwise: the clock
    is the one by which samples fall between the first anchors and the last. InputError where none does.
    """
    names = [name for name in anchors[0] if all(name in moment for moment in anchors)] if anchors else []
    for name in names:
        moments = [[Bracket(*row) for row in moment[name]] for moment in anchors]
        placed = fit(moments[0], moments[-1])
        low = min(bracket.low_ns for bracket in moments[0]) - MARGIN_NS
        high = max(bracket.high_ns for bracket in moments[-1]) + MARGIN_NS
        # The bulk decides: the first samples of a session may carry any time at all.
        middle = int(np.median(raw.times[:, 1])) if len(raw.times) else moments[0][0].source_ns
        if low <= placed.place(middle) <= high:
            between = [bracket for moment in moments[1:-1] for bracket in moment]
            off = [_outside(placed.place(bracket.source_ns), bracket) for bracket in between]
            residual = placed.residual_ns + max(off, default=0)
            return Fit(placed.origin_ns, placed.offset_ns, placed.drift_ppb, residual), name
    raise InputError(f"samples lie outside the capture by every clock known ({', '.join(names) or 'none'})")


def _outside(moment: int, bracket: Bracket) -> int:
    return max(bracket.low_ns - moment, moment - bracket.high_ns, 0)


def clean(
    raw: RawSamples, placed: Fit, name: str, window: tuple[int, int], interval_ns: int, counting_ns: int | None = None
) -> Samples:
    """Return the valid samples and what was lost.

    The first sample of a session is garbage (huge counts, a stale start) and always dropped. Others are dropped where
    they end before they begin, repeat a time, or lie outside ``window``: start and stop were asked for, on the run's
    clock. Samples from before are left over from an earlier capture, those after are of the time that stopping took.
    ``counting_ns``: the sampler said it had started; from there on samples should cover the window.
    """
    losses: list[Loss] = []
    times, values = raw.times[1:], raw.values[1:]
    # Bounded first, so that no garbage overflows when placed.
    sane = (times > 0).all(axis=1) & (times < 1 << 61).all(axis=1) & (times[:, 1] > times[:, 0])
    times, values = times[sane], values[sane]
    start, end = placed.place_all(times[:, 0]), placed.place_all(times[:, 1])
    near = (start >= window[0] - FAR_NS) & (end <= window[1] + FAR_NS)
    stale, after = near & (end <= window[0]), near & (start >= window[1])
    inside = near & ~stale & ~after
    start, end, values = start[inside], end[inside], values[inside]
    order = np.argsort(start, kind="stable")
    start, end, values = start[order], end[order], values[order]
    fresh = np.ones(len(start), bool)
    fresh[1:] = start[1:] >= np.maximum.accumulate(end)[:-1] - interval_ns // 2
    start, end, values = start[fresh], end[fresh], values[fresh]
    if left_over := int(stale.sum()):
        losses.append(_loss("stale-samples", left_over, None, None, "info", "left over from before: dropped"))
    if damaged := len(raw.times[1:]) - left_over - int(after.sum()) - len(start):
        losses.append(
            _loss("damaged-samples", damaged, None, None, "data_loss", "times that cannot be: the samples were dropped")
        )
    losses += _uncovered(start, end, (counting_ns or window[0], window[1])) + _gaps(start, end, interval_ns)
    return Samples(start, end, values, placed, name, losses)


def _uncovered(start: Times, end: Times, window: tuple[int, int]) -> list[Loss]:
    """Return the parts of ``window`` before the first sample and after the last."""
    if not len(start):
        return []
    edges = (("late-start", window[0], int(start[0])), ("early-end", int(end[-1]), window[1]))
    return [
        _loss(kind, 1, first, last, "data_loss", f"no counts for {(last - first) / 1e3:.0f} us of the capture")
        for kind, first, last in edges
        if last - first > EDGE_NS
    ]


def _gaps(start: Times, end: Times, interval_ns: int) -> list[Loss]:
    """Return times without counts, and samples that stand for several: those hide no bytes, only when they moved."""
    holes = start[1:] - end[:-1]
    after = np.flatnonzero(holes > interval_ns * (GAP - 1))
    rows = [
        _loss(
            "counter-gap",
            max(1, round(int(holes[index]) / interval_ns)),
            int(end[index]),
            int(start[index + 1]),
            "data_loss",
            f"no counts for {int(holes[index]) / 1e3:.0f} us",
        )
        for index in after[:LISTED_GAPS]
    ]
    if len(more := after[LISTED_GAPS:]):
        missed = round(int(holes[more].sum()) / interval_ns)
        detail = f"{len(more)} more gaps between counter samples"
        rows.append(
            _loss("counter-gap", max(1, missed), int(end[more[0]]), int(start[more[-1] + 1]), "data_loss", detail)
        )
    if len(long := np.flatnonzero(end - start > interval_ns * GAP)):
        detail = f"{len(long)} samples are longer than {GAP} intervals: when their bytes moved is not known"
        rows.append(_loss("long-samples", len(long), int(start[long[0]]), int(end[long[-1]]), "info", detail))
    return rows


def overflow_losses(stopped: Mapping[str, Any], samples: Samples, stop_ns: int) -> list[Loss]:
    """Return what the sidecar lost to a full buffer or a failed decode, from its ``stopped`` answer."""
    last = int(samples.end_ns[-1]) if len(samples.end_ns) else None
    rows = []
    if overflows := stopped.get("overflows"):
        moments = [int(overflow["seen_ns"]) for overflow in overflows]
        detail = "the hardware buffer was full: samples after that are missing until it was read"
        rows.append(_loss("overflow", len(moments), min(moments), max(moments), "data_loss", detail))
    if counted := stopped.get("counted"):
        detail = "samples that CUPTI gave no time: counted on from the one before, by the sampling interval"
        rows.append(_loss("counted-times", int(counted), None, None, "info", detail))
    if failure := stopped.get("failure"):
        known = last is not None and last <= stop_ns
        rows.append(_loss("ended-early", 1, last if known else None, stop_ns if known else None, "error", str(failure)))
    return rows


def _loss(kind: str, count: int, first: int | None, last: int | None, severity: str, detail: str) -> Loss:
    return {
        "kind": kind,
        "count": count,
        "first_ns": first,
        "last_ns": last,
        "severity": severity,
        "detail": detail,
    }


def to_table(
    samples: Samples,
    chosen: CounterSet,
    metrics: Mapping[str, str],
    warps_per_sm: int,
    *,
    device: int,
    bin_ns: int = 0,
    source: str = SOURCE,
) -> pa.Table:
    """Return rows of ``counters``, one reading after the other; a value that is not finite (0 / 0) has no row.

    ``metrics``: the metric taken for each reading, in the order of the values' columns. ``bin_ns``: samples are merged
    into spans of at least that long, bytes added up and shares averaged over time; 0: every sample is kept.
    """
    raw = {name: samples.values[:, index] for index, name in enumerate(metrics)}
    groups = _groups(samples.start_ns, bin_ns)
    if not len(groups):
        return pa.table({})
    start, end = samples.start_ns[groups], samples.end_ns[np.append(groups[1:], len(samples.start_ns)) - 1]
    length = (samples.end_ns - samples.start_ns).astype(np.float64)
    tables = []
    for reading, values in normalise(chosen, metrics, raw, warps_per_sm):
        finite = np.isfinite(values)
        weight = np.where(finite, 1.0 if reading.additive else length, 0.0)
        total, weights = (np.add.reduceat(part, groups) for part in (np.where(finite, values, 0.0) * weight, weight))
        kept = weights > 0
        total = total[kept] if reading.additive else total[kept] / weights[kept]
        tables.append(
            pa.table(
                {
                    "source": _same(source, len(total)),
                    "name": _same(reading.name, len(total)),
                    "device": pa.array(np.full(len(total), device, np.int32)),
                    "start_ns": pa.array(start[kept]),
                    "end_ns": pa.array(end[kept]),
                    "value": pa.array(total),
                    "unit": _same(reading.unit, len(total)),
                }
            )
        )
    return pa.concat_tables(tables) if tables else pa.table({})


def _groups(start: Times, bin_ns: int) -> npt.NDArray[np.intp]:
    """Return the index of the first sample of each bin."""
    if not bin_ns or not len(start):
        return np.arange(len(start))
    bins = (start - start[0]) // bin_ns
    return np.flatnonzero(np.append(True, np.diff(bins) > 0))


def _same(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text), count)


def activity(counters: pa.Table) -> list[Sample]:
    """Return the samples of ``counters`` (as ``to_table`` made it) by how active the SMs were, for finding pulses.

    One warp on each SM is about 1. Empty where the set has no reading of ``ACTIVITY``.
    """
    import pyarrow.compute as pc

    if "name" not in counters.column_names:
        return []
    known = set(pc.unique(counters.column("name")).to_pylist())
    name = next((name for name in ACTIVITY if name in known), None)
    if name is None:
        return []
    rows = counters.filter(pc.equal(counters.column("name"), name))
    columns = (rows.column(column).to_pylist() for column in ("start_ns", "end_ns", "value"))
    return [Sample(start, end, active * ACTIVITY[name]) for start, end, active in zip(*columns, strict=True)]


def moved(counters: pa.Table, by: Fit) -> pa.Table:
    """Return ``counters`` with its times placed by ``by``."""
    for name in ("start_ns", "end_ns") if "name" in counters.column_names else ():
        placed = by.place_all(counters.column(name).to_numpy())
        counters = counters.set_column(counters.column_names.index(name), name, pa.array(placed))
    return counters

"""Steps of a trace without marks: replays of CUDA graphs, or kernels that repeat. Estimated, and said to be."""

from dataclasses import dataclass

import numpy as np

from workbench.ingest.columns import Ints
from workbench.ingest.kineto import KinetoTrace
from workbench.ingest.launches import GRAPH_LAUNCH, named

MIN_REPEATS = 3
"""Kernels must repeat this often before the repetition is taken for steps."""

MAX_PERIOD = 1024
_SAME = 0.95
_CROWDED = 1.5


@dataclass(frozen=True, slots=True)
class Window:
    """A span on the device's time line, ns."""

    start: int
    end: int


def graph_windows(trace: KinetoTrace, launches: Ints) -> tuple[list[Window], str]:
    """Return a window a step from the replays of graphs whose kernels are in the trace, and how it was done.

    Engines that cut the model into pieces replay many graphs a step: a step is then one period of the sequence.
    """
    rows = named(trace, GRAPH_LAUNCH)
    device = trace.device
    order = np.argsort(launches, kind="stable")
    first = np.searchsorted(launches[order], rows)
    last = np.searchsorted(launches[order], rows, side="right")
    starts, ends, kinds = [], [], []
    signatures: dict[bytes, int] = {}
    for begin, stop in zip(first, last, strict=True):
        if begin == stop:
            continue
        of_replay = order[begin:stop]
        starts.append(int(device["start"][of_replay].min()))
        ends.append(int(device["end"][of_replay].max()))
        signature = np.sort(device["name"][of_replay]).tobytes()
        kinds.append(signatures.setdefault(signature, len(signatures)))
    if not starts:
        return [], ""
    arranged = np.argsort(np.array(starts), kind="stable")
    start, end, kind = (np.array(values)[arranged] for values in (starts, ends, kinds))
    period = _period(kind)
    if period is None:
        spent = np.bincount(kind, weights=end - start)
        heads = np.flatnonzero(kind == int(spent.argmax()))
        note = "steps are estimated: one a replay of the graph that takes most time, no regular sequence"
    else:
        heads = _after_longest_gap(start, end, period)
        note = f"steps are estimated: {period} graph replay{'s' if period > 1 else ''} each, from replay to replay"
    return _windows(trace, heads, start, end, note)


def kernel_windows(trace: KinetoTrace) -> tuple[list[Window], str]:
    """Return a window a step from kernels that come once a step, and how it was done.

    Kernels of layers repeat within a step; those of embedding, head or sampling come once. So the rarest names that
    come at regular distances mark the steps.
    """
    device = trace.device
    streams, index = np.unique(np.stack([device["device"], device["stream"]]), axis=1, return_inverse=True)
    if not streams.size:
        return [], ""
    busiest = int(np.bincount(index.reshape(-1)).argmax())
    rows = np.flatnonzero((index.reshape(-1) == busiest) & (device["kind"] == 0))
    rows = rows[np.argsort(device["start"][rows], kind="stable")]
    start, end, names = device["start"][rows], np.maximum.accumulate(device["end"][rows]), device["name"][rows]
    counts = np.bincount(names) if len(names) else np.zeros(0, np.int64)
    for count in sorted(set(counts[counts >= MIN_REPEATS].tolist())):
        heads = [np.flatnonzero(names == code) for code in np.flatnonzero(counts == count)[:64]]
        regular = [places for places in heads if _regular(places, len(names))]
        if len(regular) >= 2 or (regular and len(names) <= 8 * count):
            best = max(regular, key=lambda places: _mean_gap(places, start, end))
            note = f"steps are estimated: {count} repetitions of {len(names) // count} kernels (of few steps, layers)"
            return _windows(trace, best, start, end, note)
    return [], ""


def _regular(places: Ints, total: int) -> bool:
    distances = np.diff(places)
    middle = float(np.median(distances))
    even = distances.max() - distances.min() <= 0.1 * middle + 1
    return bool(even and places[-1] - places[0] + middle >= 0.6 * total)


def _mean_gap(places: Ints, start: Ints, end: Ints) -> float:
    inner = places[places > 0]
    return float((start[inner] - end[inner - 1]).mean()) if len(inner) else 0.0


def _period(kinds: Ints) -> int | None:
    """Return the shortest distance at which the sequence equals itself; 1 for a single one."""
    if len(kinds) == 1:
        return 1
    for period in range(1, min(MAX_PERIOD, len(kinds) // 2) + 1):
        if (kinds[period:] == kinds[:-period]).mean() >= _SAME:
            return period
    return None


def _after_longest_gap(start: Ints, end: Ints, period: int) -> Ints:
    """Return the replays that begin a period, where the device waited longest before."""
    if period == 1:
        return np.arange(len(start))
    offsets = [_mean_gap(np.arange(offset, len(start), period), start, end) for offset in range(period)]
    return np.arange(int(np.argmax(offsets)), len(start), period)


def _windows(trace: KinetoTrace, heads: Ints, start: Ints, end: Ints, note: str) -> tuple[list[Window], str]:
    """Return windows from head to head, without those that hold far more device rows than the others."""
    last = int(end[heads[-1] :].max()) if len(heads) == 1 else int(_last_end(heads, start, end))
    edges = [int(value) for value in start[heads]] + [last]
    every = np.sort(trace.device["start"])
    held = np.diff(np.searchsorted(every, edges))
    allowed = _CROWDED * float(np.median(held)) + 8
    windows = [
        Window(edges[index], edges[index + 1])
        for index in range(len(heads))
        if held[index] <= allowed and edges[index + 1] > edges[index]
    ]
    if left_out := len(heads) - len(windows):
        note += f"; {left_out} left out that hold more than a step's kernels (prefill, say)"
    return windows, note


def _last_end(heads: Ints, start: Ints, end: Ints) -> int:
    """Return where the last step ends: with as many items as the one before, no more."""
    items = int(np.median(np.diff(heads)))
    return int(end[heads[-1] : heads[-1] + items].max())

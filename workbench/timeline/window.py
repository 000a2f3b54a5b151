"""One window of a timeline: at most a fixed number of marks a track, whatever the window holds.

Few spans are given one by one. Many are binned: how busy each bin is, its longest span, its longest gap. The answer
depends on nothing but the timeline and the window, so no state is kept between two questions.
"""

from dataclasses import dataclass

import numpy as np

from workbench.errors import InputError
from workbench.timeline.lanes import LaneBins
from workbench.timeline.pyramid import Ints
from workbench.timeline.samples import Floats
from workbench.timeline.spans import Codes, SpanBins
from workbench.timeline.track import LaneTrack, SampleTrack, SpanTrack, Track
from workbench.timeline.tracks import Timeline

MAX_BINS = 2000
MAX_SPANS = 400
"""Spans of one track that are given one by one."""
MAX_DEPTH = 8
"""Nested calls below this depth are never given one by one; where the upper ones fill MAX_SPANS, nor are those below
them. ``hidden`` counts them."""


@dataclass(frozen=True, slots=True)
class Each:
    """Spans one by one: ``start``, ``end`` in ns, ``depth`` from 0, ``codes`` into the track's names, ``ids``."""

    start: Ints
    end: Ints
    depth: Ints
    codes: Codes
    ids: Ints
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Binned:
    """Spans by bin; ``edges`` in ns, one more than bins."""

    edges: Ints
    bins: SpanBins


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps one by one, start and end in ns."""

    start: Ints
    end: Ints


@dataclass(frozen=True, slots=True)
class Values:
    """Samples one by one: ``start`` and ``end`` in ns, ``value``."""

    start: Ints
    end: Ints
    value: Floats


@dataclass(frozen=True, slots=True)
class Band:
    """Least and greatest value by bin, bins without a sample left out. ``start`` and ``end`` in ns."""

    start: Ints
    end: Ints
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Shares:
    """What CTAs do by bin; ``edges`` in ns, one more than bins."""

    edges: Ints
    bins: LaneBins


Content = Each | Binned | Gaps | Values | Band | Shares


@dataclass(frozen=True, slots=True)
class Row:
    """One track and what the window shows of it."""

    track: Track
    content: Content


@dataclass(frozen=True, slots=True)
class Window:
    """The answer for [start_ns, end_ns)."""

    start_ns: int
    end_ns: int
    rows: tuple[Row, ...]


def clamp(timeline: Timeline, start_ns: int | None, end_ns: int | None) -> tuple[int, int]:
    """Return a window within the timeline, at least 10 ns wide; None means from its start, to its end."""
    first = timeline.start_ns if start_ns is None else max(timeline.start_ns, min(start_ns, timeline.end_ns - 10))
    last = timeline.end_ns if end_ns is None else min(timeline.end_ns, max(end_ns, timeline.start_ns + 10))
    return first, max(last, first + 10)


def look(timeline: Timeline, start_ns: int, end_ns: int, bins: int, keys: frozenset[str] | None = None) -> Window:
    """Return what [start_ns, end_ns) shows, in at most ``bins`` bins; ``keys``: only these tracks.

    Raises InputError where the window is empty or ``bins`` is not between 1 and MAX_BINS.
    """
    if end_ns <= start_ns:
        raise InputError(f"timeline: empty window {start_ns} to {end_ns}")
    if not 1 <= bins <= MAX_BINS:
        raise InputError(f"timeline: {bins} bins", hint=f"ask for 1 to {MAX_BINS}")
    edges = edges_of(start_ns, end_ns, bins)
    rows = [Row(track, _content(track, edges)) for track in timeline.tracks if keys is None or track.key in keys]
    return Window(start_ns, end_ns, tuple(rows))


def edges_of(start_ns: int, end_ns: int, bins: int) -> Ints:
    """Return the borders of at most ``bins`` bins of whole ns that fill the window."""
    count = min(bins, end_ns - start_ns)
    # Integers: a float cannot hold a clock that counts nanoseconds since 1970.
    steps = np.arange(count + 1, dtype=object) * (end_ns - start_ns) // count
    return np.asarray(steps, dtype=np.int64) + start_ns


def _content(track: Track, edges: Ints) -> Content:
    if isinstance(track, LaneTrack):
        return Shares(edges, track.lanes.bins(edges))
    return _samples(track, edges) if isinstance(track, SampleTrack) else _spans(track, edges)


def _spans(track: SpanTrack, edges: Ints) -> Content:
    spans, start_ns, end_ns = track.spans, int(edges[0]), int(edges[-1])
    if track.gaps:
        gaps = spans.gaps(start_ns, end_ns, MAX_SPANS)
        return Binned(edges, spans.bins(edges)) if gaps is None else Gaps(*gaps)
    first, last = spans.range(start_ns, end_ns)
    if last - first > 16 * MAX_SPANS:
        return Binned(edges, spans.bins(edges))
    rows = spans.rows(start_ns, end_ns)
    depth = _depths(spans.start[rows], spans.end[rows]) if track.nested else np.zeros(len(rows), np.int64)
    shown = depth < _deepest(depth)
    if not shown.any() and len(rows):
        return Binned(edges, spans.bins(edges))
    kept = rows[shown]
    hidden = int((~shown).sum())
    return Each(spans.start[kept], spans.end[kept], depth[shown], spans.codes[kept], spans.ids[kept], hidden)


def _samples(track: SampleTrack, edges: Ints) -> Content:
    samples = track.samples
    rows = samples.rows(int(edges[0]), int(edges[-1]))
    if len(rows) <= MAX_SPANS:
        return Values(samples.start[rows], samples.end[rows], samples.value[rows])
    made = samples.bins(edges)
    seen = made.count > 0
    return Band(edges[:-1][seen], edges[1:][seen], made.low[seen], made.high[seen])


def _deepest(depth: Ints) -> int:
    """Return the depth above which at most MAX_SPANS spans lie; 0 where the outermost alone are more."""
    up_to = np.cumsum(np.bincount(depth, minlength=MAX_DEPTH)[:MAX_DEPTH])
    return int((up_to <= MAX_SPANS).sum())


def _depths(start: Ints, end: Ints) -> Ints:
    """Return how many earlier spans still run when each begins."""
    depths, open_ends = np.zeros(len(start), np.int64), list[int]()
    for index, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        depths[index] = len(open_ends)
        open_ends.append(stop)
    return depths

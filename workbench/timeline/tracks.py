"""The tracks of one variant's timeline, read once from the bundle: steps, host, waits, device, counters, marks.

Everything is kept as sorted arrays (28 bytes a span with its pyramid), so that a window needs no scan of a file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from workbench.diagnose.facts import TRUSTED
from workbench.diagnose.step_signals import median_step
from workbench.diagnose.steps import load_steps
from workbench.errors import InputError, UnfitError
from workbench.timeline.counter_tracks import read_counters
from workbench.timeline.device_tracks import read_kernels, read_lanes
from workbench.timeline.read import NAMED, columns, groups, ints, names, place, spans
from workbench.timeline.samples import Samples
from workbench.timeline.spans import Spans
from workbench.timeline.stretches import PassBand, load_stretches
from workbench.timeline.track import LaneTrack, SampleTrack, SpanTrack, Track
from workbench.trace.bundle import Bundle


@dataclass(frozen=True, slots=True)
class Timeline:
    """One variant over one run. Times in ns on the bundle's clock; [start_ns, end_ns) holds every row but counters of
    the run that were read outside of it.

    ``bands``: when each pass ran. ``passes``: the band of each that has the most steps. ``moments``: steps to look at,
    by name: those that ``diagnose.step_picture`` shows. ``left_out``: what was not read, and why.
    """

    variant: str
    start_ns: int
    end_ns: int
    tracks: tuple[Track, ...]
    passes: Mapping[str, tuple[int, int]]
    moments: Mapping[str, tuple[int, int]]
    left_out: tuple[str, ...] = field(default=())
    bands: tuple[PassBand, ...] = field(default=())

    def track(self, key: str) -> Track:
        """Return the track called ``key``; InputError where there is none."""
        for track in self.tracks:
            if track.key == key:
                return track
        raise InputError(f"timeline: no track {key!r}")

    @property
    def events(self) -> int:
        """Spans and samples of all tracks; gaps are not counted."""
        return sum(0 if isinstance(track, SpanTrack) and track.gaps else _length(track) for track in self.tracks)


def load_timeline(bundle: Bundle, variant: str) -> Timeline:
    """Read the timeline of ``variant``.

    Raises InputError where there is no such variant or a table is damaged, UnfitError where nothing has a time.
    """
    if variant not in {record.name for record in bundle.manifest.variants}:
        raise InputError(f"{bundle.path}: no variant {variant!r}")
    left_out: list[str] = []
    stretches, bands = load_stretches(bundle, variant)
    tracks: list[Track] = []
    for read in (_steps, _host, _syncs):
        tracks += read(bundle, variant, left_out)
    tracks += read_kernels(bundle, variant, left_out, stretches)
    tracks += read_lanes(bundle, variant)
    tracks += read_counters(bundle, variant, left_out)
    filled = [track for track in tracks if _length(track)]
    # Counters of the whole run were read while other variants ran, too: they do not widen this one's window.
    bounds = [_bounds(track) for track in filled if track.group != "counters"] or [_bounds(track) for track in filled]
    if not bounds:
        raise UnfitError(f"{bundle.path}: variant {variant!r} has no row with a time", hint="there is nothing to draw")
    fullest: dict[str, PassBand] = {}
    for band in bands:
        fullest[band.run_pass] = max(fullest.get(band.run_pass, band), band, key=lambda one: one.steps)
    return Timeline(
        variant,
        min(first for first, _ in bounds),
        max(last for _, last in bounds),
        # A row of no spans that has a remark says so: no kernel spills.
        tuple(track for track in tracks if _length(track) or (isinstance(track, SpanTrack) and track.remark)),
        {name: (band.start_ns, band.end_ns) for name, band in fullest.items()},
        _moments(bundle, variant),
        tuple(left_out),
        bands,
    )


def _length(track: Track) -> int:
    if isinstance(track, LaneTrack):
        return len(track.lanes)
    return len(track.samples if isinstance(track, SampleTrack) else track.spans)


def _bounds(track: Track) -> tuple[int, int]:
    if isinstance(track, LaneTrack):
        return track.lanes.start_ns, track.lanes.end_ns + 1
    data = track.samples if isinstance(track, SampleTrack) else track.spans
    last = int(data.reach[-1]) if isinstance(data, Spans) else int(max(data.end[-1], data.start[-1]))
    return int(data.start[0]), last + 1


_STEPS = """
SELECT step_id, run_pass, start_ns, draft_end_ns, forward_end_ns, end_ns, coalesce(committed, -1) AS committed
FROM steps WHERE variant = $1 ORDER BY start_ns
"""


def _steps(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = columns(bundle, _STEPS, [variant])
    if not table.num_rows:
        return
    start, draft, forward, end, ids, committed = (
        ints(table, name) for name in ("start_ns", "draft_end_ns", "forward_end_ns", "end_ns", "step_id", "committed")
    )
    passes = table.column("run_pass").combine_chunks().dictionary_encode()
    named = tuple(f"{name} step" for name in passes.dictionary.to_pylist())
    own = Spans(start, end, ids, passes.indices.to_numpy().astype(np.int32))
    yield SpanTrack("steps", "steps", "steps", own, named, "steps")
    known = committed >= 0
    if known.any():
        samples = Samples(start[known], end[known], committed[known], ids[known])
        yield SampleTrack("accept", "accept length", "steps", samples, "tokens")
    parts = [(start, draft), (draft, forward), (forward, end)]
    begin, stop = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    codes = np.repeat(np.arange(3, dtype=np.int32), len(start))
    lasting = stop > begin
    parted = Spans(begin[lasting], stop[lasting], np.tile(ids, 3)[lasting], codes[lasting])
    yield SpanTrack("phases", "phases", "steps", parted, ("draft", "forward", "verify"), "steps")


_HOST = """
SELECT thread, rank, host_id, start_ns, end_ns, code FROM host JOIN names USING (name)
WHERE variant = $1 AND category <> 'annotation'
"""


def _host(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = columns(bundle, NAMED.format(table="host") + _HOST, [variant])
    if not table.num_rows:
        return
    named = names(bundle, "host", variant)
    for (thread, rank), rows in groups(table, ("thread", "rank"), left_out, "host threads"):
        label = f"thread {thread}{place(None, rank)}"
        yield SpanTrack(f"host:{thread}:{rank}", label, "host", spans(rows, "host_id"), named, "host", nested=True)


_SYNCS = """
SELECT row_number() OVER () AS id, start_ns, end_ns, code FROM syncs JOIN names USING (name)
WHERE variant = $1
"""


def _syncs(bundle: Bundle, variant: str, left_out: list[str]) -> Iterator[Track]:
    table = columns(bundle, NAMED.format(table="syncs") + _SYNCS, [variant])
    if table.num_rows:
        yield SpanTrack("syncs", "syncs", "waits", spans(table, "id"), names(bundle, "syncs", variant), "syncs")


def _moments(bundle: Bundle, variant: str) -> dict[str, tuple[int, int]]:
    """Return the median and the worst step, of the traced pass where there is one: there the most is known."""
    for run_pass in ("traced", *TRUSTED):
        steps = load_steps(bundle, variant, run_pass)
        if len(steps):
            chosen = {"median step": median_step(steps), "worst step": int(np.argmax(steps.wall))}
            return {name: (int(steps.start[at]), int(steps.end[at])) for name, at in chosen.items()}
    return {}

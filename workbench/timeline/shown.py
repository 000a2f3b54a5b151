"""What of a timeline is worth a row in a window, and in words the rest."""

from dataclasses import dataclass

from workbench.timeline.track import LaneTrack, SampleTrack, SpanTrack, Track
from workbench.timeline.tracks import Timeline
from workbench.timeline.window import Window, look


@dataclass(frozen=True, slots=True)
class Shown:
    """The rows of a window, and the labels of tracks that have none, by why.

    ``never_set``: flags that the whole variant never set. ``never_rose``: counts of errors that stayed as they were.
    ``folded``: counters that are drawn on demand. ``elsewhere``: tracks with nothing in the window.
    """

    window: Window
    never_set: tuple[str, ...] = ()
    never_rose: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


def choose(timeline: Timeline, start_ns: int, end_ns: int, bins: int, *, every: bool = False) -> Shown:
    """Return what [start_ns, end_ns) shows, as ``look`` does, of the tracks worth a row; ``every``: of all.

    Counters that are neither traffic, residency, power nor clock are folded, unless there is no such counter.
    """
    if every:
        return Shown(look(timeline, start_ns, end_ns, bins))
    samples = [track for track in timeline.tracks if isinstance(track, SampleTrack)]
    quiet = [track for track in samples if track.quiet]
    folded: list[SampleTrack] = []
    if any(track.weight == "main" and track.group == "counters" for track in samples):
        folded = [track for track in samples if track.weight == "other"]
    left = {track.key for track in (*quiet, *folded)}
    rest = [track for track in timeline.tracks if track.key not in left]
    empty = [track for track in rest if not _touches(track, start_ns, end_ns)]
    left |= {track.key for track in empty}
    keys = frozenset(track.key for track in rest if track.key not in left)
    return Shown(
        look(timeline, start_ns, end_ns, bins, keys),
        tuple(track.label for track in quiet if track.weight == "flag"),
        tuple(track.label for track in quiet if track.weight == "errors"),
        tuple(track.label for track in folded),
        tuple(track.label for track in empty),
    )


def _touches(track: Track, start_ns: int, end_ns: int) -> bool:
    """Return whether the track has something in the window, or says something by having nothing there."""
    if isinstance(track, SampleTrack):
        return len(track.samples.rows(start_ns, end_ns)) > 0
    if isinstance(track, LaneTrack):
        return track.lanes.start_ns < end_ns and track.lanes.end_ns > start_ns
    return _speaks_empty(track) or track.spans.touch(start_ns, end_ns)


def _speaks_empty(track: SpanTrack) -> bool:
    return track.key == "spills"

"""Counters of several sets: what two sets have is drawn once by default, and each track says whose it is."""

from workbench.commands.demo import recorded_folder
from workbench.timeline.track import SampleTrack
from workbench.timeline.tracks import load_timeline
from workbench.trace.bundle import Bundle


def test_each_set_has_its_tracks_and_the_first_is_drawn_by_default() -> None:
    with Bundle.open(recorded_folder() / "counter-sets-gpt-oss-20b-h200") as bundle:
        tracks = [track for track in load_timeline(bundle, "splitk").tracks if isinstance(track, SampleTrack)]
    names = [track.label for track in tracks]
    assert len(set(names)) == len(names)
    drawn = [track.label for track in tracks if track.weight == "main" and track.key.startswith("counter:pm_sampler")]
    assert drawn == [
        "HBM read",
        "HBM write",
        "CTAs per SM",
        "warps resident",
        "SMs active",
        "warps waiting for memory, a scheduler (set stalls)",
        "instructions a cycle, an SM (set pipes)",
    ]
    others = {track.label for track in tracks if track.weight == "other"}
    assert {"HBM read (set pipes)", "warps resident (set local)", "local memory read (set local)"} <= others

from collections.abc import Callable

import pytest

from workbench.errors import InputError, UnfitError
from workbench.timeline.read import MAX_TRACKS
from workbench.timeline.track import SampleTrack, SpanTrack
from workbench.timeline.tracks import load_timeline
from workbench.trace.bundle import Bundle

US = 1_000


def test_every_signal_is_a_track_in_order(bundle: Bundle) -> None:
    timeline = load_timeline(bundle, "v")
    assert [track.key for track in timeline.tracks] == [
        "steps",
        "accept",
        "phases",
        "host:1:None",
        "syncs",
        "kernels:0:None:7",
        "kernels:0:None:8",
        "gaps:0:None",
        "spills",
        "counter:pm_sampler:dram_read_bytes:0:None",
        "counter:pm_sampler:ctas_per_sm:0:None",
    ]
    assert (timeline.start_ns, timeline.end_ns) == (0, 1000 * US + 1)
    assert timeline.passes == {"traced": (0, 1000 * US)}
    assert set(timeline.moments) == {"median step", "worst step"}
    spills = timeline.track("spills")
    assert isinstance(spills, SpanTrack)
    assert len(spills.spans) == 10


def test_counted_bytes_become_a_rate(bundle: Bundle) -> None:
    track = load_timeline(bundle, "v").track("counter:pm_sampler:dram_read_bytes:0:None")
    assert isinstance(track, SampleTrack)
    assert track.unit == "GB/s"
    assert track.samples.value.max() == pytest.approx(4000)


def test_names_and_ids_go_with_their_spans(bundle: Bundle) -> None:
    timeline = load_timeline(bundle, "v")
    track = timeline.track("kernels:0:None:8")
    assert isinstance(track, SpanTrack)
    for row in range(0, len(track.spans), 17):
        key = int(track.spans.ids[row])
        assert track.names[track.spans.codes[row]] == f"k{key % 60 % 5}"


def test_unknown_variants_and_bundles_without_times_are_refused(make_bundle: Callable[..., Bundle]) -> None:
    empty = make_bundle({"env": [{"key": "a", "value": "b"}]})
    with pytest.raises(InputError, match="no variant 'w'"):
        load_timeline(empty, "w")
    with pytest.raises(UnfitError, match="no row with a time"):
        load_timeline(empty, "v")
    with pytest.raises(InputError, match="no track"):
        load_timeline(make_bundle({"host": [_host(1)]}), "v").track("x")


def _host(thread: int) -> dict[str, object]:
    times = {"start_ns": thread, "end_ns": thread + 5}
    return {"variant": "v", "host_id": thread, "thread": thread, "name": "x", "category": "op", **times}


def test_too_many_threads_are_left_out_and_said(make_bundle: Callable[..., Bundle]) -> None:
    timeline = load_timeline(make_bundle({"host": [_host(thread) for thread in range(MAX_TRACKS + 3)]}), "v")
    assert len(timeline.tracks) == MAX_TRACKS
    assert "3 of 203 host threads" in timeline.left_out[0]

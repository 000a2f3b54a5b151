from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.timeline.tracks import load_timeline
from workbench.timeline.window import MAX_SPANS, Binned, Each, Gaps, Window, clamp, edges_of, look
from workbench.trace.bundle import Bundle

US = 1_000


@given(st.integers(0, 2**62), st.integers(1, 10**13), st.integers(1, 2000))
def test_edges_fill_the_window_in_bounded_bins(start: int, width: int, bins: int) -> None:
    edges = edges_of(start, start + width, bins)
    assert (edges[0], edges[-1]) == (start, start + width)
    assert 2 <= len(edges) <= bins + 1
    assert (np.diff(edges) > 0).all()


def _content(window: Window, key: str) -> object:
    return next(row.content for row in window.rows if row.track.key == key)


def test_a_gap_is_there_in_the_whole_run_and_close_up(bundle: Bundle) -> None:
    timeline = load_timeline(bundle, "v")
    whole = _content(look(timeline, timeline.start_ns, timeline.end_ns, 5), "gaps:0:None")
    close = _content(look(timeline, 400 * US, 500 * US, 5), "gaps:0:None")
    longest = []
    for content in (whole, close):
        if isinstance(content, Binned):
            longest.append(int(content.bins.gap_ns.max()))
        else:
            assert isinstance(content, Gaps)
            longest.append(int((content.end - content.start).max()))
    assert longest == [20 * US, 20 * US]


def test_no_window_holds_more_marks_than_allowed(make_bundle: Callable[..., Bundle]) -> None:
    host = [
        {"variant": "v", "host_id": index, "thread": 1, "name": "x", "category": "op"}
        | {"start_ns": 10 * index, "end_ns": 10 * index + 5}
        for index in range(3 * MAX_SPANS)
    ]
    timeline = load_timeline(make_bundle({"host": host}), "v")
    for width in (100, 1000, 5000, 12_000):
        content = _content(look(timeline, 0, width, 50), "host:1:None")
        if isinstance(content, Each):
            assert len(content.start) <= MAX_SPANS
        else:
            assert isinstance(content, Binned)
            assert len(content.bins.busy_ns) <= 50
            assert content.bins.busy_ns.sum() == width // 2 if width < 12_000 else True


def test_nested_calls_have_depths(bundle: Bundle) -> None:
    content = _content(look(load_timeline(bundle, "v"), 0, 60 * US, 100), "host:1:None")
    assert isinstance(content, Each)
    assert content.depth.tolist() == [0, 1]


def test_the_innermost_calls_give_way_first(make_bundle: Callable[..., Bundle]) -> None:
    host = [{"start_ns": 0, "end_ns": 10_000}]
    host += [{"start_ns": 10 * index, "end_ns": 10 * index + 5} for index in range(1, 2 * MAX_SPANS)]
    rows = [
        {"variant": "v", "host_id": index, "thread": 1, "name": "x", "category": "op", **row}
        for index, row in enumerate(host)
    ]
    content = _content(look(load_timeline(make_bundle({"host": rows}), "v"), 0, 10_000, 100), "host:1:None")
    assert isinstance(content, Each)
    assert (len(content.start), content.hidden) == (1, 2 * MAX_SPANS - 1)


def test_a_window_is_kept_within_the_run(bundle: Bundle) -> None:
    timeline = load_timeline(bundle, "v")
    assert clamp(timeline, None, None) == (0, 1_000_001)
    assert clamp(timeline, -5, 10**15) == (0, 1_000_001)
    assert clamp(timeline, 700, 700) == (700, 710)
    assert clamp(timeline, 10**15, None) == (999_991, 1_000_001)


def test_senseless_windows_are_refused(bundle: Bundle) -> None:
    timeline = load_timeline(bundle, "v")
    with pytest.raises(InputError, match="empty window"):
        look(timeline, 5, 5, 10)
    with pytest.raises(InputError, match="0 bins"):
        look(timeline, 0, 5, 0)

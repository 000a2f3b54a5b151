import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.dashboards.context import Browser, read_browser
from workbench.dashboards.pages.history import history_figure
from workbench.dashboards.pages.timeline import read_zoom
from workbench.dashboards.timeline_figure import timeline_figure
from workbench.dashboards.timeline_rows import duration_text
from workbench.runs.catalogue import RunEntry
from workbench.runs.changes import Change
from workbench.runs.history import HistoryPoint, Series
from workbench.timeline.lanes import Lanes
from workbench.timeline.samples import Samples
from workbench.timeline.spans import Spans
from workbench.timeline.stretches import PassBand
from workbench.timeline.track import LaneTrack, SampleTrack, SpanTrack
from workbench.timeline.tracks import Timeline
from workbench.timeline.window import look
from workbench.trace.manifest import Manifest

BOOT = 1_795_980_718_691_269_429
"""A clock that counts ns since 1970: floating point numbers are 256 ns apart there."""


def _timeline(count: int, name: str = "k") -> Timeline:
    start = BOOT + 1_000 * np.arange(count, dtype=np.int64)
    spans = Spans(start, start + 900)
    tracks = (
        SpanTrack("kernels:0:None:7", name, "device", spans, (name,), "kernels"),
        SpanTrack("gaps:0:None", "gaps", "device", spans, (name,), gaps=True),
        SampleTrack("counter:a", name, "counters", Samples(start, start + 1_000, np.arange(count)), name),
    )
    return Timeline("v", BOOT, BOOT + 1_000 * count, tracks, {}, {})


def _figure(timeline: Timeline, start: int, end: int) -> dict[str, Any]:
    return timeline_figure(timeline, look(timeline, BOOT + start, BOOT + end, 500))


def test_nanoseconds_are_exact_on_the_axis() -> None:
    figure = _figure(_timeline(50), 3_000, 5_000)
    kernels = figure["data"][0]
    assert kernels["base"] == [3_000, 4_000]
    assert kernels["x"] == [900, 900]
    assert figure["layout"]["xaxis"]["range"] == [3_000, 5_000]
    assert json.loads(json.dumps(figure)) == figure


def test_a_million_spans_are_a_bounded_figure() -> None:
    figure = _figure(_timeline(1_000_000), 0, 1_000_000_000)
    assert len(json.dumps(figure)) < 300_000
    busy = figure["data"][0]
    assert busy["y"] == pytest.approx([0.9] * len(busy["y"]))


def test_names_stay_text() -> None:
    figure = _figure(_timeline(5, "<b>x</b>&lt;"), 0, 5_000)
    shown = json.dumps([figure["layout"]["annotations"], [trace.get("hovertext") for trace in figure["data"]]])
    assert "<b>" not in shown
    assert "&lt;b&gt;x&lt;/b&gt;&amp;lt;" in shown


def test_a_window_between_two_samples_is_empty_and_says_so() -> None:
    start = np.array([BOOT, BOOT + 10_000])
    track = SampleTrack("counter:a", "clock", "counters", Samples(start, start, np.array([1.0, 2.0])), "MHz")
    figure = _figure(Timeline("v", BOOT, BOOT + 20_000, (track,), {}, {}), 2_000, 3_000)
    assert figure["data"] == []
    assert "no sample here" in figure["layout"]["annotations"][0]["text"]


def test_passes_are_named_bands_and_colour_the_steps() -> None:
    start = np.concatenate([BOOT + 1_000 * np.arange(9000), BOOT + 20_000_000 + 1_000 * np.arange(9000)])
    steps = SpanTrack("steps", "steps", "steps", Spans(start, start + 900), ("clean step",), "steps")
    bands = (
        PassBand("clean", BOOT, BOOT + 9_000_000, 9000),
        PassBand("<b>x</b>", BOOT + 20_000_000, BOOT + 29_000_000, 9000),
    )
    timeline = Timeline("v", BOOT, BOOT + 29_000_000, (steps,), {}, {}, bands=bands)
    whole = _figure(timeline, 0, 29_000_000)
    assert [(shape["x0"], shape["x1"]) for shape in whole["layout"]["shapes"]] == [
        (0, 9_000_000),
        (20_000_000, 29_000_000),
    ]
    texts = [note["text"] for note in whole["layout"]["annotations"]]
    assert texts[0] == "clean, 9,000 steps"
    assert "<b>" not in texts[1]
    clean, other = whole["data"]
    assert max(clean["y"][:100]) > 0.5
    assert max(clean["y"][300:]) == 0
    assert max(other["y"][:100]) == 0
    inside = _figure(timeline, 1_000, 50_000)  # within one pass there is nothing to tell apart
    assert inside["layout"]["shapes"] == []


def test_labels_of_passes_that_would_meet_stand_on_two_lines() -> None:
    start = np.array([BOOT, BOOT + 10, BOOT + 1_000])
    track = SpanTrack("steps", "steps", "steps", Spans(start, start + 5), ("clean step",), "steps")
    bands = tuple(PassBand("clean", int(at), int(at) + 5, 1) for at in start)
    figure = _figure(Timeline("v", BOOT, BOOT + 2_000, (track,), {}, {}, bands=bands), 0, 2_000)
    assert [note["yshift"] for note in figure["layout"]["annotations"][:3]] == [0, 18, 0]


def test_a_line_breaks_where_nothing_was_sampled() -> None:
    start = BOOT + np.array([0, 10, 50])
    track = SampleTrack("accept", "accept", "steps", Samples(start, start + 10, np.array([1.0, 2.0, 3.0])), "tokens")
    (line,) = _figure(Timeline("v", BOOT, BOOT + 60, (track,), {}, {}), 0, 60)["data"]
    assert line["x"] == [0, 10, 20, None, 50, 60]
    assert line["y"] == [1, 2, 2, None, 3, 3]


def test_what_ctas_do_is_stacked() -> None:
    spans = (np.array([BOOT]), np.array([BOOT + 60]))
    lanes = Lanes(spans, spans, (np.array([BOOT + 60]), np.array([BOOT + 100])), 1)
    figure = _figure(Timeline("v", BOOT, BOOT + 100, (LaneTrack("lanes", "CTAs", "device", lanes),), {}, {}), 0, 100)
    computing, other, waiting = (trace["y"] for trace in figure["data"])
    assert (computing[10], other[10], waiting[10]) == (1, 0, 0)
    assert (computing[80], other[80], waiting[80]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("ns", "text"), [(12_400, "12.40 µs"), (1, "1.000 ns"), (0, "0 ns"), (2_500_000_000, "2.500 s"), (999, "999.0 ns")]
)
def test_times_have_the_unit_that_fits(ns: int, text: str) -> None:
    assert duration_text(ns) == text


@pytest.mark.parametrize(
    ("moved", "window"),
    [
        ({"xaxis.range[0]": 5.4, "xaxis.range[1]": 1.2}, (1, 5)),
        ({"xaxis.autorange": True}, (None, None)),
        ({"autosize": True}, None),
        ({"xaxis.range[0]": "now", "xaxis.range[1]": 2}, None),
        ({"xaxis.range[0]": 1e300, "xaxis.range[1]": 2}, None),
        (None, None),
    ],
)
def test_a_zoom_is_read_or_ignored(moved: Any, window: Any) -> None:
    assert read_zoom(moved) == window


def test_a_change_of_level_is_marked_at_its_run() -> None:
    points = [
        HistoryPoint(
            RunEntry(str(day), f"r{day}", Path(), Manifest(created=f"2026-01-0{day}T00:00:00+00:00"), "", (0, 0)),
            tok_s=100.0,
            accept_length=1.0,
            step_p50=1.0,
        )
        for day in range(1, 9)
    ]
    series = Series("s", "cpu", "<b>plain</b>", tuple(points), (Change(4, 0.9, 0.001),))
    figure = history_figure([series])
    (mark,) = figure["layout"]["shapes"]
    assert mark["x0"] == figure["data"][0]["x"][4] == "2026-01-05T00:00:00"
    assert "<b>" not in json.dumps(figure)


@pytest.mark.parametrize("data", [None, [], "dark", {"width": "1"}, {"scheme": "<x>"}])
def test_a_browser_that_says_nonsense_is_the_default(data: Any) -> None:
    assert read_browser(data) == Browser()

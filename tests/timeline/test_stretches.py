"""Gaps count within consecutive steps of one sequence; passes are bands of time."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.timeline.shown import choose
from workbench.timeline.spans import Spans
from workbench.timeline.stretches import load_stretches
from workbench.timeline.track import SpanTrack
from workbench.timeline.tracks import load_timeline
from workbench.timeline.window import Binned, Gaps, look
from workbench.trace.bundle import Bundle

US = 1_000
STEPS = (  # pass, sequence, index, start in us: 100 us each
    ("clean", 0, 0, 0),
    ("clean", 0, 1, 100),
    ("clean", 1, 0, 300),
    ("traced", 2, 0, 5000),
    ("traced", 2, 1, 5100),
    ("traced", 3, 0, 5300),
    ("clean", 4, 0, 90_000),
)


def _tables() -> dict[str, list[dict[str, Any]]]:
    steps, kernels = [], []
    for number, (run_pass, sequence, index, at) in enumerate(STEPS):
        steps.append(
            {"variant": "v", "run_pass": run_pass, "step_id": number, "sequence_id": sequence, "index": index}
            | {"warmup": False, "start_ns": at * US, "draft_end_ns": at * US}
            | {"forward_end_ns": (at + 90) * US, "end_ns": (at + 100) * US}
        )
        if run_pass == "traced":  # noqa: S105 - no password
            for part in (10, 50):  # 30 us idle within a step, 20 us between two
                kernels.append(
                    {"variant": "v", "kernel_id": len(kernels), "name": "k", "kind": "kernel", "device": 0}
                    | {"stream": 7, "step_id": number, "local_bytes_per_thread": 0}
                    | {"start_ns": (at + part) * US, "end_ns": (at + part + 10 + (part == 50) * 30) * US}
                )
    outside = {"kernel_id": 100, "name": "warm", "kind": "kernel", "device": 0, "stream": 7, "step_id": None}
    kernels.append({"variant": "v", "start_ns": 2000 * US, "end_ns": 2001 * US} | outside)
    return {"steps": steps, "kernels": sorted(kernels, key=lambda row: int(row["start_ns"]))}


def test_a_pause_between_passes_or_sequences_is_no_gap(make_bundle: Callable[..., Bundle]) -> None:
    timeline = load_timeline(make_bundle(_tables()), "v")
    content = look(timeline, timeline.start_ns, timeline.end_ns, 300, frozenset({"gaps:0:None"})).rows[0].content
    assert isinstance(content, Gaps)
    found = list(zip((content.start // US).tolist(), (content.end // US).tolist(), strict=True))
    assert found == [(5020, 5050), (5090, 5110), (5120, 5150), (5320, 5350)]
    track = timeline.track("gaps:0:None")
    assert isinstance(track, SpanTrack)
    assert track.spans.bins(np.array([0, 100_000 * US])).gap_ns.tolist() == [30 * US]


def test_passes_are_bands_and_a_long_pause_parts_them(make_bundle: Callable[..., Bundle]) -> None:
    bundle = make_bundle(_tables())
    _, bands = load_stretches(bundle, "v")
    assert [(band.run_pass, band.start_ns // US, band.end_ns // US, band.steps) for band in bands] == [
        ("clean", 0, 400, 3),
        ("traced", 5000, 5400, 3),
        ("clean", 90_000, 90_100, 1),
    ]
    timeline = load_timeline(bundle, "v")
    assert timeline.passes == {"clean": (0, 400 * US), "traced": (5000 * US, 5400 * US)}
    assert timeline.moments["median step"] == (5000 * US, 5100 * US)


def test_without_steps_every_gap_counts(make_bundle: Callable[..., Bundle]) -> None:
    timeline = load_timeline(make_bundle({"kernels": _tables()["kernels"]}), "v")
    track = timeline.track("gaps:0:None")
    assert isinstance(track, SpanTrack)
    assert track.spans.bins(np.array([0, 100_000 * US])).gap_ns.max() == (5010 - 2001) * US


def test_no_spill_is_said(make_bundle: Callable[..., Bundle]) -> None:
    timeline = load_timeline(make_bundle(_tables()), "v")
    track = timeline.track("spills")
    assert isinstance(track, SpanTrack)
    assert track.remark == "no kernel known to spill, 1 of 2 not read"
    assert len(track.spans) == 0
    rows = choose(timeline, 5000 * US, 5100 * US, 100).window.rows
    assert "spills" in [row.track.key for row in rows]


pieces = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 60), st.integers(-1, 3)), max_size=120)


@given(pieces, st.integers(1, 40))
def test_only_gaps_within_a_piece_are_there(rows: list[tuple[int, int, int]], bins: int) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    start, length, piece = (np.array([row[at] for row in rows], np.int64) for at in range(3))
    made = Spans(start, start + length, pieces=piece)
    wanted, reach, last = [], 0, -1
    for begin, long, own in rows:
        if begin > reach and own == last >= 0:
            wanted.append((reach, begin))
        reach, last = max(reach, begin + long), own
    gaps = made.gaps(-10, 3000, 1000)
    assert gaps is not None
    assert list(zip(gaps[0].tolist(), gaps[1].tolist(), strict=True)) == wanted
    edges = np.linspace(-10, 3000, bins + 1).astype(np.int64)
    assert made.bins(edges).gap_ns.max() == max((stop - begin for begin, stop in wanted), default=0)


def test_binned_steps_and_gaps_go_on_when_rows_are_many(make_bundle: Callable[..., Bundle]) -> None:
    kernels = [
        {"variant": "v", "kernel_id": index, "name": "k", "kind": "kernel", "device": 0, "stream": 7}
        | {"start_ns": 10 * index, "end_ns": 10 * index + 9}
        for index in range(8000)
    ]
    timeline = load_timeline(make_bundle({"kernels": kernels}), "v")
    content = look(timeline, 0, 80_000, 10, frozenset({"gaps:0:None"})).rows[0].content
    assert isinstance(content, Binned)
    assert content.bins.gap_ns.tolist() == [1] * 10

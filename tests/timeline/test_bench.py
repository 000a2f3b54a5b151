from pathlib import Path

from workbench.timeline.bench import GAP_NS, interact, turn_pages, write_events
from workbench.timeline.kernel_rows import KernelTable
from workbench.timeline.tracks import SpanTrack, load_timeline
from workbench.trace.bundle import Bundle


def test_the_bench_measures_a_whole_answer(tmp_path: Path) -> None:
    write_events(tmp_path / "b", 20_000)
    with Bundle.open(tmp_path / "b") as bundle:
        timeline = load_timeline(bundle, "v")
        table = KernelTable(bundle, "v")
    assert timeline.events > 20_000
    gaps = timeline.track("gaps:0:None")
    assert isinstance(gaps, SpanTrack)
    lengths = gaps.spans.start[1:] - gaps.spans.reach[:-1]
    assert lengths.max() == GAP_NS
    assert len(interact(timeline, 5)) == 5
    assert len(turn_pages(table, 12)) == 12

from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.runs.catalogue import Catalogue
from workbench.runs.live import live_view
from workbench.trace.bundle import BundleWriter
from workbench.trace.lock import LOCK

Start = Callable[..., BundleWriter]


def test_a_run_in_progress_says_what_is_flushed(tmp_path: Path, start_run: Start) -> None:
    writer = start_run(tmp_path / "a")
    catalogue = Catalogue(tmp_path)
    (entry,) = catalogue.runs()
    assert live_view(entry).passes == ()
    sample = {"source": "nvml", "name": "sm_clock", "unit": "MHz"}
    writer.append("counters", [sample | {"start_ns": at, "end_ns": at, "value": 1000.0 + at} for at in (1, 9, 5)])
    writer.flush()
    live = live_view(catalogue.run(entry.id))
    assert live.running
    (one,) = live.passes
    assert (one.variant, one.run_pass, one.steps, one.tokens) == ("plain", "clean", 6, 12)
    assert one.tok_s is not None
    assert one.tok_s.value == pytest.approx(2000)
    assert live.recent[0][-1] == 0
    assert [(counter.name, counter.value) for counter in live.counters] == [("sm_clock", 1009.0)]
    writer.seal()
    assert live_view(catalogue.run(entry.id)).state == "sealed"


def test_a_run_whose_process_is_gone_says_so(tmp_path: Path, start_run: Start) -> None:
    start_run(tmp_path / "a").flush()
    (tmp_path / "a" / LOCK).unlink()
    live = live_view(Catalogue(tmp_path).runs()[0])
    assert not live.running
    assert "salvage" in live.note
    assert live.passes

"""The engine's own trace on the run's clock, with a stand-in for the engine."""

import shutil
import time
from pathlib import Path

import pytest

from workbench.engines.sglang_session import SglangSession
from workbench.engines.trace_probe import UNCHECKED_NS, EngineTraceProbe

FAKE = Path(__file__).with_name("fake_sglang.py")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(FAKE, folder / "sglang.py")
    (folder / "torch.py").write_text('__version__ = "0.0.fake"\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_the_trace_lies_where_the_request_was_and_not_where_its_file_was_written(site: Path, tmp_path: Path) -> None:
    with SglangSession({}, log=tmp_path / "log") as session:
        probe = EngineTraceProbe(session)
        probe.start()
        session.generate([1, 2], 4)  # not in the trace's last moments: the probe reads the file later
        before = time.perf_counter_ns()
        stream = session.generate([1, 2], 32)
        after = time.perf_counter_ns()
        capture = probe.stop()
    assert [one.what for one in capture.missing if "when the engine's trace was" in one.what] == []
    spans = sorted((start.as_py(), end.as_py()) for start, end in _spans(capture))
    slack = UNCHECKED_NS + 2_000_000  # the two clocks are read by different calls
    assert len(spans) == 2
    assert before - slack <= spans[1][0]
    assert spans[1][1] <= after + slack
    assert spans[1][0] <= stream.times_ns[0] + slack


def _spans(capture: object) -> list[tuple[object, object]]:
    host = capture.columns["host"]  # type: ignore[attr-defined]
    return list(zip(host.column("start_ns"), host.column("end_ns"), strict=True))

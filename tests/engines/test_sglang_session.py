"""The child process of an engine, with a stand-in for the engine itself."""

import shutil
import sys
from pathlib import Path

import pytest

from workbench.engines.sglang_session import SglangSession
from workbench.errors import UnfitError

FAKE = Path(__file__).with_name("fake_sglang.py")


@pytest.fixture
def session(tmp_path: Path, request: pytest.FixtureRequest) -> SglangSession:
    """A session whose interpreter finds the stand-in as ``sglang``, and an empty ``torch``."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(FAKE, site / "sglang.py")
    (site / "torch.py").write_text('__version__ = "0.0.fake"\n')
    mode = getattr(request, "param", "")
    environment = {"PYTHONPATH": str(site), "FAKE_SGLANG": mode, "FAKE_SGLANG_ACCEPT": "3"}
    return SglangSession({"model_path": "x"}, log=tmp_path / "engine.log", environment=environment)


def test_a_request_is_streamed_step_by_step(session: SglangSession, tmp_path: Path) -> None:
    with session as engine:
        assert engine.versions["sglang"] == "0.0.fake"
        found = engine.generate([1, 2, 3], 11)
        assert found.counts == (1, 4, 7, 10, 11)
        assert list(found.times_ns) == sorted(found.times_ns)
        assert found.begin_ns <= found.times_ns[0]
        assert found.meta["spec_accept_length"] == 3
        assert found.tokens == tuple(range(11))
        engine.start_profile(tmp_path / "profile")
        engine.generate([1], 2)
        assert engine.stop_profile(tmp_path / "profile").name == "x-TP-0.trace.json.gz"
        process = engine._process
    assert process is not None
    assert process.poll() is not None
    assert "noise on standard output" in (tmp_path / "engine.log").read_text()


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        ("start", r"SGLang: start: ValueError: model_path: no such folder second line"),
        ("short", r"generated 10 tokens where 11 were asked for"),
        ("die", r"process ended during 'generate'; its log .* ends with 'CUDA error: out of memory'"),
    ],
    indirect=["session"],
)
def test_what_goes_wrong_is_one_line(session: SglangSession, reason: str) -> None:
    with pytest.raises(UnfitError, match=reason) as error, session as engine:
        engine.generate([1], 11)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("session", ["hang"], indirect=True)
def test_a_hanging_engine_is_given_up(session: SglangSession, monkeypatch: pytest.MonkeyPatch) -> None:
    with session as engine:
        monkeypatch.setattr("workbench.engines.sglang_session.ANSWER_TIMEOUT_S", 0.3)
        with pytest.raises(UnfitError, match=r"did not answer 'generate' within 0 s"):
            engine.generate([1], 11)
        engine._process.terminate()  # type: ignore[union-attr] - or leaving waits for its quit


def test_without_sglang_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("raise ModuleNotFoundError(\"No module named 'sglang'\")\n")
    session = SglangSession({}, log=tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(UnfitError, match=r"decode-workbench\[sglang\]"), session:
        pass
    with (
        pytest.raises(UnfitError, match=r"engine\.python: .* cannot be run"),
        SglangSession({}, log=tmp_path / "log", python="/nowhere/python"),
    ):
        pass


def test_the_child_imports_nothing_of_the_workbench() -> None:
    text = Path(sys.modules["workbench.engines.sglang_session"].__file__ or "").with_name("sglang_child.py").read_text()
    assert "import workbench" not in text
    assert "from workbench" not in text

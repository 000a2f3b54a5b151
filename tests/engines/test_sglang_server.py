"""SGLang behind HTTP, with a stand-in for its package."""

import os
import shutil
from pathlib import Path

import pytest

from workbench.engines.metrics import read_metrics, server_info
from workbench.engines.sglang_server import SglangServer
from workbench.engines.sglang_session import SglangSession
from workbench.errors import UnfitError

FAKE = Path(__file__).with_name("fake_sglang_server.py")


def session(folder: Path, mode: str = "") -> SglangSession:
    site = folder / "site" / "sglang" / "srt"
    (site / "entrypoints").mkdir(parents=True)
    for package in (site.parent, site, site / "entrypoints"):
        (package / "__init__.py").touch()
    shutil.copy(FAKE, site / "fake.py")
    (site / "server_args.py").write_text("from sglang.srt.fake import ServerArgs\n")
    (site / "entrypoints" / "http_server.py").write_text("from sglang.srt.fake import launch_server\n")
    environment = {"PYTHONPATH": str(site.parent.parent), "FAKE_SGLANG": mode}
    return SglangSession({"model_path": "x"}, log=folder / "engine.log", environment=environment)


def test_a_served_request_is_streamed_and_counted(tmp_path: Path) -> None:
    with SglangServer(session(tmp_path)) as server:
        before = read_metrics(server.url)
        found = server.generate([1, 2, 3], 9)
        assert found.counts == tuple(range(1, 10))
        assert list(found.times_ns) == sorted(found.times_ns)
        after = read_metrics(server.url)
        assert after.tokens is not None
        assert before.tokens is not None
        assert after.tokens - before.tokens == 9
        assert server_info(server.url)["version"] == "0.0.fake"
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("mode", "said"), [("start", "ended during its start"), ("short", "generated 3 tokens")])
def test_what_goes_wrong_is_one_line(tmp_path: Path, mode: str, said: str) -> None:
    with pytest.raises(UnfitError, match=said), SglangServer(session(tmp_path, mode)) as server:
        server.generate([1], 4)

"""What all tests share, set before anything imports torch or Triton; processes that tests start inherit it.

- One thread for torch: the matrices of the tests are tiny, and waiting threads spin, ten times slower if busy.
- Triton's interpreter where there is no GPU: Triton reads the variable at its first import, whichever test that is.
- Ctrl-C interrupts although a shell started the tests in its background and told them to ignore it.
- No deadline for an example of Hypothesis: on a busy machine any of them can take seconds.
- No fsync: no test cuts the power, and a busy disk takes longer for it than the tests for the rest.
- An ncu on PATH that needs no GPU: probes/fake_ncu.py.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest


def _has_gpu() -> bool:
    """As ``torch.cuda.is_available``, without the seconds that importing torch takes."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint()
    return nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0


os.environ.setdefault("OMP_NUM_THREADS", "1")
if not _has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.fsync = lambda descriptor: None
hypothesis.settings.register_profile("workbench", deadline=None)
hypothesis.settings.load_profile("workbench")

FAKE = Path(__file__).with_name("probes") / "fake_ncu.py"


class FakeNcu:
    """``mode`` chooses what it does; ``calls`` returns the arguments of each call."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self._calls = monkeypatch, folder / "calls.jsonl"
        program = folder / "ncu"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        monkeypatch.setenv("FAKE_NCU_CALLS", str(self._calls))
        self.mode("good")
        self.version("2025.3.1.0")

    def mode(self, name: str) -> None:
        self._patch.setenv("FAKE_NCU", name)

    def version(self, text: str) -> None:
        self._patch.setenv("FAKE_NCU_VERSION", text)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return FakeNcu(folder, monkeypatch)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's Chromium, driven by Playwright: one for all tests of a process, which open contexts of their own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()

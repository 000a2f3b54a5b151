"""One thread for torch: the matrices of the tests are tiny, and waiting threads spin, ten times slower if busy.

Set before anything imports torch; subprocesses inherit it. And an ncu on PATH that needs no GPU: probes/fake_ncu.py.
"""

import json
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

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

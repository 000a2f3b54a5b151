"""Builds a CUDA kernel's own source as a CPU library, under ptx.cuh beside this file."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from workbench.kernels import nvrtc

HERE = Path(__file__).parent


@pytest.fixture
def build_kernel(tmp_path: Path) -> Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]:
    """(kernel source, driver, macros) to a loaded library; skips where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")

    def build(source: str, driver: str, macros: Mapping[str, nvrtc.Macro]) -> ctypes.CDLL:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for path in (nvrtc.SOURCES / source, nvrtc.SOURCES / "mxfp4.cuh", HERE / "ptx.cuh", HERE / driver):
            shutil.copy(path, folder)
        flags = [f"-D{name}={f'{v!r}f' if isinstance(v, float) else v}" for name, v in macros.items()]
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *flags, driver, "-o", "kernel.so"]
        subprocess.run(command, cwd=folder, check=True)
        return ctypes.CDLL(str(folder / "kernel.so"))

    return build

"""Builds a CUDA kernel's own source as a CPU library, under ptx.cuh beside this file."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from workbench.kernels import nvrtc

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def build_kernel(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]:
    """(kernel source, driver, macros) to a loaded library, each built once; skips where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    built: dict[tuple[object, ...], ctypes.CDLL] = {}

    def build(source: str, driver: str, macros: Mapping[str, nvrtc.Macro]) -> ctypes.CDLL:
        key = (source, driver, *sorted(macros.items()))
        if key not in built:
            built[key] = compiled(source, driver, macros)
        return built[key]

    def compiled(source: str, driver: str, macros: Mapping[str, nvrtc.Macro]) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("simt")
        headers = (path for path in nvrtc.SOURCES.glob("*.cuh") if path.name != "ptx.cuh")
        for path in (nvrtc.SOURCES / source, *headers, HERE / "ptx.cuh", HERE / driver):
            shutil.copy(path, folder)
        flags = [f"-D{name}={f'{v!r}f' if isinstance(v, float) else v}" for name, v in macros.items()]
        command = ["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", *flags, driver, "-o", "kernel.so"]
        subprocess.run(command, cwd=folder, check=True)
        return ctypes.CDLL(str(folder / "kernel.so"))

    return build

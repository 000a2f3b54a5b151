"""Where the counter sampler's own Python packages live, and how they get there.

torch pins the libcupti of its CUDA toolkit, cupti-python a later one, and a process can load only one. So the sampler
runs on packages in a folder of its own, which ``WORKBENCH_SAMPLER`` may name.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import InputError, UnfitError

VARIABLE = "WORKBENCH_SAMPLER"
CUPTI_PYTHON = "13.4.0"
"""The sidecar decodes samples through two of its private attributes, so exactly this one."""

PACKAGES = {
    "cupti-python": f"cupti-python=={CUPTI_PYTHON}",
    "nvidia-cuda-cupti": "nvidia-cuda-cupti==13.4.*",
    "cuda-bindings": "cuda-bindings>=13.0.2",
    "cuda-pathfinder": "cuda-pathfinder>=1.4.1",
    "numpy": "numpy>=1.26",
    "pyelftools": "pyelftools",
}
IMPORTED_AS = {"cuda-bindings": "cuda.bindings", "numpy": "numpy", "cuda-pathfinder": "cuda.pathfinder"}
"""What may come from the environment of the workbench itself instead: it brings no libcupti."""

INSTALL = "workbench doctor --install-sampler"
LIBRARIES = Path("nvidia") / "cu13" / "lib"
INSTALL_SECONDS = 900


@dataclass(frozen=True, slots=True)
class SamplerEnvironment:
    """One folder of packages for the sampler."""

    folder: Path

    @property
    def cupti(self) -> Path:
        """The folder's own libcupti."""
        return self.folder / LIBRARIES / "libcupti.so.13"

    def problem(self) -> str:
        """Return why the sampler cannot run from here; empty where it can."""
        if not self.folder.is_dir():
            return f"the counter sampler is not installed ({self.folder})"
        version = self.version()
        if not version:
            return f"{self.folder} holds no cupti-python"
        if version != CUPTI_PYTHON:
            return f"{self.folder} holds cupti-python {version}, {CUPTI_PYTHON} is needed"
        if not self.cupti.is_file():
            return f"{self.folder} holds no {LIBRARIES / self.cupti.name}"
        if not (self.folder / "cupti").is_dir() or not list((self.folder / "cupti").glob(f"cupti.{_tag()}*")):
            return f"{self.folder} was made for another Python than {_python()}"
        return ""

    def version(self) -> str:
        """Return the version of cupti-python in it; empty where there is none."""
        for metadata in self.folder.glob("cupti_python-*.dist-info"):
            return metadata.name.removeprefix("cupti_python-").removesuffix(".dist-info")
        return ""

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables for the sidecar, from this process's.

        Its packages and libcupti come first. Every GPU is visible to it, since one is chosen by UUID; injection
        libraries, which would load a second profiler, are left out.
        """
        kept = {key: value for key, value in inherited.items() if key not in _LEFT_OUT}
        kept["PYTHONPATH"] = _joined(self.folder, kept.get("PYTHONPATH", ""))
        kept["LD_LIBRARY_PATH"] = _joined(self.folder / LIBRARIES, kept.get("LD_LIBRARY_PATH", ""))
        return kept

    def install(self, wheels: Path | None = None, run: Callable[..., object] = subprocess.run) -> list[str]:
        """Install the packages into the folder and return what was asked for.

        ``wheels``: a folder of wheel files to use instead of an index; what it lacks must be importable already.
        Raises InputError for a folder without the needed wheels, UnfitError where pip cannot do it.
        """
        wanted = list(PACKAGES.values()) if wheels is None else _from_wheels(wheels)
        source = [] if wheels is None else ["--no-index", "--no-deps", "--find-links", str(wheels)]
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(self.folder)]
        try:
            run([*command, *source, *wanted], check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
            why = next((line for line in lines if "ERROR" in line or "No module" in line), lines[-1] if lines else "")
            hint = (
                f"{sys.executable} -m ensurepip"
                if "No module named pip" in why
                else "or carry the wheels: --wheels FOLDER"
            )
            raise UnfitError(f"pip could not install the sampler: {why.strip()[:300]}", hint=hint) from None
        except subprocess.TimeoutExpired:
            raise UnfitError(f"pip took longer than {INSTALL_SECONDS} s", hint="try again") from None
        if problem := self.problem():
            raise UnfitError(f"pip ended well, yet {problem}")
        return wanted


def sampler_environment(inherited: Mapping[str, str] = os.environ) -> SamplerEnvironment:
    """Return the folder that ``WORKBENCH_SAMPLER`` names, else ~/.local/share/decode-workbench/sampler."""
    if named := inherited.get(VARIABLE):
        return SamplerEnvironment(Path(named).expanduser().absolute())
    data = inherited.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return SamplerEnvironment(Path(data) / "decode-workbench" / "sampler")


_LEFT_OUT = {"CUDA_VISIBLE_DEVICES", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD"}


def _from_wheels(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise InputError(f"--wheels {folder}: not a folder")
    names = {re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower() for path in folder.glob("*.whl")}
    lacking = [
        name for name in PACKAGES if name not in names and not (name in IMPORTED_AS and _importable(IMPORTED_AS[name]))
    ]
    if lacking:
        raise InputError(f"--wheels {folder}: no wheel of {', '.join(lacking)}", hint="pip download them into it")
    return [PACKAGES[name] for name in PACKAGES if name in names]


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _joined(first: Path, rest: str) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else str(first)


def _tag() -> str:
    return f"{sys.implementation.name}-{sys.version_info.major}{sys.version_info.minor}"


def _python() -> str:
    return f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"

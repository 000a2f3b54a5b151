"""What this machine can run and profile: one check per thing needed, with the reason and the fix where it is not."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from workbench import __version__
from workbench.errors import UnfitError
from workbench.fingerprint import cpu_model, gpu_list, usable_threads
from workbench.hardware import match_hardware, measure_read_roof
from workbench.trace.reserve import NEED_BYTES

State = Literal["ok", "limited", "missing"]

COMFORT_BYTES = 1 << 30
"""Free disk or memory below which a longer run gets into trouble."""

SGLANG_GLIBC = (2, 34)
NSIGHT_1_NCU = (2026, 2, 1)
NVIDIA_PARAMS = Path("/proc/driver/nvidia/params")
PROCESS_STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN = 21

DECODE_EXTRA = "pip install 'decode-workbench[decode]'"
GPU_EXTRA = "pip install 'decode-workbench[gpu]'"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ``fix`` is empty where nothing need or can be done; ``vital``: without it nothing runs at all."""

    name: str
    state: State
    detail: str
    fix: str = ""
    vital: bool = False


def examine(*, folder: Path, bandwidth: bool = False) -> list[Check]:
    """Return every check of this machine. ``folder``: where runs would be written; ``bandwidth``: a second each."""
    gpus, why_no_gpu = gpu_list()
    checks = [
        Check("python", "ok", f"{platform.python_implementation()} {platform.python_version()}"),
        installation(),
        libc(),
        processor(),
        memory(psutil.virtual_memory().available),
        disk(folder),
        torch(),
        decode_libraries(),
        triton(),
        gpu(gpus, why_no_gpu),
        ncu(),
        counter_permission(),
        cupti(),
    ]
    if gpus:
        checks.append(torch_on_gpu())
    if bandwidth:
        checks += [roof("cpu"), *([roof("cuda")] if gpus else [])]
    return checks


def can_run(checks: Sequence[Check]) -> bool:
    """Tell whether at least the pipeline on the CPU can run."""
    return not any(check.vital and check.state == "missing" for check in checks)


def installation() -> Check:
    """Look for a second distribution whose import package is called ``workbench``: its files would mix with ours."""
    try:
        other = distribution("workbench")
    except PackageNotFoundError:
        own = _version("decode-workbench")
        how = (
            ""
            if own == __version__
            else f" (the installed distribution says {own})"
            if own
            else " (not installed, run from its sources)"
        )
        return Check("workbench", "ok", f"{__version__}{how}")
    return Check(
        "workbench",
        "limited",
        f"another distribution called 'workbench' ({other.version}) is installed: both own the package of that name",
        "pip uninstall workbench, then install decode-workbench again",
    )


def libc(name_and_version: tuple[str, str] | None = None) -> Check:
    """Compare the C library with what current engines need."""
    name, text = name_and_version or platform.libc_ver()
    if name != "glibc":
        return Check("libc", "limited", f"{name or 'unknown'} {text}".strip(), "engine wheels need glibc 2.34 or later")
    if _numbers(text) < SGLANG_GLIBC:
        detail = f"glibc {text}: pip goes back to an sglang and torch of before 2026 without a word"
        return Check("libc", "limited", detail, "use a system with glibc 2.34 or later for the sglang extra")
    return Check("libc", "ok", f"glibc {text}")


def processor() -> Check:
    """Name the processor and the threads this process may use."""
    return Check("cpu", "ok", f"{cpu_model()}, {usable_threads()} usable threads")


def memory(available: int) -> Check:
    """Judge the memory, in bytes, that a run could have."""
    text = f"{available / 1e9:.1f} GB available"
    return (
        Check("memory", "ok", text) if available >= COMFORT_BYTES else Check("memory", "limited", text, "free memory")
    )


def disk(folder: Path) -> Check:
    """Judge the free disk of ``folder``, or of the nearest folder above it that exists."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    text = f"{free / 1e9:.1f} GB free for runs"
    if not os.access(existing, os.W_OK):
        return Check("disk", "limited", f"{existing} cannot be written", "run in another folder, or use --out")
    if free < NEED_BYTES:
        return Check("disk", "missing", f"{text}, a run needs {NEED_BYTES / 1e9:.2f} GB", "free space", vital=True)
    return Check("disk", "ok", text) if free >= COMFORT_BYTES else Check("disk", "limited", text, "free space")


def torch() -> Check:
    """Import torch and look for what the pipeline and the host instrument need."""
    try:
        import torch as library
    except (ImportError, OSError) as error:  # OSError: a shared library of it is missing
        return Check("torch", "missing", f"cannot be imported: {_line(error)}", DECODE_EXTRA, vital=True)
    detail = f"{library.__version__}, {library.get_num_threads()} CPU threads"
    if not library.profiler.kineto_available():
        return Check(
            "torch",
            "limited",
            f"{detail}, built without Kineto: host operators are not traced",
            "use an official build",
        )
    return Check("torch", "ok", f"{detail}, host operators can be traced")


def decode_libraries() -> Check:
    """Look for the libraries that load the shipped model."""
    found = {name: _version(name) for name in ("safetensors", "tokenizers")}
    if lacking := [name for name, text in found.items() if text is None]:
        return Check("model files", "missing", f"{', '.join(lacking)} not installed", DECODE_EXTRA, vital=True)
    return Check("model files", "ok", ", ".join(f"{name} {text}" for name, text in found.items()))


def triton() -> Check:
    """Look for triton, and whether it is the one that the installed torch asks for."""
    own = _version("triton")
    if own is None:
        return Check("triton", "missing", "not installed: no kernel rungs, no register and spill counts", GPU_EXTRA)
    wanted = next(
        (found[1] for line in _requires("torch") if (found := re.match(r"triton\s*==\s*([\w.]+)", line))), own
    )
    if wanted != own:
        return Check(
            "triton", "limited", f"{own}, the installed torch was built with {wanted}", f"pip install triton=={wanted}"
        )
    return Check("triton", "ok", f"{own}, compiles kernels with and without a GPU")


def gpu(gpus: Sequence[dict[str, Any]], why_none: str) -> Check:
    """Say which GPUs NVML lists, or why none."""
    if not gpus:
        fix = (
            GPU_EXTRA
            if "not installed" in why_none
            else "runs use the CPU; for a GPU: an NVIDIA driver, visible in here"
        )
        return Check("gpu", "missing", why_none, fix)
    first = gpus[0]
    name = f"{len(gpus)} x {first['name']}, {first['memory_bytes'] / 1e9:.0f} GB, driver {first['driver']}"
    described = match_hardware(str(first["name"]))
    if described is None:
        return Check("gpu", "limited", f"{name}: its datasheet peaks are not known", "measured roofs are used alone")
    return Check("gpu", "ok", f"{name}, described as {described.name}")


def torch_on_gpu() -> Check:
    """Say whether torch can use the GPU that NVML lists."""
    if find_spec("torch") is None:
        return Check("torch on the GPU", "missing", "torch is not installed", DECODE_EXTRA)
    import torch as library

    if library.cuda.is_available():
        return Check("torch on the GPU", "ok", f"CUDA {library.version.cuda}")
    if library.version.cuda is None:
        return Check(
            "torch on the GPU",
            "missing",
            f"torch {library.__version__} is a CPU build",
            "install a CUDA build of torch",
        )
    detail = f"torch was built for CUDA {library.version.cuda} and finds no usable device"
    return Check("torch on the GPU", "missing", detail, "compare with the driver's CUDA version in nvidia-smi")


def ncu(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Check:
    """Look for Nsight Compute and its Python side."""
    path, nsight = shutil.which("ncu"), _version("nsight-python")
    if path is None:
        return Check(
            "ncu", "missing", "not on PATH: no per-kernel deep dives", "install Nsight Compute and put ncu on PATH"
        )
    try:
        # The path is the user's own ncu.
        text = run([path, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("ncu", "missing", f"{path} does not start: {_line(error)}", "install Nsight Compute again")
    found = re.search(r"Version (\d+(?:\.\d+)+)", text)
    if found is None:
        return Check("ncu", "limited", f"{path} names no version", "install Nsight Compute again")
    if nsight is None:
        return Check("ncu", "limited", f"{found[1]}, nsight-python is not installed", GPU_EXTRA)
    if _numbers(nsight) >= (1,) and _numbers(found[1]) < NSIGHT_1_NCU:
        detail = f"{found[1]}: nsight-python {nsight} needs 2026.2.1 or later"
        return Check("ncu", "limited", detail, "update Nsight Compute, or pip install 'nsight-python<1'")
    return Check("ncu", "ok", f"{found[1]}, nsight-python {nsight}")


def counter_permission(params: Path = NVIDIA_PARAMS, status: Path = PROCESS_STATUS) -> Check:
    """Tell whether this process may read GPU performance counters."""
    name = "counter access"
    if not params.is_file():
        return Check(
            name, "missing", "no NVIDIA kernel driver here (its parameters are not in /proc)", "run where the driver is"
        )
    admin_only = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", params.read_text(encoding="utf-8"), re.MULTILINE)
    if admin_only is None:
        return Check(
            name,
            "limited",
            "the driver does not say who may read counters",
            "try a run: it says what it could not read",
        )
    if admin_only[1] == "0":
        return Check(name, "ok", "open to every user")
    if _capable(status):
        return Check(name, "ok", "for administrators only, which this process is (CAP_SYS_ADMIN)")
    fix = "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or give this process CAP_SYS_ADMIN"
    return Check(name, "limited", "for administrators only (ERR_NVGPUCTRPERM otherwise)", fix)


def cupti() -> Check:
    """Look for the library that samples HBM and CTA counters over time."""
    found = _version("cupti-python")
    if found is None:
        fix = "pip install 'cupti-python>=13.4' into an environment of its own: torch ships another libcupti"
        return Check(
            "cupti", "missing", "cupti-python is not in this environment: no HBM and CTA counters over time", fix
        )
    if find_spec("torch") is not None:
        fix = "give it an environment of its own"
        return Check("cupti", "limited", f"cupti-python {found} beside torch, which ships another libcupti", fix)
    return Check("cupti", "ok", f"cupti-python {found}")


def roof(device: Literal["cpu", "cuda"]) -> Check:
    """Measure the read bandwidth of ``device``."""
    name = f"{device} bandwidth"
    try:
        measured = measure_read_roof(device)
    except UnfitError as error:
        return Check(name, "missing", error.message, error.hint)
    return Check(name, "ok", f"{measured.value:.1f} {measured.unit} read, {measured.tag}: {measured.note}")


def _capable(status: Path) -> bool:
    try:
        effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return False
    return effective is not None and bool(int(effective[1], 16) >> CAP_SYS_ADMIN & 1)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _requires(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

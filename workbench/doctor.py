"""What this machine can run and profile: one check per thing needed, with the reason and the fix where it is not."""

import os
import platform
import re
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from workbench import __version__
from workbench.doctor_check import GPU_EXTRA, Check, first_line, numbers, requirements, version_of
from workbench.doctor_instruments import instruments
from workbench.errors import UnfitError
from workbench.fingerprint import cpu_model, gpu_list, usable_threads
from workbench.hardware import match_hardware, measure_read_roof
from workbench.trace.reserve import NEED_BYTES

COMFORT_BYTES = 1 << 30
"""Free disk or memory below which a longer run gets into trouble."""

SGLANG_GLIBC = (2, 34)

DECODE_EXTRA = "pip install 'decode-workbench[decode]'"


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
        *instruments(gpus),
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
        own = version_of("decode-workbench")
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
    if numbers(text) < SGLANG_GLIBC:
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
        return Check("torch", "missing", f"cannot be imported: {first_line(error)}", DECODE_EXTRA, vital=True)
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
    found = {name: version_of(name) for name in ("safetensors", "tokenizers")}
    if lacking := [name for name, text in found.items() if text is None]:
        return Check("model files", "missing", f"{', '.join(lacking)} not installed", DECODE_EXTRA, vital=True)
    return Check("model files", "ok", ", ".join(f"{name} {text}" for name, text in found.items()))


def triton() -> Check:
    """Look for triton, and whether it is the one that the installed torch asks for."""
    own = version_of("triton")
    if own is None:
        return Check("triton", "missing", "not installed: no kernel rungs, no register and spill counts", GPU_EXTRA)
    wanted = next(
        (found[1] for line in requirements("torch") if (found := re.match(r"triton\s*==\s*([\w.]+)", line))), own
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
        lost = "kernel rungs, and every counter of a GPU"
        return Check("gpu", "missing", why_none, fix, lost=lost, instead="the same pipeline in torch on the CPU")
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


def roof(device: Literal["cpu", "cuda"]) -> Check:
    """Measure the read bandwidth of ``device``."""
    name = f"{device} bandwidth"
    try:
        measured = measure_read_roof(device)
    except UnfitError as error:
        return Check(name, "missing", error.message, error.hint)
    return Check(name, "ok", f"{measured.value:.1f} {measured.unit} read, {measured.tag}: {measured.note}")

"""What machine a number was measured on: enough to compare runs, nothing that names the machine or its user."""

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPU_INFO = Path("/proc/cpuinfo")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def machine_fingerprint() -> dict[str, Any]:
    """Return hardware and software of this machine as JSON values; no host name, user or path is in it.

    ``gpus`` is what NVML lists (name, uuid, driver, memory); where NVML cannot be used it is empty and
    ``gpu_note`` says why. Sizes are bytes.
    """
    gpus, note = gpu_list()
    libc, libc_version = platform.libc_ver()
    return {
        "cpu": {
            "model": cpu_model(),
            "architecture": platform.machine(),
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(logical=True),
            "usable_threads": usable_threads(),
            "caches": cpu_caches(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "gpu_note": note,
        "os": {"system": platform.system(), "kernel": platform.release(), "libc": f"{libc} {libc_version}".strip()},
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: _version(name) for name in ("torch", "triton", "numpy")},
    }


def usable_threads() -> int:
    """Return how many threads this process may run on at once (affinity respected)."""
    process = psutil.Process()
    # macOS has no affinity
    return len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count(logical=True) or 1


def cpu_model() -> str:
    """Return the processor's name as the system reports it, or ``unknown``."""
    if CPU_INFO.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or "unknown"


def cpu_caches() -> dict[str, int]:
    """Return the size in bytes of each cache the first core sees, keyed like ``L1 data`` or ``L3``."""
    caches: dict[str, int] = {}
    for index in sorted(CPU_CACHES.glob("index*")):
        level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
        amount = re.fullmatch(r"(\d+)([KMG]?)", size)
        if level and amount:
            suffix = "" if kind == "Unified" else f" {kind.lower()}"
            caches[f"L{level}{suffix}"] = int(amount[1]) * _UNITS[amount[2]]
    return caches


def last_level_cache_bytes() -> int | None:
    """Return the size of the largest cache the first core sees, or None where the system does not say."""
    return max(cpu_caches().values(), default=None)


def gpu_list() -> tuple[list[dict[str, Any]], str]:
    """Return the GPUs that NVML lists, and where there are none the reason in words."""
    try:
        import pynvml
    except ImportError:
        return [], "NVML not read: nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"NVML not read: {error}"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                {
                    "name": pynvml.nvmlDeviceGetName(handle),
                    "uuid": pynvml.nvmlDeviceGetUUID(handle),
                    "driver": driver,
                    "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                }
            )
        return gpus, "" if gpus else "NVML lists no GPU"
    except pynvml.NVMLError as error:
        return [], f"NVML not read: {error}"
    finally:
        pynvml.nvmlShutdown()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

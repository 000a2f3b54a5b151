"""Who may read a GPU's performance counters here, and which other profilers are in the way.

The driver lets administrators alone read counters unless it was loaded otherwise (ERR_NVGPUCTRPERM). A process has room
for one CUPTI subscriber (pytorch/pytorch#117935), a GPU for one that collects its counters.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

NVIDIA_PARAMS = Path("/proc/driver/nvidia/params")
PROCESS_STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN = 21

OPEN_COUNTERS = "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or give this process CAP_SYS_ADMIN"

INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")
PRELOADED = re.compile(r"cupti|nsys|nsight|ToolsInjection|rocprof|profiler", re.IGNORECASE)
DAEMONS = {"nv-hostengine": "DCGM", "dcgm-exporter": "DCGM", "nsys": "Nsight Systems", "ncu": "Nsight Compute"}


def admins_only(params: Path = NVIDIA_PARAMS) -> bool | None:
    """Return whether the driver keeps counters for administrators; None where it does not say.

    Raises FileNotFoundError where there is no NVIDIA kernel driver.
    """
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", params.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else found[1] != "0"


def is_admin(status: Path = PROCESS_STATUS) -> bool:
    """Return whether this process has CAP_SYS_ADMIN, which is what the driver asks for."""
    try:
        effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return False
    return effective is not None and bool(int(effective[1], 16) >> CAP_SYS_ADMIN & 1)


def loaded_profilers(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables through which a profiler is loaded into every process started from here."""
    loaded = [variable for variable in INJECTIONS if environment.get(variable)]
    return loaded + (["LD_PRELOAD"] if PRELOADED.search(environment.get("LD_PRELOAD", "")) else [])


def running_profilers(processes: Iterable[str]) -> list[str]:
    """Return the tools among ``processes``, by name, that may hold a GPU's counters."""
    return sorted({DAEMONS[process] for process in processes if process in DAEMONS})


def process_names() -> list[str]:
    """Return the names of all processes that can be seen from here."""
    return [str(process.info["name"]) for process in psutil.process_iter(["name"])]

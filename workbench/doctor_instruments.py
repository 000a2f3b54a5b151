"""What can be measured on this machine: the driver, NVML, the counter sampler, Nsight, and who else is profiling.

Counters fall back in this order: samples every 10 us, NVML's mean over a capture, bytes of the byte model.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.doctor_check import Check, State, first_line, version_of
from workbench.probes.counter_access import (
    NVIDIA_PARAMS,
    OPEN_COUNTERS,
    PROCESS_STATUS,
    admins_only,
    is_admin,
    loaded_profilers,
    process_names,
    running_profilers,
)
from workbench.probes.ncu_command import Reason, find_ncu
from workbench.probes.nsight_python import misfit, nsight_version
from workbench.probes.pm_sampler import PmSampler
from workbench.probes.protocol import Missing
from workbench.probes.proton import proton_missing
from workbench.probes.sampler_environment import INSTALL, SamplerEnvironment, sampler_environment

CUDA_13 = 13_000

_TIMELINES = "HBM bytes, CTAs per SM and stalls over time"
_MEANS = "NVML's mean over a whole capture, else bytes of the byte model"
_DEEP = "DRAM bytes, achieved occupancy and stall reasons of single kernels"
_STATIC = "registers, spills and occupancy limits from the compiled kernels"


def instruments(gpus: Sequence[dict[str, Any]]) -> list[Check]:
    """Return a check per instrument. ``gpus``: what NVML lists; the sampler is tried on the first of them."""
    return [
        driver(),
        nvml(),
        sampler(gpus),
        counter_permission(),
        ncu(),
        proton(),
        second_profiler(os.environ, process_names()),
    ]


def driver(load: Callable[[str], Any] = ctypes.CDLL) -> Check:
    """Load the driver's library and ask which CUDA it supports."""
    lost, instead = "everything that runs on a GPU", "the same pipeline in torch on the CPU"
    try:
        library = load("libcuda.so.1")
    except OSError:
        fix = "install the NVIDIA driver; in a container start it with --gpus all"
        return Check("driver", "missing", "libcuda.so.1 is not there", fix, lost=lost, instead=instead)
    value = ctypes.c_int()
    if status := library.cuDriverGetVersion(ctypes.byref(value)):
        fix = "look at nvidia-smi: driver and kernel module must match"
        return Check("driver", "missing", f"it answers with CUDA error {status}", fix, lost=lost, instead=instead)
    text = f"CUDA {value.value // 1000}.{value.value % 1000 // 10}"
    if value.value < CUDA_13:
        fix = "update the driver to 580 or later"
        return Check(
            "driver", "limited", f"{text}: the counter sampler needs CUDA 13", fix, lost=_TIMELINES, instead=_MEANS
        )
    return Check("driver", "ok", text)


def nvml() -> Check:
    """Look for NVML and its Python side."""
    lost, instead = "clocks, power, temperature and throttle reasons", "clocks and power are then not known"
    try:
        import pynvml
    except ImportError:
        fix = "pip install nvidia-ml-py"
        return Check("nvml", "missing", "nvidia-ml-py is not installed", fix, lost=lost, instead=instead)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fix = "install the NVIDIA driver; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Check("nvml", "missing", first_line(error), fix, lost=lost, instead=instead)
    pynvml.nvmlShutdown()
    return Check("nvml", "ok", f"nvidia-ml-py {version_of('nvidia-ml-py') or 'of unknown version'}")


def sampler(
    gpus: Sequence[dict[str, Any]],
    environment: SamplerEnvironment | None = None,
    make: Callable[..., PmSampler] = PmSampler,
) -> Check:
    """Look for the counter sampler; where a GPU is listed, start it there for a moment."""
    name, environment = "counter sampler", environment or sampler_environment()
    if problem := environment.problem():
        return Check(name, "missing", problem, INSTALL, lost=_TIMELINES, instead=_MEANS)
    if not gpus:
        detail = f"cupti-python {environment.version()}, not tried: no GPU is listed"
        return Check(name, "limited", detail, "run where the GPU is", lost=_TIMELINES, instead=_MEANS)
    with make(uuid=str(gpus[0]["uuid"]), environment=environment) as probe:
        if missing := probe.available():
            return _refused(name, missing)
        device, metrics, unread = probe.ready["device"], probe.ready["metrics"], probe.unread()
    detail = f"cupti-python {environment.version()} reads {len(metrics) - 1} counters of {device['name']}"
    if unread:
        lost = "; ".join(one.why for one in unread)
        return Check(name, "limited", detail, "none on this GPU", lost=lost, instead="the counters that are read")
    return Check(name, "ok", detail)


def _refused(name: str, missing: Missing) -> Check:
    fix = missing.fix or "see the driver's log; a run falls back by itself"
    return Check(name, "limited", f"installed, yet {missing.why}", fix, lost=_TIMELINES, instead=_MEANS)


def counter_permission(params: Path = NVIDIA_PARAMS, status: Path = PROCESS_STATUS) -> Check:
    """Tell whether this process may read GPU performance counters."""
    name = "counter access"
    lost, instead = f"{_TIMELINES}; {_DEEP}", f"{_MEANS}; {_STATIC}"
    try:
        closed = admins_only(params)
    except FileNotFoundError:
        detail = "no NVIDIA kernel driver here (its parameters are not in /proc)"
        return Check(name, "missing", detail, "run where the driver is", lost=lost, instead=instead)
    if closed is None:
        detail = "the driver does not say who may read counters"
        return Check(name, "limited", detail, "try a run: it says what it could not read", lost=lost, instead=instead)
    if not closed:
        return Check(name, "ok", "open to every user")
    if is_admin(status):
        return Check(name, "ok", "for administrators only, which this process is (CAP_SYS_ADMIN)")
    detail = "for administrators only (ERR_NVGPUCTRPERM otherwise)"
    return Check(name, "limited", detail, OPEN_COUNTERS, lost=lost, instead=instead)


def ncu(run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Check:
    """Look for Nsight Compute, which workbench deep calls, and whether nsight-python can drive it."""
    found = find_ncu(run)
    if isinstance(found, Reason):
        state: State = "limited" if "cannot" in found.why else "missing"
        return Check("ncu", state, found.why, found.fix, lost=_DEEP, instead=_STATIC)
    nsight = nsight_version()
    reason = misfit(found, nsight)
    how = f"driven by nsight-python {nsight} too" if reason is None else f"called directly: {reason.why}"
    return Check("ncu", "ok", f"{found.version}, {how}")


def proton() -> Check:
    """Look for Proton's spans inside Triton kernels."""
    if missing := proton_missing():
        return Check("proton", "limited", missing.why, missing.fix, lost=missing.what, instead=missing.fallback)
    return Check("proton", "ok", f"in triton {version_of('triton')}: scopes inside kernels can be traced")


def second_profiler(environment: Mapping[str, str], processes: Iterable[str]) -> Check:
    """Look for another profiler: one that is loaded into processes started here, or that runs beside them."""
    name, lost = "other profilers", "kernels and launches of the traced pass, which then come back empty"
    if loaded := loaded_profilers(environment):
        detail = f"one is loaded into every process from here ({', '.join(loaded)})"
        return Check(name, "limited", detail, f"unset {' '.join(loaded)}", lost=lost, instead="the clean pass")
    if running := running_profilers(processes):
        detail = f"{', '.join(running)} runs here and may hold the GPU's counters"
        fix = "pause it: dcgmi profile --pause" if running == ["DCGM"] else "end it during a run"
        return Check(name, "limited", detail, fix, lost=_TIMELINES, instead=_MEANS)
    return Check(name, "ok", "none is loaded here")

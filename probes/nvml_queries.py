"""What NVML is asked, reading by reading, and the facts of a device that do not change.

The module ``pynvml`` is that of nvidia-ml-py. A device is meant by UUID, never by index.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

Nvml = Any
"""The module ``pynvml``."""

THROTTLES = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
    "board_limit": 0x200,
    "reliability": 0x400,
}
"""Why clocks are below their boost: bits of nvmlClocksEventReasons, one counter ``throttle_…`` each."""

CLOCK_STATES = {"gpu_idle": 0x1, "application_clocks": 0x2}
"""Bits of the same mask that are no throttling: nothing to do, and clocks that a user has set; ``clocks_…``."""

GPM_METRICS = {
    "gpm_sm_active": (2, "share", 0.01),
    "gpm_warps_active": (3, "share", 0.01),
    "gpm_tensor_active": (5, "share", 0.01),
    "gpm_dram_active": (10, "share", 0.01),
    "gpm_pcie_tx": (20, "B/s", 1024.0**2),
    "gpm_pcie_rx": (21, "B/s", 1024.0**2),
}
"""Counter name → NVML_GPM_METRIC id, unit, scale: percent and MiB/s as NVML gives them."""


@dataclass(frozen=True, slots=True)
class Query:
    """One instant reading. ``read`` gives name → value; ``slow``: asked now and then only."""

    what: str
    unit: str
    read: Callable[[Nvml, Any], dict[str, float]]
    slow: bool = False


def _clock(kind: str) -> Callable[[Nvml, Any], dict[str, float]]:
    def read(nvml: Nvml, handle: Any) -> dict[str, float]:
        return {f"{kind.lower()}_clock": nvml.nvmlDeviceGetClockInfo(handle, getattr(nvml, f"NVML_CLOCK_{kind}")) * 1e6}

    return read


def _power(nvml: Nvml, handle: Any) -> dict[str, float]:
    return {"power": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3}


def _temperature(nvml: Nvml, handle: Any) -> dict[str, float]:
    return {"temperature": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))}


def _reasons(nvml: Nvml, handle: Any) -> dict[str, float]:
    mask = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    found = {f"throttle_{name}": float(bool(mask & bit)) for name, bit in THROTTLES.items()}
    return found | {f"clocks_{name}": float(bool(mask & bit)) for name, bit in CLOCK_STATES.items()}


def _memory(nvml: Nvml, handle: Any) -> dict[str, float]:
    return {"memory_used": float(nvml.nvmlDeviceGetMemoryInfo(handle).used)}


def _ecc(nvml: Nvml, handle: Any) -> dict[str, float]:
    kinds = {
        "ecc_corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "ecc_uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    volatile = nvml.NVML_VOLATILE_ECC
    return {name: float(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, volatile)) for name, kind in kinds.items()}


def _pcie(nvml: Nvml, handle: Any) -> dict[str, float]:
    ways = {"pcie_rx": nvml.NVML_PCIE_UTIL_RX_BYTES, "pcie_tx": nvml.NVML_PCIE_UTIL_TX_BYTES}
    return {name: nvml.nvmlDeviceGetPcieThroughput(handle, way) * 1024.0 for name, way in ways.items()}


QUERIES = (
    Query("SM clock", "Hz", _clock("SM")),
    Query("memory clock", "Hz", _clock("MEM")),
    Query("power", "W", _power),
    Query("temperature", "degC", _temperature),
    Query("throttle reasons", "flag", _reasons),
    Query("memory used", "B", _memory),
    Query("ECC errors", "errors", _ecc, slow=True),
    Query("PCIe throughput", "B/s", _pcie, slow=True),  # NVML itself measures for 20 ms each way
)


def facts(nvml: Nvml, handle: Any, own_pids: Collection[int]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield (name, how to read it): what is looked up once. ``own_pids``: processes of this run."""
    yield "name", lambda: _text(nvml.nvmlDeviceGetName(handle))
    yield "driver", lambda: _text(nvml.nvmlSystemGetDriverVersion())
    yield "persistence_mode", lambda: "on" if nvml.nvmlDeviceGetPersistenceMode(handle) else "off"
    yield "mig_mode", lambda: "on" if nvml.nvmlDeviceGetMigMode(handle)[0] else "off"
    yield "ecc_mode", lambda: "on" if nvml.nvmlDeviceGetEccMode(handle)[0] else "off"
    yield "power_limit_w", lambda: f"{nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3:g}"
    yield "sm_clock_max_mhz", lambda: str(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    yield "mem_clock_max_mhz", lambda: str(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    yield (
        "pcie_link",
        lambda: (
            f"gen {nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)} x{nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)}"
        ),
    )
    yield "other_processes", lambda: ", ".join(other_processes(nvml, handle, own_pids)) or "none"


def other_processes(nvml: Nvml, handle: Any, own_pids: Collection[int]) -> list[str]:
    """Return "pid name (MiB)" of each process that computes on the device and is not of ``own_pids``.

    In a container the pids that NVML gives may be those of the host; then none of them is one's own.
    """
    found = []
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid in own_pids:
            continue
        try:
            name = _text(nvml.nvmlSystemGetProcessName(process.pid))
        except nvml.NVMLError:
            name = "unknown"
        used = f" ({process.usedGpuMemory >> 20} MiB)" if process.usedGpuMemory else ""
        found.append(f"{process.pid} {name}{used}")
    return found


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

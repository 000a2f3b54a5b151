import ctypes
import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from workbench.probes.nvml import NvmlProbe
from workbench.probes.nvml_queries import GPM_METRICS, THROTTLES
from workbench.probes.protocol import Capture, Probe
from workbench.trace.rows import from_rows

UUID = "GPU-aaaa"


class NVMLError(Exception):
    pass


class Metric(ctypes.Structure):
    _fields_ = (("metricId", ctypes.c_uint), ("nvmlReturn", ctypes.c_uint), ("value", ctypes.c_double))


class MetricsGet(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.c_int),
        ("sample2", ctypes.c_int),
        ("metrics", Metric * 98),
    )


class Driver:
    """What the fake NVML does: the throttle mask, calls that fail, GPM samples that are alive."""

    def __init__(self) -> None:
        self.mask = 0x4 | 0x1
        self.failing: dict[str, str] = {}
        self.calls: list[str] = []
        self.open = 0
        self.gpm = True
        self.samples: set[int] = set()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()

    def answer(name: str, value: Any) -> Any:
        def call(*_: Any) -> Any:
            driver.calls.append(name)
            if name in driver.failing:
                raise NVMLError(driver.failing[name])
            return value() if callable(value) else value

        return call

    def by_uuid(uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("Not Found")
        return "handle"

    def init() -> None:
        if "nvmlInit" in driver.failing:
            raise NVMLError(driver.failing["nvmlInit"])
        driver.open += 1

    def shutdown() -> None:
        driver.open -= 1

    def new_sample() -> int:
        driver.samples.add(len(driver.samples) + 1)
        return len(driver.samples)

    def means(asked: MetricsGet) -> None:
        assert (asked.sample1, asked.sample2) == (1, 2)
        for index in range(asked.numMetrics):
            asked.metrics[index].value = 50.0
            asked.metrics[index].nvmlReturn = 3 if asked.metrics[index].metricId == 5 else 0

    processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=1 << 30),
        SimpleNamespace(pid=77, usedGpuMemory=3 << 20),
        SimpleNamespace(pid=78, usedGpuMemory=None),
    ]
    module = ModuleType("pynvml")
    functions = {
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetPowerUsage": 350_000,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: driver.mask,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 30),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetPcieThroughput": 100,
        "nvmlDeviceGetName": b"NVIDIA Abacus",
        "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlSystemGetProcessName": "python",
        "nvmlGpmQueryDeviceSupport": lambda: SimpleNamespace(isSupportedDevice=driver.gpm),
        "nvmlGpmSampleAlloc": new_sample,
    }
    for name, value in functions.items():
        setattr(module, name, answer(name, value))
    module.nvmlGpmSampleGet = lambda _, sample: sample  # type: ignore[attr-defined]
    module.nvmlGpmSampleFree = driver.samples.remove  # type: ignore[attr-defined]
    module.nvmlGpmMetricsGet = means  # type: ignore[attr-defined]
    constants = "NVML_CLOCK_SM NVML_CLOCK_MEM NVML_TEMPERATURE_GPU NVML_VOLATILE_ECC NVML_GPM_METRICS_GET_VERSION "
    constants += "NVML_MEMORY_ERROR_TYPE_CORRECTED NVML_MEMORY_ERROR_TYPE_UNCORRECTED "
    constants += "NVML_PCIE_UTIL_RX_BYTES NVML_PCIE_UTIL_TX_BYTES"
    for number, name in enumerate(constants.split()):
        setattr(module, name, number)
    others = {
        "NVMLError": NVMLError,
        "nvmlInit": init,
        "nvmlShutdown": shutdown,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "c_nvmlGpmMetricsGet_t": MetricsGet,
    }
    for name, value in others.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return driver


def _capture(probe: NvmlProbe, seconds: float = 0.0) -> Capture:
    probe.start()
    time.sleep(seconds)
    capture = probe.stop()
    probe.close()
    from_rows("counters", list(capture.tables["counters"]))
    from_rows("losses", [{"probe": "nvml", **row} for row in capture.losses])
    return capture


def _values(capture: Capture, name: str) -> list[float]:
    return [row["value"] for row in capture.tables["counters"] if row["name"] == name]


def test_readings_are_rows_in_base_units(driver: Driver) -> None:
    probe: Probe = NvmlProbe(UUID, device=2, hz=200.0)
    assert probe.available() is None
    assert isinstance(probe, NvmlProbe)
    capture = _capture(probe, 0.06)
    assert {row["device"] for row in capture.tables["counters"]} == {2}
    assert set(_values(capture, "sm_clock")) == {1.98e9}
    assert set(_values(capture, "power")) == {350.0}
    assert set(_values(capture, "throttle_sw_power_cap")) == {1.0}
    assert set(_values(capture, "throttle_hw_slowdown")) == {0.0}
    assert set(_values(capture, "clocks_gpu_idle")) == {1.0}  # not called a throttle: it is none
    assert set(_values(capture, "pcie_rx")) == {102_400.0}
    assert len(_values(capture, "power")) > 4
    assert len(_values(capture, "pcie_rx")) < len(_values(capture, "power")) / 2
    assert not capture.missing
    assert not capture.losses
    assert driver.open == 0


def test_every_bit_of_the_mask_has_a_name(driver: Driver) -> None:
    driver.mask = sum(THROTTLES.values())
    capture = _capture(NvmlProbe(UUID))
    throttles = {
        row["name"] for row in capture.tables["counters"] if row["name"].startswith("throttle_") and row["value"]
    }
    assert len(throttles) == len(THROTTLES) == 9


def test_a_reading_that_is_not_supported_is_missing_and_asked_once(driver: Driver) -> None:
    driver.failing = {"nvmlDeviceGetTotalEccErrors": "Not Supported", "nvmlDeviceGetPowerUsage": "Not Supported"}
    capture = _capture(NvmlProbe(UUID, hz=200.0), 0.03)
    assert {(missing.what, missing.why) for missing in capture.missing} == {
        ("ECC errors", "Not Supported"),
        ("power", "Not Supported"),
    }
    assert driver.calls.count("nvmlDeviceGetPowerUsage") == 1
    assert _values(capture, "temperature")


def test_a_reading_that_fails_later_is_a_loss(driver: Driver) -> None:
    probe = NvmlProbe(UUID, hz=200.0)
    probe.start()
    driver.failing = {"nvmlDeviceGetTemperature": "GPU is lost"}
    capture = probe.stop()
    (loss,) = capture.losses
    assert loss["kind"] == "failed-query"
    assert loss["count"] >= 1
    assert loss["detail"] == "temperature: GPU is lost"
    assert not capture.missing


def test_facts_are_rows_of_env_and_other_processes_are_not_ones_own(driver: Driver) -> None:
    driver.failing = {"nvmlDeviceGetEccMode": "Not Supported"}
    rows = NvmlProbe(UUID, own_pids=[78]).facts()
    from_rows("env", rows)
    found = {row["key"]: row["value"] for row in rows}
    assert found["gpu0.uuid"] == UUID
    assert found["gpu0.name"] == "NVIDIA Abacus"
    assert found["gpu0.other_processes"] == "77 python (3 MiB)"
    assert found["gpu0.ecc_mode"] == "not known: Not Supported"
    assert found["gpu0.mig_mode"] == "off"


def test_means_stand_in_for_counters_over_a_capture_long_enough(driver: Driver) -> None:
    capture = _capture(NvmlProbe(UUID, gpm=True), 0.11)
    assert _values(capture, "gpm_dram_active") == [0.5]
    assert _values(capture, "gpm_tensor_active") == []  # NVML refused this one
    assert _values(capture, "gpm_pcie_rx") == [50.0 * 1024**2]
    (row,) = [row for row in capture.tables["counters"] if row["name"] == "gpm_sm_active"]
    assert row["end_ns"] - row["start_ns"] >= 100_000_000
    assert not driver.samples  # freed
    assert set(GPM_METRICS) >= {row["name"] for row in capture.tables["counters"] if row["name"].startswith("gpm_")}


def test_means_are_missing_over_a_short_capture_or_on_an_old_gpu(driver: Driver) -> None:
    (missing,) = _capture(NvmlProbe(UUID, gpm=True)).missing
    assert "shorter than 100 ms" in missing.why
    assert "byte model" in missing.fallback
    assert not driver.samples
    driver.gpm = False
    (missing,) = _capture(NvmlProbe(UUID, gpm=True)).missing
    assert "Hopper" in missing.why


def test_what_stands_in_the_way_is_said_with_the_fix(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NvmlProbe("GPU-bbbb").available()
    assert missing is not None
    assert missing.why == "NVML: Not Found (GPU-bbbb)"
    assert driver.open == 0
    driver.failing = {"nvmlInit": "Driver Not Loaded"}
    missing = NvmlProbe(UUID).available()
    assert missing is not None
    assert "Driver Not Loaded" in missing.why
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = NvmlProbe(UUID).available()
    assert missing is not None
    assert missing.fix == "pip install nvidia-ml-py"

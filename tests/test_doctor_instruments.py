import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from workbench import doctor_instruments
from workbench.probes.counter_access import OPEN_COUNTERS
from workbench.probes.protocol import Missing
from workbench.probes.sampler_environment import INSTALL, SamplerEnvironment

GPUS = [{"name": "NVIDIA Abacus", "uuid": "GPU-aaaa"}]


class Cuda:
    def __init__(self, version: int, status: int = 0) -> None:
        self._version, self._status = version, status

    def cuDriverGetVersion(self, pointer: Any) -> int:  # noqa: N802 - the driver's name
        pointer._obj.value = self._version
        return self._status


class Sampler:
    """A sampler that starts, or says why not."""

    def __init__(self, missing: Missing | None = None, unread: Sequence[Missing] = ()) -> None:
        self._missing, self._unread = missing, unread
        self.ready = {"device": {"name": "NVIDIA Abacus"}, "metrics": dict.fromkeys("abcd", "metric")}
        self.uuid = ""

    def __call__(self, *, uuid: str, environment: SamplerEnvironment) -> "Sampler":
        self.uuid = uuid
        return self

    def available(self) -> Missing | None:
        return self._missing

    def unread(self) -> Sequence[Missing]:
        return self._unread

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SamplerEnvironment:
    monkeypatch.setattr(SamplerEnvironment, "problem", lambda _: "")
    monkeypatch.setattr(SamplerEnvironment, "version", lambda _: "13.4.0")
    return SamplerEnvironment(tmp_path)


def test_what_is_not_ok_says_what_is_lost_what_stands_in_and_the_fix() -> None:
    checks = doctor_instruments.instruments([])
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert bool(check.lost) == bool(check.instead) == bool(check.fix) == (check.state != "ok")


@pytest.mark.parametrize(
    ("library", "state", "words"),
    [(Cuda(13_000), "ok", "CUDA 13.0"), (Cuda(12_080), "limited", "CUDA 12.8"), (Cuda(0, 803), "missing", "803")],
)
def test_the_driver_must_support_cuda_13_for_counters(library: Cuda, state: str, words: str) -> None:
    check = doctor_instruments.driver(lambda _: library)
    assert check.state == state
    assert words in check.detail


def test_a_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    check = doctor_instruments.driver(load)
    assert check.state == "missing"
    assert "--gpus all" in check.fix


def test_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def lost() -> None:
        raise NVMLError("Driver Not Loaded")

    module = ModuleType("pynvml")
    for name, value in (("NVMLError", NVMLError), ("nvmlInit", lambda: None), ("nvmlShutdown", lambda: None)):
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert doctor_instruments.nvml().state == "ok"
    monkeypatch.setattr(module, "nvmlInit", lost)
    assert doctor_instruments.nvml().detail == "Driver Not Loaded"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor_instruments.nvml().fix == "pip install nvidia-ml-py"


def test_a_sampler_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    check = doctor_instruments.sampler(GPUS, SamplerEnvironment(tmp_path / "none"))
    assert (check.state, check.fix) == ("missing", INSTALL)
    assert "byte model" in check.instead


def test_the_sampler_is_tried_on_the_first_gpu(installed: SamplerEnvironment) -> None:
    probe = Sampler()
    check = doctor_instruments.sampler(GPUS, installed, probe)  # type: ignore[arg-type]
    assert probe.uuid == "GPU-aaaa"
    assert check.state == "ok"
    assert check.detail == "cupti-python 13.4.0 reads 3 counters of NVIDIA Abacus"
    assert doctor_instruments.sampler([], installed).state == "limited"


def test_a_sampler_that_is_refused_says_why(installed: SamplerEnvironment) -> None:
    refused = Missing("pm_sampler", "all", "counters are for administrators only here (ERR_NVGPUCTRPERM)", fix="do")
    check = doctor_instruments.sampler(GPUS, installed, Sampler(refused))  # type: ignore[arg-type]
    assert check.state == "limited"
    assert "ERR_NVGPUCTRPERM" in check.detail
    assert check.fix == "do"


def test_counters_that_the_gpu_does_not_give_are_named(installed: SamplerEnvironment) -> None:
    unread = [Missing("pm_sampler", "bytes", "pcie_read_bytes: needs 2 passes")]
    check = doctor_instruments.sampler(GPUS, installed, Sampler(unread=unread))  # type: ignore[arg-type]
    assert check.state == "limited"
    assert check.lost == "pcie_read_bytes: needs 2 passes"


@pytest.mark.parametrize(
    ("environment", "processes", "state", "fix"),
    [
        ({}, ["python", "bash"], "ok", ""),
        ({"CUDA_INJECTION64_PATH": "/opt/nsys/libToolsInjection64.so"}, [], "limited", "unset CUDA_INJECTION64_PATH"),
        ({"LD_PRELOAD": "/usr/lib/libcupti_trace.so"}, [], "limited", "unset LD_PRELOAD"),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so"}, [], "ok", ""),
        ({}, ["nv-hostengine", "python"], "limited", "pause it: dcgmi profile --pause"),
        ({}, ["ncu"], "limited", "end it during a run"),
    ],
)
def test_a_second_profiler_is_noticed(environment: dict[str, str], processes: list[str], state: str, fix: str) -> None:
    check = doctor_instruments.second_profiler(environment, processes)
    assert (check.state, check.fix) == (state, fix)


@pytest.mark.parametrize(
    ("params", "capabilities", "state"),
    [
        ("RmProfilingAdminOnly: 0\n", "0", "ok"),
        ("ResmanDebugLevel: 0\nRmProfilingAdminOnly: 1\n", "000001ffffffffff", "ok"),
        ("RmProfilingAdminOnly: 1\n", "00000000a80425fb", "limited"),  # root in a container, without CAP_SYS_ADMIN
        ("Other: 1\n", "0", "limited"),
    ],
)
def test_counter_permission(tmp_path: Path, params: str, capabilities: str, state: str) -> None:
    driver, status = tmp_path / "params", tmp_path / "status"
    driver.write_text(params)
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    assert doctor_instruments.counter_permission(driver, status).state == state


def test_counter_permission_without_a_driver(tmp_path: Path) -> None:
    assert doctor_instruments.counter_permission(tmp_path / "params").state == "missing"


@pytest.mark.parametrize(
    ("printed", "nsight", "state", "words"),
    [
        ("Version 2026.3.1.0 (build 1)", "1.1.0", "ok", "2026.3.1"),
        ("Version 2025.3.1.0 (build 1)", "1.1.0", "ok", "called directly: nsight-python 1.1.0 needs ncu 2026.2.1"),
        ("Version 2025.3.1.0 (build 1)", "0.9.6", "ok", "0.9.6"),
        ("Version 2026.3.1.0 (build 1)", None, "ok", "nsight-python is not installed"),
        ("Version 2021.2.0.0 (build 1)", "0.9.6", "limited", "cannot profile the nodes"),
        ("nothing", "1.1.0", "missing", "names no version"),
    ],
)
def test_ncu(monkeypatch: pytest.MonkeyPatch, printed: str, nsight: str | None, state: str, words: str) -> None:
    def run(arguments: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(arguments, 0, stdout=printed)

    monkeypatch.setattr("shutil.which", lambda _: "ncu")
    monkeypatch.setattr(doctor_instruments, "nsight_version", lambda: nsight)
    check = doctor_instruments.ncu(run)
    assert check.state == state
    assert words in check.detail


def test_ncu_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> "subprocess.CompletedProcess[str]":
        raise PermissionError(13, "not allowed")

    monkeypatch.setattr("shutil.which", lambda _: "ncu")
    assert doctor_instruments.ncu(run).state == "missing"
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "not on PATH" in doctor_instruments.ncu(run).detail


def test_proton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PROTON_DISABLE", "1")
    check = doctor_instruments.proton()
    assert (check.state, check.fix) == ("limited", "unset TRITON_PROTON_DISABLE")
    assert check.lost == "spans inside Triton kernels"


class Ladder:
    """A machine that has everything, from which one thing at a time is taken away."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, installed: SamplerEnvironment) -> None:
        self.installed, self.gpus, self.sampler = installed, GPUS, Sampler()
        self.params, self.status = folder / "params", folder / "status"
        self.params.write_text("RmProfilingAdminOnly: 0\n")
        self.status.write_text("CapEff:\t00000000a80425fb\n")
        self.version = "Version 2025.3.1.0 (build 1)"
        self.library: Any = Cuda(13_000)
        self.patch = monkeypatch
        monkeypatch.setattr("shutil.which", lambda _: "ncu")

    def checks(self) -> dict[str, doctor_instruments.Check]:
        def run(arguments: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
            return subprocess.CompletedProcess(arguments, 0, stdout=self.version)

        def load(name: str) -> Any:
            if self.library is None:
                raise OSError(f"{name}: cannot open shared object file")
            return self.library

        found = [
            doctor_instruments.driver(load),
            doctor_instruments.sampler(self.gpus, self.installed, self.sampler),  # type: ignore[arg-type]
            doctor_instruments.counter_permission(self.params, self.status),
            doctor_instruments.ncu(run),
        ]
        return {check.name: check for check in found}


@pytest.fixture
def ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: SamplerEnvironment) -> Ladder:
    return Ladder(tmp_path, monkeypatch, installed)


def test_the_ladder_with_everything(ladder: Ladder) -> None:
    assert {check.state for check in ladder.checks().values()} == {"ok"}


def test_the_ladder_without_permission(ladder: Ladder) -> None:
    ladder.params.write_text("RmProfilingAdminOnly: 1\n")
    ladder.sampler = Sampler(Missing("pm_sampler", "all", "ERR_NVGPUCTRPERM", fix="open them"))
    found = ladder.checks()
    access = found["counter access"]
    assert access.fix == OPEN_COUNTERS
    assert "HBM bytes" in access.lost
    assert "single kernels" in access.lost
    assert access.instead.index("NVML's mean") < access.instead.index("byte model")
    assert (found["counter sampler"].state, found["counter sampler"].fix) == ("limited", "open them")
    assert found["ncu"].state == "ok"  # it is there; what it may not do is said once


def test_the_ladder_without_cupti(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplerEnvironment, "problem", lambda _: "holds no cupti-python")
    found = ladder.checks()
    sampler = found.pop("counter sampler")
    assert (sampler.state, sampler.fix) == ("missing", INSTALL)
    assert sampler.instead.index("NVML's mean") < sampler.instead.index("byte model")
    assert {check.state for check in found.values()} == {"ok"}


def test_the_ladder_without_ncu(ladder: Ladder) -> None:
    ladder.patch.setattr("shutil.which", lambda _: None)
    found = ladder.checks()
    ncu = found.pop("ncu")
    assert (ncu.state, ncu.fix) == ("missing", "install Nsight Compute and put ncu on PATH")
    assert "DRAM bytes" in ncu.lost
    assert "compiled kernels" in ncu.instead
    assert {check.state for check in found.values()} == {"ok"}


def test_the_ladder_without_a_gpu(ladder: Ladder) -> None:
    ladder.gpus, ladder.library = [], None
    ladder.params.unlink()
    found = ladder.checks()
    assert (found["driver"].state, found["driver"].instead) == ("missing", "the same pipeline in torch on the CPU")
    assert (found["counter sampler"].state, found["counter sampler"].fix) == ("limited", "run where the GPU is")
    assert (found["counter access"].state, found["counter access"].fix) == ("missing", "run where the driver is")
    for check in found.values():
        assert bool(check.lost) == bool(check.instead) == (check.state != "ok")

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from workbench import doctor
from workbench.doctor import Check, can_run, examine

STATES = {"ok", "limited", "missing"}


def test_every_check_has_a_reason_and_where_it_is_not_ok_a_fix(tmp_path: Path) -> None:
    checks = examine(folder=tmp_path / "runs")
    assert {check.state for check in checks} <= STATES
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.detail and "\n" not in check.detail for check in checks)
    assert all(check.fix for check in checks if check.state != "ok")


def test_only_what_is_vital_stops_a_run() -> None:
    assert can_run([Check("gpu", "missing", "none"), Check("disk", "limited", "little", vital=True)])
    assert not can_run([Check("torch", "missing", "none", vital=True)])


def test_another_distribution_of_our_name_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.installation().state == "ok"
    metadata = tmp_path / "workbench-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: workbench\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    clash = doctor.installation()
    assert clash.state == "limited"
    assert "9.9" in clash.detail
    assert "pip uninstall workbench" in clash.fix


@pytest.mark.parametrize(
    ("libc", "state"),
    [(("glibc", "2.34"), "ok"), (("glibc", "2.39"), "ok"), (("glibc", "2.31"), "limited"), (("", ""), "limited")],
)
def test_libc(libc: tuple[str, str], state: str) -> None:
    assert doctor.libc(libc).state == state


def test_torch_that_is_not_there_stops_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    check = doctor.torch()
    assert check.state == "missing"
    assert not can_run([check])


def test_a_full_disk_stops_a_run_and_a_small_one_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((1 << 40, "ok"), (1 << 28, "limited"), (1 << 20, "missing")):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        assert doctor.disk(tmp_path / "not" / "yet").state == state


def test_gpus_are_named_and_their_absence_explained() -> None:
    listed = {"name": "NVIDIA H200", "uuid": "u", "driver": "580.1", "memory_bytes": 150_000_000_000}
    assert doctor.gpu([listed, listed], "").detail == "2 x NVIDIA H200, 150 GB, driver 580.1, described as h200"
    assert doctor.gpu([{**listed, "name": "Abacus"}], "").state == "limited"
    assert doctor.gpu([], "NVML not read: nvidia-ml-py is not installed").fix == doctor.GPU_EXTRA
    assert doctor.gpu([], "NVML lists no GPU").state == "missing"


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
    assert doctor.counter_permission(driver, status).state == state


def test_counter_permission_without_a_driver(tmp_path: Path) -> None:
    assert doctor.counter_permission(tmp_path / "params").state == "missing"


@pytest.mark.parametrize(
    ("printed", "nsight", "state", "words"),
    [
        ("Version 2026.3.1.0 (build 1)", "1.1.0", "ok", "2026.3.1"),
        ("Version 2025.3.1.0 (build 1)", "1.1.0", "limited", "needs 2026.2.1"),
        ("Version 2025.3.1.0 (build 1)", "0.9.6", "ok", "0.9.6"),
        ("Version 2026.3.1.0 (build 1)", None, "limited", "nsight-python is not installed"),
        ("nothing", "1.1.0", "limited", "names no version"),
    ],
)
def test_ncu(monkeypatch: pytest.MonkeyPatch, printed: str, nsight: str | None, state: str, words: str) -> None:
    def run(arguments: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(arguments, 0, stdout=printed)

    monkeypatch.setattr("shutil.which", lambda _: "ncu")
    monkeypatch.setattr(doctor, "_version", {"nsight-python": nsight}.get)
    check = doctor.ncu(run)
    assert check.state == state
    assert words in check.detail


def test_ncu_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> "subprocess.CompletedProcess[str]":
        raise PermissionError(13, "not allowed")

    monkeypatch.setattr("shutil.which", lambda _: "ncu")
    assert doctor.ncu(run).state == "missing"
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "not on PATH" in doctor.ncu(run).detail


def test_triton_must_be_the_one_that_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"triton": "3.9.0"}.get)
    monkeypatch.setattr(doctor, "_requires", lambda _: ["filelock", 'triton==3.8.0; platform_system == "Linux"'])
    assert doctor.triton().fix == "pip install triton==3.8.0"
    monkeypatch.setattr(doctor, "_requires", lambda _: ["filelock"])
    assert doctor.triton().state == "ok"
    monkeypatch.setattr(doctor, "_version", {}.get)
    assert doctor.triton().state == "missing"


def test_cupti_wants_an_environment_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"cupti-python": "13.4.0"}.get)
    monkeypatch.setattr(doctor, "find_spec", {"torch": object()}.get)
    assert doctor.cupti().state == "limited"
    monkeypatch.setattr(doctor, "find_spec", {}.get)
    assert doctor.cupti().state == "ok"

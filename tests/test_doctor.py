import sys
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


def test_triton_must_be_the_one_that_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", {"triton": "3.9.0"}.get)
    monkeypatch.setattr(doctor, "requirements", lambda _: ["filelock", 'triton==3.8.0; platform_system == "Linux"'])
    assert doctor.triton().fix == "pip install triton==3.8.0"
    monkeypatch.setattr(doctor, "requirements", lambda _: ["filelock"])
    assert doctor.triton().state == "ok"
    monkeypatch.setattr(doctor, "version_of", {}.get)
    assert doctor.triton().state == "missing"

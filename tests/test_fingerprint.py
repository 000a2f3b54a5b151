"""The fingerprint says what the machine is and nothing about whose it is."""

import getpass
import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import workbench.fingerprint as fingerprint
from workbench.fingerprint import cpu_caches, gpu_list, last_level_cache_bytes, machine_fingerprint


def test_fingerprint_is_json_and_complete() -> None:
    found = machine_fingerprint()
    assert json.loads(json.dumps(found)) == found
    assert found["cpu"]["model"]
    assert found["cpu"]["usable_threads"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["python"].split()[1].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert set(found["packages"]) == {"torch", "triton", "numpy"}
    assert found["gpus"] or found["gpu_note"]


def test_fingerprint_names_neither_host_user_nor_path() -> None:
    text = json.dumps(machine_fingerprint())
    for secret in (socket.gethostname(), str(Path.home()), str(Path.cwd())):
        assert len(secret) < 4 or secret not in text
    assert f'"{getpass.getuser()}"' not in text


def test_caches_are_read_from_the_system_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, (level, kind, size) in enumerate([("1", "Data", "32K"), ("2", "Unified", "1M"), ("3", "Unified", "x")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    (tmp_path / "index9").mkdir()
    monkeypatch.setattr(fingerprint, "CPU_CACHES", tmp_path)
    assert cpu_caches() == {"L1 data": 32 << 10, "L2": 1 << 20}
    assert last_level_cache_bytes() == 1 << 20


def test_no_cache_files_give_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CPU_CACHES", tmp_path)
    assert last_level_cache_bytes() is None


class _NVMLError(Exception):
    pass


def _fake_nvml(init_error: str = "", count: int = 1) -> SimpleNamespace:
    def init() -> None:
        if init_error:
            raise _NVMLError(init_error)

    return SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=1 << 30),
    )


def test_gpus_come_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(count=2))
    gpus, note = gpu_list()
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-0", "GPU-1"]
    assert gpus[0] == {"name": "GPU 0", "uuid": "GPU-0", "driver": "580.1", "memory_bytes": 1 << 30}
    assert note == ""


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "not installed"), (_fake_nvml("Driver Not Loaded"), "Driver Not Loaded"), (_fake_nvml(count=0), "no GPU")],
)
def test_without_nvml_the_reason_is_given(module: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    gpus, note = gpu_list()
    assert gpus == []
    assert reason in note

"""Nsight Compute as an instrument, against a stand-in for the program."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from workbench.errors import UnfitError
from workbench.probes import deep, nsight_python
from workbench.probes.counter_access import OPEN_COUNTERS
from workbench.probes.deep import DeepProbe
from workbench.probes.ncu_command import METRICS

GPUS = lambda: ([{"name": "NVIDIA Abacus"}], "")  # noqa: E731
OPEN = lambda: False  # noqa: E731
Child = Callable[[bool, Any], list[str]]


def no_driver() -> bool | None:
    raise FileNotFoundError


def test_every_reason_that_nothing_can_be_profiled_has_its_fix(fake_ncu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = DeepProbe()
    assert probe.available(GPUS, OPEN) is None
    assert probe.available(GPUS, no_driver) is None
    found = [probe.available(lambda: ([], "no NVIDIA driver"), OPEN)]
    monkeypatch.setattr(deep, "is_admin", lambda: False)
    found.append(probe.available(GPUS, lambda: True))
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/libnsys.so")
    found.append(probe.available(GPUS, OPEN))
    fake_ncu.version("2021.1.0.0")
    found.append(probe.available(GPUS, OPEN))
    monkeypatch.setenv("PATH", "/nowhere")
    found.append(probe.available(GPUS, OPEN))
    told = [(one.why, one.fix) for one in found if one]
    assert len(told) == 5
    for (why, fix), words, remedy in zip(
        told,
        ("no GPU", "ERR_NVGPUCTRPERM", "another profiler", "2021.1", "not on PATH"),
        ("run where", OPEN_COUNTERS, "unset CUDA_INJECTION64_PATH", "update", "install"),
        strict=True,
    ):
        assert words in why
        assert fix.startswith(remedy)
    assert all(one and "DRAM bytes" in one.what and "samples" in one.fallback for one in found)


def test_an_administrator_may_read_what_others_may_not(fake_ncu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "is_admin", lambda: True)
    assert DeepProbe().available(GPUS, lambda: True) is None


def test_kernels_of_another_process(fake_ncu: Any, ncu_child: Child, tmp_path: Path) -> None:
    found = DeepProbe(through="ncu").profile(ncu_child, tmp_path)
    assert found.through == "ncu 2025.3.1.0"
    kernels = found.part.tables["kernels"]
    assert [row["name"] for row in kernels][::2] == ["expert_pass"] * 2
    assert [row["end_ns"] - row["start_ns"] for row in kernels] == [21_500, 1_800, 22_500, 2_000]
    names = {row["name"] for row in found.part.tables["counters"]}
    assert "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio" in names
    assert not any(row["what"] == "register spills" for row in found.part.limits)


def test_only_the_kernels_that_were_asked_for(fake_ncu: Any, ncu_child: Child, tmp_path: Path) -> None:
    probe = DeepProbe(kernels=["rms_norm", "void at::native::vectorized_elementwise_kernel<4>(int)"], launches=1)
    found = probe.profile(ncu_child, tmp_path)
    assert len(found.part.tables["kernels"]) == 1
    assert "vectorized_elementwise_kernel" in found.part.tables["kernels"][0]["name"]


def test_a_metric_that_is_not_known_is_left_out(fake_ncu: Any, ncu_child: Child, tmp_path: Path) -> None:
    fake_ncu.mode("no-metric")
    found = DeepProbe(through="ncu").profile(ncu_child, tmp_path)
    assert found.unread == ("smsp__average_warps_issue_stalled_membar_per_issue_active.ratio",)
    first, second = (call[call.index("--metrics") + 1].split(",") for call in fake_ncu.calls())
    assert set(first) - set(second) == set(found.unread)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("no-permission", "ERR_NVGPUCTRPERM"),
        ("busy", "dcgmi profile --pause"),
        ("strange", "The sky is falling"),
        ("nothing", "saw no kernel"),
    ],
)
def test_a_failure_is_one_line_with_ncus_reason(
    fake_ncu: Any, ncu_child: Child, tmp_path: Path, mode: str, why: str
) -> None:
    fake_ncu.mode(mode)
    with pytest.raises(UnfitError, match=why):
        DeepProbe(through="ncu").profile(ncu_child, tmp_path)


def test_what_takes_too_long_is_ended_with_its_children(
    fake_ncu: Any, ncu_child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu.mode("slow")
    with pytest.raises(UnfitError, match="longer than 1 s"):
        DeepProbe(through="ncu", seconds=1.0).profile(ncu_child, tmp_path)
    pid = int((tmp_path / "bin" / "calls.jsonl").read_text())
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(") ", 1)[1][0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} outlived ncu")


def test_nsight_python_is_taken_for_all_kernels_where_it_fits(
    fake_ncu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "nsight_version", lambda: "0.9.6")
    monkeypatch.setattr(deep, "reader_missing", lambda: None)
    asked: list[tuple[bool, Any]] = []
    read: list[Path] = []
    part = object()

    def child(nsight: bool, metrics: Any) -> list[str]:
        asked.append((nsight, metrics))
        return [sys.executable, "-c", f"open({str(tmp_path / 'nsight-ncu-output-decode_steps-0.ncu-rep')!r}, 'w')"]

    monkeypatch.setattr(deep, "read_ncu_report", lambda path: (read.append(path), part)[1])
    found = DeepProbe().profile(child, tmp_path)
    assert asked == [(True, METRICS)]
    assert read[0].name.endswith(".ncu-rep")
    assert (found.part, found.through) == (part, "nsight-python 0.9.6 on ncu 2025.3.1.0")
    missing = DeepProbe(kernels=["k"], through="nsight-python").available(GPUS, OPEN)
    assert missing is not None
    assert "not the chosen ones" in missing.why


def test_nsight_python_that_leaves_no_report_says_what_ncu_said(
    fake_ncu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "nsight_version", lambda: "0.9.6")
    monkeypatch.setattr(deep, "reader_missing", lambda: None)
    (tmp_path / "nsight-a.log").write_text("==ERROR== ERR_NVGPUCTRPERM - The user\n")
    with pytest.raises(UnfitError, match="may not read GPU counters"):
        DeepProbe(through="nsight-python").profile(lambda *_: [sys.executable, "-c", ""], tmp_path)


def test_without_nsight_python_it_is_asked_for_in_vain(
    fake_ncu: Any, ncu_child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "nsight_version", lambda: "1.1.0")
    with pytest.raises(UnfitError, match=r"needs ncu 2026\.2\.1"):
        DeepProbe(through="nsight-python").profile(ncu_child, tmp_path)
    assert DeepProbe().profile(ncu_child, tmp_path).through == "ncu 2025.3.1.0"


def test_collecting_through_nsight_python(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    done: list[str] = []

    def kernel(**options: Any) -> Any:
        told.update(options)
        return lambda work: lambda: [work(config) for config in options["configs"]]

    module = ModuleType("nsight")
    module.analyze = type("analyze", (), {"kernel": staticmethod(kernel)})  # type: ignore[attr-defined]
    module.annotate = "the annotation"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nsight", module)
    nsight_python.collect(done.append, ["m"], "prefix-", "none")  # type: ignore[arg-type]
    assert done == ["the annotation"]
    assert (told["cache_control"], told["clock_control"], told["thermal_mode"]) == ("none", "none", "off")
    assert told["output_prefix"] == "prefix-"
    assert told["combine_kernel_metrics"].__code__.co_argcount == 2  # it looks


def test_a_script_of_this_package_finds_it(tmp_path: Path) -> None:
    environment = deep.child_environment()
    assert environment["PYTHONSAFEPATH"] == "1"
    assert (Path(environment["PYTHONPATH"].split(os.pathsep)[0]) / "workbench").is_dir()
    assert json.dumps(environment)

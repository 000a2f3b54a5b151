import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from workbench.probes.sampler_environment import SamplerEnvironment

Cli = Callable[..., Result]


def test_a_machine_without_a_gpu_is_fit(cli: Cli) -> None:
    data = json.loads(cli("doctor", "--json").stdout)
    assert data["can_run"] is True
    assert {"name", "state", "detail", "fix", "vital", "lost", "instead"} == set(data["checks"][0])
    assert data["machine"]["python"]


def test_a_machine_where_nothing_runs_ends_with_4(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = cli("doctor")
    assert result.exit_code == 4
    line = next(line for line in result.stdout.splitlines() if line.startswith("missing  torch"))
    assert "cannot be imported" in line
    assert "-> pip install 'decode-workbench[decode]'" in result.stdout


def test_bandwidth_is_measured_only_when_asked_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.hardware.CPU_BYTES", 1 << 24)
    monkeypatch.setattr("workbench.hardware.CPU_SECONDS", 0.01)
    assert "cpu bandwidth" not in cli("doctor").stdout
    assert "GB/s read, measured" in cli("doctor", "--bandwidth").stdout


def test_the_sampler_is_installed_before_the_machine_is_looked_at(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path | None] = []

    def install(environment: SamplerEnvironment, wheels: Path | None = None) -> list[str]:
        asked.append(wheels)
        environment.folder.mkdir()
        return ["cupti-python==13.4.0"]

    monkeypatch.setattr(SamplerEnvironment, "install", install)
    monkeypatch.setenv("WORKBENCH_SAMPLER", str(tmp_path / "sampler"))
    result = cli("doctor", "--install-sampler", "--wheels", str(tmp_path))
    assert result.exit_code == 0
    assert asked == [tmp_path]
    assert "installed cupti-python==13.4.0" in result.stderr
    assert "holds no cupti-python" in result.stdout
    assert "instead: NVML's mean over a whole capture" in result.stdout


def test_wheels_alone_install_nothing(cli: Cli, tmp_path: Path) -> None:
    result = cli("doctor", "--wheels", str(tmp_path))
    assert result.exit_code == 2
    assert "--install-sampler" in result.stderr

import json
import sys
from collections.abc import Callable

import pytest
from typer.testing import Result

Cli = Callable[..., Result]


def test_a_machine_without_a_gpu_is_fit(cli: Cli) -> None:
    data = json.loads(cli("doctor", "--json").stdout)
    assert data["can_run"] is True
    assert {"name", "state", "detail", "fix", "vital"} == set(data["checks"][0])
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

"""The command in a process of its own, on commits of a repository with planted changes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
CODE = ("workbench", "probes", "kernels", "scenarios", "reports", "dashboards")

ONE_OPERATOR_MORE = """
_score = Target.score


def _score_and_read(self, *arguments, **more):
    torch.ones(()).item()
    return _score(self, *arguments, **more)


Target.score = _score_and_read
"""

Gate = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout's code with a tag for each planted change: "plain", "reads"; "sleeps", "sleeps-longer"."""
    folder = tmp_path_factory.mktemp("repository")
    for name in CODE:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "nano")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    _git(folder, "init", "--quiet")
    _commit(folder, "plain")
    model = folder / "workbench" / "decode" / "model.py"
    model.write_text(model.read_text() + ONE_OPERATOR_MORE)
    _commit(folder, "reads")
    sleeping = (DATA / "sleeping_runner.py").read_text()
    runner = folder / "workbench" / "runner.py"
    runner.write_text(sleeping)
    _commit(folder, "sleeps")
    # 15 % of the step's 30 ms, in the part of the forward that no operator covers.
    runner.write_text(sleeping.replace("0.015, 0.009", "0.015, 0.0135"))
    _commit(folder, "sleeps-longer")
    return folder


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, check=True)


def _commit(folder: Path, name: str) -> None:
    _git(folder, "add", "--all", "--force")
    _git(folder, "commit", "--quiet", "-m", name)
    _git(folder, "tag", name)


@pytest.fixture
def gate(repository: Path, tmp_path: Path) -> Gate:
    """``gate("--base", "plain", …)``: the command of this checkout, in the repository; output in ``tmp_path``."""

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "workbench", "gate", *map(str, arguments), "--out", str(tmp_path / "out")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, capture_output=True, text=True, cwd=repository / "scenarios", env=environment, timeout=280
        )

    return run


@pytest.mark.skipif(find_spec("torch") is None, reason="runs the engine, which needs torch")
def test_one_operator_more_in_the_engine_fails_on_the_counters_alone(gate: Gate, tmp_path: Path) -> None:
    result = gate("--base", "plain", "--head", "reads", "--scenario", DATA / "tiny.toml", "--pairs", 0, "--json", "-")
    assert result.returncode == 1, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    (variant,) = data["variants"]
    counters = {counter["name"]: counter for counter in variant["counters"]}
    assert {name for name, counter in counters.items() if counter["fails"]} == {"host operators", "scalar reads"}
    moved = {part["name"]: part["change"] for part in counters["host operators"]["moved"]}
    assert moved["aten::_local_scalar_dense"] == 1
    assert counters["output"]["status"] == "equal"
    assert data["base"]["ref"] == "plain"
    assert (tmp_path / "out" / "gate.json").is_file()


def test_15_percent_slower_fails_and_the_cause_is_named(gate: Gate, tmp_path: Path) -> None:
    outputs = {name: tmp_path / name for name in ("gate.json", "gate.md", "gate.xml", "gate.sarif")}
    options = zip(("--json", "--markdown", "--junit", "--sarif"), outputs.values(), strict=True)
    result = gate(
        *("--base", "sleeps", "--head", "sleeps-longer", "--scenario", DATA / "tiny.toml", "--metric", "step_p50"),
        *(argument for option in options for argument in option),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "mainly host-bound" in result.stdout
    (variant,) = json.loads(outputs["gate.json"].read_text())["variants"]
    assert variant["verdict"] == "fail"
    assert -0.25 < variant["estimate"]["change"] < -0.05
    assert not any(counter["fails"] for counter in variant["counters"])
    suite = ET.parse(outputs["gate.xml"]).getroot()[0]  # noqa: S314 - our own
    assert suite.get("failures") == "1"
    assert json.loads(outputs["gate.sarif"].read_text())["runs"][0]["results"] == []
    assert "REGRESSION" in outputs["gate.md"].read_text()


def test_a_commit_that_refuses_the_scenario_is_a_usage_error(gate: Gate, tmp_path: Path) -> None:
    text = (DATA / "tiny.toml").read_text().replace('"tiny-shape.toml"', f'"{DATA / "tiny-shape.toml"}"')
    scenario = tmp_path / "deep.toml"
    scenario.write_text(text.replace("new_tokens = 10", "new_tokens = 1000"))
    result = gate("--base", "plain", "--head", "reads", "--scenario", scenario)
    assert result.returncode == 2
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("workbench: error: plain (")
    assert "prompts.new_tokens" in last

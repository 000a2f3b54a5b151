import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

Cli = Callable[..., Result]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """One bundle of each side; the head takes 11 ms a step where the base takes 10."""
    paths = tmp_path / "base", tmp_path / "head"
    for path, step_ns in zip(paths, (10_000_000, 11_000_000), strict=True):
        settings: dict[str, Any] = {"sampling": {"method": "greedy"}, "drafter": {"kind": "none"}}
        with BundleWriter.create(path, Manifest(variants=[VariantRecord(name="plain", settings=settings)])) as writer:
            writer.append("steps", [_step(index, step_ns) for index in range(5)])
    return paths


def _step(index: int, step_ns: int) -> dict[str, Any]:
    start = index * step_ns
    times = {"start_ns": start, "draft_end_ns": start, "forward_end_ns": start + step_ns, "end_ns": start + step_ns}
    place = {"variant": "plain", "run_pass": "clean", "step_id": index, "sequence_id": 0, "index": index}
    counts = {"context": 4, "width": 1, "drafted": 0, "accepted": 0, "committed": 1}
    return place | times | counts | {"warmup": False}


def test_too_few_pairs_are_inconclusive_and_strict_says_so_by_its_code(cli: Cli, pair: tuple[Path, Path]) -> None:
    result = cli("gate", "--base", pair[0], "--head", pair[1])
    assert result.exit_code == 0
    assert "gate: no regression found; " in result.stdout
    assert "1 pair; a verdict needs 4" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("plain "))
    assert row.split()[1:6] == ["INCONCLUSIVE", "100.0", "90.91", "-9.1", "%"]
    assert cli("gate", "--base", pair[0], "--head", pair[1], "--strict").exit_code == 3


def test_json_on_stdout_is_nothing_but_json(cli: Cli, pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = cli("gate", "--base", pair[0], "--head", pair[1], "--json", "-")
    data = json.loads(result.stdout)
    assert (data["outcome"], data["variants"][0]["verdict"]) == ("ok", "inconclusive")
    cli("gate", "--base", pair[0], "--head", pair[1], "--json", tmp_path / "gate.json")
    assert json.loads((tmp_path / "gate.json").read_text()) == data


def test_the_summary_is_appended(cli: Cli, pair: tuple[Path, Path], tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    cli("gate", "--base", pair[0], "--head", pair[1], "--markdown", summary)
    assert summary.read_text().startswith("before\n### gate: ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "gate: --base is missing; such as --base main --head . --scenario quickstart"),
        (["--base", "x", "--scenario", "quickstrt"], "no scenario 'quickstrt'; did you mean 'quickstart'?"),
        (["--base", "x", "--set", "a=1"], "--set: nothing to set without --scenario; name the scenario"),
        (["--base", "x"], "--base 'x': not a bundle; to launch a commit, name a --scenario"),
        (["--base", "x", "--noise", "none.json"], "none.json: cannot be read (No such file or directory); run: "),
        (["--base", "x", "calibrate", "--scenario", "quickstart"], "gate calibrate: takes no --base or --head; "),
        (["calibrate", "--scenario", "quickstart", "--launches", "3"], "--launches 3: must be even and 8 at least; "),
    ],
)
def test_wrong_use_is_one_line_and_2(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("gate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"workbench: error: {line}")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(cli: Cli, pair: tuple[Path, Path]) -> None:
    result = cli("gate", "--base", ".", "--scenario", "quickstart", "--out", pair[0])
    assert result.exit_code == 2
    assert f"--out {pair[0]}: exists and is not an empty folder" in result.stderr


def test_a_file_that_cannot_be_written_is_one_line(cli: Cli, pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = cli("gate", "--base", pair[0], "--head", pair[1], "--junit", tmp_path / "no folder" / "x.xml")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_the_noise_table_of_the_folder_is_read(
    cli: Cli, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gate-noise.json").write_text("{")
    result = cli("gate", "--base", pair[0], "--head", pair[1])
    assert result.exit_code == 2
    assert "gate-noise.json: not a noise table" in result.stderr

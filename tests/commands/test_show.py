import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest

Cli = Callable[..., Result]


def test_the_table_says_speed_acceptance_roof_and_identity(cli: Cli, bundle: Path) -> None:
    result = cli("show", bundle)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    header = next(line for line in lines if line.startswith("variant"))
    for column in ("tok/s", "accept length", "p50 ms", "p90 ms", "of the roof", "same text as plain"):
        assert column in header
    fast = next(line for line in lines if line.startswith("fast "))
    # 25 tokens in 100 ms; 1 MB at 10 GB/s is 0.1 of 10 ms.
    assert fast.split()[:2] == ["fast", "250"]
    assert "2.4" in fast or "2.5" in fast
    assert "1.0 %" in fast
    assert "yes, 2 of 2" in fast
    assert "bonus token included" in result.stdout
    assert "roof of the cpu: 10.0 GB/s read; stream (measured)" in result.stdout


def test_causes_add_up_as_printed(cli: Cli, bundle: Path) -> None:
    text = cli("show", bundle).stdout
    block = text.split("where the step time of fast goes\n")[1].split("\n\n")[0].splitlines()[1:]
    cells = {line.split()[0]: float(line.split()[1]) for line in block}
    total = cells.pop("step")
    assert total == 10.0
    assert round(sum(cells.values()), 3) == total
    assert set(cells) >= {"floor", "draft", "verify-and-sampling"}


def test_limits_are_printed_once(cli: Cli, bundle: Path) -> None:
    assert cli("show", bundle).stdout.count("HBM throughput: no GPU") == 1


def test_json_holds_diagnosis_state_and_limits(cli: Cli, bundle: Path) -> None:
    data = json.loads(cli("show", bundle, "--json").stdout)
    assert data["state"] == "sealed"
    assert data["limits"][0]["what"] == "HBM throughput"
    fast = data["diagnosis"]["variants"]["fast"]
    assert fast["accept_length"]["value"] == 2.5
    assert fast["greedy_identical_to_plain"]["identical"] is True


def test_a_failed_run_says_so_first(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    manifest = bundle / "manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(data | {"state": "failed", "failure": "interrupted by the user"}))
    assert cli("show", bundle).stdout.startswith("state: failed (interrupted by the user)\n")


def test_nothing_from_a_bundle_reaches_the_terminal_raw(cli: Cli, hostile_bundle: Path) -> None:
    for arguments in (["show"], ["show", "--json"], ["check"], ["report", "--format", "md", "-o", "-"]):
        result = cli(arguments[0], hostile_bundle, *arguments[1:])
        assert result.exit_code == 0, result.stderr
        assert all(char.isprintable() or char == "\n" for char in result.stdout), arguments
        assert "\u202e" not in result.stdout
    assert "\\x1b[31m[red]" in cli("show", hostile_bundle).stdout  # as text, not as markup


def test_a_bundle_without_steps_is_unfit(cli: Cli, tmp_path: Path) -> None:
    with BundleWriter.create(tmp_path / "empty", Manifest()):
        pass
    result = cli("show", tmp_path / "empty")
    assert result.exit_code == 4
    assert result.stdout == ""
    assert result.stderr.startswith("workbench: error: ")
    assert result.stderr.count("\n") == 1


def test_an_open_bundle_names_the_verb_that_helps(cli: Cli, open_bundle: Path) -> None:
    result = cli("show", open_bundle)
    assert result.exit_code == 2
    assert "check" in result.stderr
    assert "--salvage" in result.stderr

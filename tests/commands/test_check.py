import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

Cli = Callable[..., Result]


def test_a_sealed_bundle_is_readable(cli: Cli, bundle: Path) -> None:
    result = cli("check", bundle)
    assert result.exit_code == 0
    assert "sealed, readable" in result.stdout
    assert "nothing is missing" in result.stdout
    steps = next(line for line in result.stdout.splitlines() if line.startswith("steps"))
    assert steps.split() == ["steps", "20", "parquet"]


def test_an_open_bundle_needs_salvage_and_then_is_readable(cli: Cli, open_bundle: Path) -> None:
    before = cli("check", open_bundle)
    assert before.exit_code == 4
    assert "--salvage" in before.stderr
    salvaged = cli("check", open_bundle, "--salvage")
    assert salvaged.exit_code == 0, salvaged.stdout
    assert "salvaged (was open), readable" in salvaged.stdout
    assert "missing:" in salvaged.stdout
    assert "steps: rows after" in salvaged.stdout
    shown = cli("show", open_bundle)
    assert shown.exit_code == 0
    assert shown.stdout.startswith("state: salvaged\nlost: steps: rows after")


def test_damage_is_named_and_unfit(cli: Cli, bundle: Path) -> None:
    path = bundle / "steps.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    result = cli("check", bundle)
    assert result.exit_code == 4
    assert "wrong:" in result.stdout
    assert "steps.parquet" in result.stdout


def test_json_is_the_report(cli: Cli, open_bundle: Path) -> None:
    result = cli("check", open_bundle, "--json")
    assert result.exit_code == 4
    data = json.loads(result.stdout)
    assert data["ok"] is False
    assert data["state_before"] == "open"


def test_no_bundle_is_a_usage_error(cli: Cli, tmp_path: Path) -> None:
    result = cli("check", tmp_path / "nothing")
    assert result.exit_code == 2
    assert result.stderr.startswith("workbench: error: ")

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from workbench.scenario import scenario_path

Cli = Callable[..., Result]


def test_list_names_the_variants(cli: Cli) -> None:
    entries = {entry["name"]: entry for entry in json.loads(cli("scenario", "list", "--json").stdout)}
    assert {"plain", "mtp", "dflash"} <= set(entries["quickstart"]["variants"])
    assert "quickstart" in cli("scenario", "list").stdout


def test_show_prints_a_scenario_to_start_from(cli: Cli) -> None:
    printed = tomllib.loads(cli("scenario", "show", "quickstart").stdout)
    assert printed == tomllib.loads(scenario_path("quickstart").read_text())
    resolved = json.loads(cli("scenario", "show", "quickstart", "--json").stdout)
    assert all("drafter" in variant for variant in resolved["variants"])


def test_show_checks_a_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[drafter]\ndepht = 3\n')
    result = cli("scenario", "show", path)
    assert result.exit_code == 2
    assert "drafter.depht" in result.stderr
    assert "did you mean 'depth'?" in result.stderr


def test_schema_is_json(cli: Cli) -> None:
    assert json.loads(cli("scenario", "schema").stdout)["title"] == "ScenarioFile"
    assert cli("scenario", "schema").stdout == cli("scenario", "schema", "--json").stdout

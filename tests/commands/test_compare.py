import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]


def test_a_bundle_against_itself_has_not_changed(cli: Cli, bundle: Path) -> None:
    result = cli("compare", bundle, bundle)
    assert result.exit_code == 0, result.stderr
    assert "no significant change" in result.stdout
    assert "~" in result.stdout
    assert "paired by prompt" in result.stdout
    assert "too few" in result.stdout
    assert "workbench gate" in result.stdout


def test_json_holds_the_chain(cli: Cli, bundle: Path) -> None:
    found = json.loads(
        cli("compare", bundle, bundle, "--base-variant", "plain", "--head-variant", "fast", "--json").stdout
    )
    assert found["schema"] == "workbench.comparison/1"
    (one,) = found["variants"]
    assert (one["base"], one["head"], one["paired_by"]) == ("plain", "fast", "prompts")
    assert one["tok_s"]["ratio"] == pytest.approx(2.5)
    assert one["accept_length"]["ratio"] == pytest.approx(2.5)
    assert sum(cause["log"] for cause in one["causes"]) == pytest.approx(one["chain"]["step_time"], abs=1e-12)
    assert any(setting["name"] == "settings.drafter.kind" for setting in one["settings"])


def test_the_page_is_written_once(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "difference.html"
    assert cli("compare", bundle, bundle, "--html", path).exit_code == 0
    first = path.read_bytes()
    assert b"Content-Security-Policy" in first
    refused = cli("compare", bundle, bundle, "--html", path)
    assert refused.exit_code == 2
    assert "exists" in refused.stderr
    assert cli("compare", bundle, bundle, "--html", path, "--force").exit_code == 0
    assert path.read_bytes() == first


def test_an_unknown_variant_is_one_line(cli: Cli, bundle: Path) -> None:
    result = cli("compare", bundle, bundle, "--head-variant", "none such")
    assert result.exit_code == 2
    assert "it has plain, fast" in result.stderr
    assert result.stderr.count("\n") == 1


def test_hostile_names_reach_neither_terminal_nor_page(cli: Cli, hostile_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "difference.html"
    result = cli("compare", hostile_bundle, hostile_bundle, "--html", path)
    assert result.exit_code == 0, result.stderr
    assert not {"\x1b", "\x07", "\u202e"} & set(result.stdout)
    assert not {"\x1b", "\x07", "\u202e"} & set(path.read_text(encoding="utf-8").split("<script>", 1)[0])

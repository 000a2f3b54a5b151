import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]


@pytest.mark.parametrize("ending", ["html", "md", "json"])
def test_the_report_lies_in_the_bundle_unless_told_otherwise(cli: Cli, bundle: Path, ending: str) -> None:
    result = cli("report", bundle, "--format", ending)
    assert result.exit_code == 0, result.stderr
    path = bundle / f"report.{ending}"
    assert result.stdout.strip() == str(path)
    first = path.read_bytes()
    assert b"fast" in first
    assert cli("report", bundle, "--format", ending).exit_code == 0
    assert path.read_bytes() == first


def test_a_file_of_the_users_is_not_overwritten(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.md"
    mine.write_text("precious")
    refused = cli("report", bundle, "-o", mine, "--format", "md")
    assert refused.exit_code == 2
    assert mine.read_text() == "precious"
    assert cli("report", bundle, "-o", mine, "--format", "md", "--force").exit_code == 0
    assert "| fast" in mine.read_text()


@pytest.mark.parametrize("ending", ["html", "md"])
def test_a_path_that_cannot_be_written_is_one_line(cli: Cli, bundle: Path, tmp_path: Path, ending: str) -> None:
    result = cli("report", bundle, "-o", tmp_path / "no" / "where", "--format", ending)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "cannot be written" in result.stderr


def test_markdown_goes_to_stdout_and_cannot_be_broken_by_names(cli: Cli, hostile_bundle: Path) -> None:
    result = cli("report", hostile_bundle, "--format", "md", "--output", "-")
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    first_table = rows[:4]  # head, rule, two variants
    assert len({line.replace("\\|", "").count("|") for line in first_table}) == 1
    assert "<b>" not in result.stdout


def test_html_does_not_go_to_stdout(cli: Cli, bundle: Path) -> None:
    assert cli("report", bundle, "-o", "-").exit_code == 2


def test_json_names_the_file(cli: Cli, bundle: Path) -> None:
    data = json.loads(cli("report", bundle, "--format", "json", "--json").stdout)
    assert json.loads(Path(data["report"]).read_text())["diagnosis"]["scenario"] == "made"

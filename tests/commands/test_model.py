import json
from collections.abc import Callable

import pytest
from typer.testing import Result

Cli = Callable[..., Result]


def test_glm_5_2_in_fp8_on_eight_ranks_reads_6_65_gb_a_token(cli: Cli) -> None:
    data = json.loads(cli("model", "show", "glm-5.2", "--tp", "8", "--json").stdout)
    assert data["totals"]["read_bytes_per_rank"]["value"] == pytest.approx(6.65e9, rel=0.005)
    assert data["totals"]["read_bytes_per_rank"]["tag"] == "modelled"


def test_the_table_ends_in_the_sum_and_names_its_settings(cli: Cli) -> None:
    options = ["--tp", "8", "--width", "6", "--context", "4096", "--policy", "fp8", "--hardware", "b300"]
    result = cli("model", "show", "glm-5.2", *options, "--drafter", "mtp")
    assert result.exit_code == 0
    assert "at tp=8, width=6, batch=1, context=4096 (modelled)" in result.stdout
    assert "on b300" in result.stdout
    assert "draft per rank" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("total")


@pytest.mark.parametrize(
    "arguments",
    [["glm-9"], ["glm-5.2", "--tp", "0"], ["glm-5.2", "--policy", "fp1"], ["glm-5.2", "--hardware", "abacus"]],
)
def test_what_does_not_exist_is_one_line(cli: Cli, arguments: list[str]) -> None:
    result = cli("model", "show", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("workbench: error: ")
    assert result.stderr.count("\n") == 1


def test_list_names_every_shape(cli: Cli) -> None:
    names = {entry["name"] for entry in json.loads(cli("model", "list", "--json").stdout)}
    assert {"glm-5.2", "gpt-oss-20b", "nano"} <= names
    text = cli("model", "list").stdout
    assert all(name in text for name in names)

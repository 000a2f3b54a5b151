import tomllib
from pathlib import Path

import pytest

from workbench.gate.scenario_file import variant_toml
from workbench.scenario import load_scenario, parse_scenario, scenario_names


@pytest.mark.parametrize("name", scenario_names())
def test_every_built_in_variant_survives(name: str) -> None:
    scenario = load_scenario(name)
    for variant in scenario.variants():
        (again,) = parse_scenario(
            variant_toml(scenario, variant), source="again", folder=Path(variant.folder)
        ).variants()
        assert again == variant


def test_paths_become_absolute_and_built_in_names_stay(tmp_path: Path) -> None:
    text = 'name = "own"\n[model]\nshape = "a b/tiny.toml"\nweights = "random"\n[prompts]\nfile = "é\\u007f.jsonl"\n'
    scenario = parse_scenario(text, source="own", folder=tmp_path)
    (variant,) = scenario.variants()
    data = tomllib.loads(variant_toml(scenario, variant))
    assert data["model"]["shape"] == str(tmp_path / "a b/tiny.toml")
    assert data["prompts"]["file"] == str(tmp_path / "é\x7f.jsonl")
    (held_out,) = parse_scenario('name = "own"\n', source="own", folder=tmp_path).variants()
    assert "prompts" not in tomllib.loads(variant_toml(scenario, held_out))


def test_only_what_differs_from_the_defaults_is_written() -> None:
    scenario = parse_scenario('name = "own"\n[measure]\nrepetitions = 2\n', source="own", folder=Path())
    data = tomllib.loads(variant_toml(scenario, scenario.variants()[0]))
    assert data == {
        "name": "own",
        "model": {"preset": "nano"},
        "measure": {"repetitions": 2},
        "matrix": [{"name": "own"}],
    }

"""The how-to says what is true: its options exist, and its error rates are what the simulation prints."""

import re
from pathlib import Path

from workbench.cli_reference import page
from workbench.gate.rule import DELTA, LEVEL, LOOKS, NO_CHANGE_LEVEL
from workbench.scenario import scenario_names

TEXT = (Path(__file__).parents[2] / "docs" / "gate.md").read_text()
CELL = re.compile(r"([\d.]+)/([\d.]+)/([\d.]+) \(([\d.]+)\)")


def _rates() -> dict[str, list[tuple[float, ...]]]:
    """Return by noise of a launch: (fail, pass, inconclusive, pairs) for each true change."""
    rows = re.findall(r"^\| ([\d.]+) % \| [\d.]+ % \| (.*/.*) \|$", TEXT, re.MULTILINE)
    return {noise: [tuple(map(float, cell)) for cell in CELL.findall(cells)] for noise, cells in rows}


def test_every_option_in_it_exists() -> None:
    start = page().index("## `workbench gate`")
    known = set(re.findall(r"`(--[a-z-]+)", page()[start : page().index("## `workbench model")]))
    known |= set(re.findall(r"`(--[a-z-]+)", page()[page().index("## `workbench run") : start]))
    commands = re.findall(r"workbench\"? (?:gate|run)\b[^\n`]*(?:\n\s+--[^\n]*)*", TEXT)
    used = {option for command in commands for option in re.findall(r"(?<=\s)(--[a-z-]+)", command)}
    assert len(used) > 10
    assert used <= known
    mentioned = set(re.findall(r"`(--[a-z][a-z-]*)", TEXT))
    assert mentioned <= known


def test_its_scenarios_exist() -> None:
    named = set(re.findall(r"--scenario ([a-z-]+)", TEXT))
    assert named
    assert named <= set(scenario_names())


def test_the_rule_is_the_one_in_the_code() -> None:
    assert f"after {', '.join(map(str, LOOKS[:-1]))} and {LOOKS[-1]} pairs" in TEXT
    assert f"level of {LEVEL:g}".replace("0.", ".") in TEXT
    assert f"level {NO_CHANGE_LEVEL:g}".replace("0.", ".") in TEXT
    assert f"`--delta {DELTA:g}`" in TEXT


def test_the_error_rates_keep_their_promises() -> None:
    found = _rates()
    assert list(found) == ["0.5", "1", "2", "5"]
    assert all(changes[0][0] <= 1 for changes in found.values())
    five_percent = found["1"][3]
    assert five_percent[0] == 100
    assert five_percent[3] <= 5

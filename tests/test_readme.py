"""What the README shows must exist: its scenario, its verbs, its options, its links."""

import re
from pathlib import Path

import pytest
import typer

from workbench.cli import app
from workbench.scenario import parse_scenario

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="not run from a checkout")


def test_the_scenario_is_valid() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    scenario = parse_scenario(text, source="README.md", folder=ROOT)
    assert [variant.name for variant in scenario.variants()] == ["plain", "mtp-2"]


def test_every_verb_and_option_exists() -> None:
    group = typer.main.get_command(app)
    shown = re.findall(r"`workbench ((?:model )?[a-z]+)([^`]*)`", README.read_text())
    assert len(shown) >= 8
    for words, rest in shown:
        command = group
        for word in words.split():
            command = command.commands[word]  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, f"workbench {words}{rest}"


@pytest.mark.parametrize(
    "page", [path.relative_to(ROOT).as_posix() for path in (README, *sorted(ROOT.glob("docs/**/*.md")))]
)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in link:
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"

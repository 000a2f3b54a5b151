from pathlib import Path

from workbench.cli_reference import page

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_command_says() -> None:
    written = (ROOT / "docs/reference/cli.md").read_text()
    assert written == page(), "run: python -m workbench.cli_reference > docs/reference/cli.md"


def test_every_option_is_explained() -> None:
    assert " None" not in page()
    assert "| |" not in page()

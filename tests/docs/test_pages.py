"""What the case studies and how-tos show is what their commands print.

A page's ``console`` blocks run in their order, in one folder that holds nothing but ``tests``. Every line shown below a
command must be a line of its output, where ``…`` stands for anything, and blanks for blanks. ``python`` blocks run
between them, and the ``text`` block after one is what it prints. ``sh`` blocks need a GPU or a server: there only
verbs, options and names of scenarios are checked.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from workbench.cli import app
from workbench.scenario import scenario_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = [
    "case-studies/sglang-gpt-oss-20b.md",
    "case-studies/persistent-beside-sglang.md",
    "case-studies/one-step-six-signals.md",
    "case-studies/the-ladder.md",
    "case-studies/dflash-on-a-moe.md",
    "how-to/profile-sglang.md",
    "how-to/attach.md",
    "how-to/perfetto.md",
]

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="not run from a checkout")


def require_shown(shown: list[str], printed: str, where: str) -> None:
    """Fail for the first line of ``shown`` that ``printed`` does not have after the one before it."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    at = 0
    for line in shown:
        words = " ".join(line.split())
        if words in ("", "…"):
            continue
        pattern = re.compile(".*".join(map(re.escape, words.split("…"))))
        found = next((place for place in range(at, len(lines)) if pattern.fullmatch(lines[place])), None)
        assert found is not None, f"{where}: not printed, or not in this order: {line!r}\n{printed}"
        at = found + 1


def run_command(line: str) -> str:
    """Run one ``workbench`` line in this process; what it prints on both streams."""
    word, *arguments = shlex.split(line)
    assert word == "workbench", line
    result = CliRunner().invoke(app, arguments, prog_name="workbench")
    assert result.exit_code == 0, f"{line}: {result.output}"
    return result.output


@pytest.mark.parametrize("page", RUN)
def test_commands_print_what_the_page_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    code_printed: str | None = None
    names: dict[str, object] = {"__name__": "__main__"}
    for kind, block in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        if kind == "console":
            parts = re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)
            assert not parts[0], f"{page}: a console block begins with a command"
            for part in parts[1:]:
                command, *shown = part.splitlines()
                require_shown(shown, run_command(command), f"{page}: {command}")
        elif kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, page, "exec"), names)  # noqa: S102 - our own page
            code_printed = out.getvalue()
        elif kind == "text":
            assert code_printed is not None, f"{page}: output without code"
            shown, printed = ([line.split() for line in text.splitlines()] for text in (block, code_printed))
            assert shown == printed, f"{page}: the code prints\n{code_printed}"
            code_printed = None


@pytest.mark.parametrize("page", RUN)
def test_verbs_options_and_scenarios_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8").replace("\\\n", " ")
    shell = "\n".join(block for kind, block in BLOCK.findall(text) if kind == "sh")
    commands = re.findall(r"`(workbench [^`\n]*)`", text) + re.findall(r"^(workbench .*)$", shell, re.MULTILINE)
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        node = typer.main.get_command(app)
        while words and words[0] in getattr(node, "commands", {}):
            node = node.commands[words.pop(0)]  # type: ignore[attr-defined]
        assert not getattr(node, "commands", None) or not words, command
        known = {option for parameter in node.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, command
        if node.name == "run" and words and words[0].isascii() and not words[0].startswith("-") and words[0].islower():
            assert words[0] in scenario_names(), command
    for option in re.findall(r"`(--[a-z][a-z-]*)`", text):
        assert option in (DOCS / "reference/cli.md").read_text(encoding="utf-8"), f"{page}: {option}"

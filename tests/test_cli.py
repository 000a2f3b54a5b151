import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from workbench import __version__
from workbench.cli import GROUPS, VERBS, Workbench, app
from workbench.errors import ExitCode, InputError, UnfitError, WorkbenchError

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "pydantic", "pyarrow", "duckdb", "rich", "numpy", "scipy", "pandas", "plotly", "msgspec", "jinja2"}
PYTHON = {**os.environ, "PYTHONPATH": str(ROOT)}


class RegressionError(WorkbenchError):
    exit_code = ExitCode.REGRESSION


class InconclusiveError(WorkbenchError):
    exit_code = ExitCode.INCONCLUSIVE


def _raising(error: BaseException) -> typer.Typer:
    """Return a command with the error handling of ours and one verb that raises ``error``."""
    small = typer.Typer(cls=Workbench, rich_markup_mode=None, pretty_exceptions_enable=False)

    @small.callback()
    def root(traceback: Annotated[bool, typer.Option("--traceback", envvar="WORKBENCH_TRACEBACK")] = False) -> None: ...

    @small.command()
    def verb() -> None:
        raise error

    return small


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("f.toml: depth: wrong", hint="fix it"), 2, "workbench: error: f.toml: depth: wrong; fix it\n"),
        (UnfitError("no GPU"), 4, "workbench: error: no GPU\n"),
        (RegressionError("slower"), 1, "workbench: error: slower\n"),
        (InconclusiveError("too noisy"), 3, "workbench: error: too noisy\n"),
        (InputError("two\nlines\x1b[31m"), 2, "workbench: error: two\\nlines\\x1b[31m\n"),
        (KeyboardInterrupt(), 130, "workbench: interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_its_code(error: BaseException, code: int, line: str) -> None:
    result = CliRunner().invoke(_raising(error), ["verb"])
    assert (result.exit_code, result.stderr, result.stdout) == (code, line, "")


def test_an_unforeseen_error_names_itself_and_the_way_to_its_traceback() -> None:
    small = _raising(ZeroDivisionError("by\nzero"))
    result = CliRunner().invoke(small, ["verb"])
    assert result.exit_code == ExitCode.INTERNAL
    assert result.stderr.startswith("workbench: error: internal: ZeroDivisionError: by\\nzero; ")
    assert "WORKBENCH_TRACEBACK=1" in result.stderr
    assert result.stderr.count("\n") == 1
    for traced in (
        CliRunner().invoke(small, ["--traceback", "verb"]),
        CliRunner().invoke(small, ["verb"], env={"WORKBENCH_TRACEBACK": "1"}),
    ):
        assert traced.exit_code == ExitCode.INTERNAL
        assert "Traceback (most recent call last)" in traced.stderr
        assert traced.stderr.endswith("workbench: error: internal: ZeroDivisionError: by\\nzero\n")


@pytest.mark.parametrize(
    "arguments", [["fly"], ["show"], ["show", "a", "b"], ["--bad"], ["model", "show", "x", "--tp", "two"]]
)
def test_usage_errors_end_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert "Usage: " in result.stderr


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"workbench {__version__}\n")


def test_every_code_is_in_the_page_and_no_other() -> None:
    page = (ROOT / "docs/reference/exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == [(code.value, code.name) for code in ExitCode]


def _modules(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=PYTHON, check=True)
    return {name.split(".")[0] for name in json.loads(done.stderr)}


def test_importing_the_command_imports_nothing_heavy() -> None:
    assert not _modules("import workbench.cli") & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    run = f"sys.argv = ['workbench', *{arguments}]\ntry:\n    main()\nexcept SystemExit:\n    pass"
    # Later versions of typer load pydantic themselves to read a verb's parameters.
    assert not _modules(f"from workbench.cli import main\n{run}") & (HEAVY - {"pydantic"})


def test_every_verb_takes_json_and_explains_itself() -> None:
    verbs = [[verb.__name__] for verb in VERBS]
    verbs += [
        [name, command.name or command.callback.__name__]
        for name, group in GROUPS
        for command in group.registered_commands
    ]  # type: ignore[union-attr]
    assert len(verbs) >= 11
    for verb in verbs:
        result = CliRunner().invoke(app, [*verb, "--help"])
        assert result.exit_code == 0
        prints_no_result = verb in (["serve"], ["faults", "run"])
        assert ("--json" in result.stdout) is not prints_no_result, verb


def _piped(arguments: list[object], *, environment: dict[str, str]) -> tuple[int, str]:
    """Run the command with a stdout whose reader is gone; return exit code and stderr."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "workbench", *map(str, arguments)]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments", [["model", "list"], ["model", "list", "--json"], ["scenario", "show", "quickstart"]]
)
def test_a_closed_pipe_is_quiet(arguments: list[object]) -> None:
    assert _piped(arguments, environment=PYTHON) == (ExitCode.BROKEN_PIPE, "")


def test_output_is_not_an_error_where_the_locale_lacks_a_sign() -> None:
    command = [sys.executable, "-m", "workbench", "run", "±"]
    done = subprocess.run(command, capture_output=True, env={**PYTHON, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith(b"workbench: error: no scenario '?'")


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_colour_follows_the_terminal_and_no_color(variables: dict[str, str], coloured: bool) -> None:
    environment = {key: value for key, value in PYTHON.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "workbench", "doctor"]
    environment |= {"TERM": "xterm-256color", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert bool(re.search(r"\x1b\[(?:\d+;)*3\d", done.stdout)) is coloured

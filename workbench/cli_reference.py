"""The page docs/reference/cli.md, made from the command itself. ``python -m workbench.cli_reference`` prints it."""

from collections.abc import Iterator, Mapping
from typing import Any

import typer.main

from workbench.cli import app

INTRODUCTION = """# The command

Written by `python -m workbench.cli_reference`; do not edit.

Results go to stdout, progress and notes to stderr. `--json` prints the result as JSON. Colours follow the terminal;
`NO_COLOR` turns them off. How a process ends: [exit-codes.md](exit-codes.md).
"""


def page() -> str:
    """Return the page as Markdown: the command's own options, then every verb in the order of the help."""
    root = typer.main.get_command(app)
    sections = [_section("workbench", root), *_sections("workbench", root)]
    return "\n".join([INTRODUCTION, *sections])


def _sections(path: str, group: Any) -> Iterator[str]:
    commands: Mapping[str, Any] = group.commands
    for name, command in commands.items():
        if hasattr(command, "commands"):
            if command.invoke_without_command:  # a noun that is a verb too
                yield _section(f"{path} {name}", command)
            yield from _sections(f"{path} {name}", command)
        else:
            yield _section(f"{path} {name}", command)


def _section(path: str, command: Any) -> str:
    # Whether a shell's completion can be installed depends on typer, not on this command.
    shown = [parameter for parameter in command.params if "completion" not in parameter.name]
    arguments = "".join(f" {parameter.metavar}" for parameter in shown if parameter.param_type_name == "argument")
    rows = [f"| {_name(parameter)} | {_meaning(parameter)} |" for parameter in shown]
    return "\n".join(
        [
            f"## `{path}{arguments}`",
            "",
            command.help.strip(),
            "",
            "| argument, option | meaning |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    value = "" if parameter.is_flag else f" {parameter.metavar}"
    return ", ".join(f"`{option}{value}`" for option in parameter.opts).replace("|", "\\|")


def _meaning(parameter: Any) -> str:
    meaning: str = parameter.help
    if isinstance(parameter.default, int | float | str) and not isinstance(parameter.default, bool):
        meaning += f" Default: {parameter.default}."
    if parameter.envvar:
        meaning += f" Also by `{parameter.envvar}`."
    return meaning


if __name__ == "__main__":
    print(page(), end="")

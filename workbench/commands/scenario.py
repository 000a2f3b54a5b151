"""``workbench scenario``: the built-in scenarios, a scenario's text, and the JSON Schema for editors."""

from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.terminal import print_json, print_table, print_text

app = typer.Typer(help="What can be run: scenarios and their schema.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the built-in scenarios."""
    from workbench.scenario import load_scenario, scenario_names

    scenarios = [load_scenario(name) for name in scenario_names()]
    if as_json:
        print_json(
            [
                {"name": one.source, "summary": one.summary, "variants": [variant.name for variant in one.variants()]}
                for one in scenarios
            ]
        )
        return
    rows = [(one.source, ", ".join(variant.name for variant in one.variants()), one.summary) for one in scenarios]
    print_table(("scenario", "variants", "summary"), rows, right=())


@app.command()
def show(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help="Built-in name or TOML file.")],
    as_json: Json = False,
) -> None:
    """Check a scenario and print its text, to start a file of one's own; --json: every variant, fully resolved."""
    from workbench.scenario import load_scenario, scenario_path

    loaded = load_scenario(scenario)
    if as_json:
        print_json(loaded.to_json())
    else:
        print_text(scenario_path(scenario).read_text(encoding="utf-8"))


@app.command()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of scenario files, for editors; it is JSON with and without --json."""
    from workbench.scenario import json_schema

    print_json(json_schema())

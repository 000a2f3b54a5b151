"""``workbench model``: the bytes a model's decode step reads, and the floor they set."""

from enum import StrEnum
from typing import Annotated

import typer

from workbench.commands.options import Json
from workbench.terminal import print_json, print_line, print_table

app = typer.Typer(help="The byte model of a model's decode step.", no_args_is_help=True, rich_markup_mode=None)


class Drafting(StrEnum):
    """Drafters whose bytes are modelled."""

    NONE = "none"
    MTP = "mtp"
    DFLASH = "dflash"


@app.command()
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a shipped shape, or a .toml file.")],
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks.")] = 1,
    width: Annotated[int, typer.Option(metavar="N", help="Verify width T: tokens a step scores per sequence.")] = 1,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences.")] = 1,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens in the KV cache of each sequence.")] = 0,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Precision policy.")] = "as-shipped",
    hardware: Annotated[str, typer.Option(metavar="NAME", help="Device whose peaks set the floor.")] = "h200",
    drafter: Annotated[
        Drafting, typer.Option(metavar="none|mtp|dflash", help="Drafter whose bytes are added.")
    ] = Drafting.NONE,
    as_json: Json = False,
) -> None:
    """Print what one rank reads in one step, tensor class by tensor class, and the time this takes at least."""
    from workbench.model_report import COLUMNS, model_report

    report = model_report(
        model,
        tp=tp,
        width=width,
        policy=policy,
        context=context,
        batch=batch,
        hardware=hardware,
        drafter=drafter.value,
    )
    if as_json:
        print_json(report.to_json())
        return
    summary = report.summary()
    label_width = max(len(label) for label, _ in summary)
    for label, text in summary:
        print_line(f"{label:<{label_width}}  {text}")
    print_line()
    print_table(COLUMNS, report.rows())


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the shipped model shapes."""
    from workbench.decode.presets import load_preset, preset_names

    specs = [load_preset(name) for name in preset_names()]
    if as_json:
        print_json(
            [
                {"name": spec.name, "layers": len(spec.mixers), "shipped": spec.shipped, "source": spec.source}
                for spec in specs
            ]
        )
        return
    print_table(
        ("model", "layers", "shipped in", "source"),
        [(spec.name, str(len(spec.mixers)), spec.shipped, spec.source) for spec in specs],
        right=(),
    )

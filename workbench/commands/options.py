"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder that a run wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

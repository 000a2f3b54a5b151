"""What the command prints: results on stdout, notes on stderr, and nothing that a terminal would obey.

Text from a bundle may come from anybody, so control characters are spelt out and no markup is read.
"""

import json
import math
import sys
from collections.abc import Collection, Sequence
from typing import Any

from workbench.reports.labels import visible

MAX_TEXT = 2000
"""Longer lines and cells are cut."""

UNBOUNDED = 100_000
"""Width of a table that no terminal bounds."""


def printable(text: object) -> str:
    """Return ``text`` on one line, cut, with everything invisible spelt out (``\\x1b``)."""
    return visible(str(text), MAX_TEXT)


def note(text: object) -> None:
    """Print one line on stderr."""
    print(f"workbench: {printable(text)}", file=sys.stderr, flush=True)


def print_line(text: object = "") -> None:
    """Print one line of results on stdout."""
    sys.stdout.write(f"{printable(text)}\n")


def print_marked(mark: str, style: str, text: object) -> None:
    """Print one line of results that begins with ``mark`` in ``style``, such as ``green``; styles need a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    with console.capture() as captured:
        console.print(Text(printable(mark), style=style), end="")
    sys.stdout.write(f"{captured.get()}{printable(text)}\n")


def print_text(text: str) -> None:
    """Print lines of results on stdout, uncut; tabs become spaces, all else invisible is spelt out."""
    for line in text.splitlines():
        full = line.expandtabs(4)
        sys.stdout.write(f"{visible(full, len(full))}\n")


def print_json(value: object) -> None:
    """Print ``value`` as JSON on stdout."""
    sys.stdout.write(json_text(value))


def json_text(value: object) -> str:
    """Return ``value`` as indented JSON with a final newline: ASCII only, null where a number is not finite."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", right: Collection[int] | None = None
) -> None:
    """Print a table on stdout, its width bounded only where stdout is a terminal (NO_COLOR is honoured).

    ``right``: columns aligned to the right, by default all but the first.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = UNBOUNDED
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        aligned = index > 0 if right is None else index in right
        table.add_column(Text(printable(column)), justify="right" if aligned else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    # Captured and written as text: on a closed pipe the console would end the process with a code of its own.
    with console.capture() as captured:
        if title:
            console.print(Text(printable(title), style="bold"), soft_wrap=True)
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().splitlines()))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

"""Progress on stderr: bars in a terminal, a line per phase elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workbench.terminal import note, printable


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (what, done, total) that shows progress on stderr.

    It draws only when called. A thread that redraws would take the interpreter from the steps that are measured.
    """
    if sys.stderr.isatty():
        with _bars() as callback:
            yield callback
    else:
        yield _lines()


def _lines() -> Callable[[str, int, int], None]:
    shown = ""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal shown
        if what != shown:
            shown = what
            note(what)

    return progress


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bars:

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what), total=total)
            bars.update(tasks[what], completed=done, total=total, refresh=True)

        yield progress

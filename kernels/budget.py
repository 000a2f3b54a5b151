"""A benchmark's time budget: lines with the time elapsed as it goes, and an end even if the device never answers."""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from workbench.errors import UnfitError


class DeviceHangError(UnfitError):
    """The device did not finish in time. The context is lost: print what there is and leave."""


def wait(what: str, limit: float = 4.0) -> None:
    """Wait for the current stream, at most ``limit`` seconds; raises DeviceHangError beyond that."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    deadline = time.monotonic() + limit
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise DeviceHangError(f"{what}: the device did not finish within {limit:g} s")
        time.sleep(0.0002)


class Budget:
    """``seconds`` from the start of the process on, so that slow imports count.

    If the process outlives them by ``grace`` (a device that hangs blocks every call), it prints where it stands and
    exits with status 1.
    """

    def __init__(self, seconds: float, *, grace: float = 10.0) -> None:
        before = min(max(time.time() - float(psutil.Process().create_time()), 0.0), seconds)
        self._begin: float = time.monotonic() - before
        self.seconds: float = seconds
        faulthandler.dump_traceback_later(seconds - before + grace, exit=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self._begin

    @property
    def left(self) -> float:
        """Seconds left, negative beyond the budget."""
        return self.seconds - self.elapsed

    def note(self, text: str) -> None:
        """Print ``text`` after the time elapsed, at once."""
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)

    def finish(self) -> None:
        """Call off the forced end."""
        faulthandler.cancel_dump_traceback_later()


def save(report: dict[str, Any], name: str) -> None:
    """Write the report to ``$OUT/<name>`` where OUT is set; call it as results come in."""
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], name).write_text(json.dumps(report, indent=1))


def leave(code: int) -> None:
    """Exit without waiting for a device that may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

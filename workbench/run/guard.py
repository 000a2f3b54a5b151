"""Instruments must not take the run with them: a call that fails or hangs costs that instrument's rows alone."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from workbench.errors import ExitCode, UnfitError, WorkbenchError

Result = TypeVar("Result")

START_SECONDS = 180.0
"""For available() and start(): a sidecar starts, kernels compile."""

STOP_SECONDS = 180.0
"""For stop(): a profiler exports, a sidecar hands over its samples."""

KILL_AFTER = 3.0
"""A call that cannot be interrupted for so many times its limit ends the process; what was flushed can be salvaged."""


class ProbeError(UnfitError):
    """An instrument failed; the message is one line."""


def guarded(what: str, call: Callable[[], Result], seconds: float) -> Result:
    """Return ``call()``. Raises ProbeError where it raises anything or takes longer than ``seconds``.

    The profiler must run in the main thread, so time is kept by a signal, which interrupts Python but not a call into
    C: for that one a watchdog ends the process. Off the main thread, and where there is no such signal, only the
    watchdog watches.
    """
    try:
        with _alarm(what, seconds), _watchdog(what, seconds * KILL_AFTER):
            return call()
    except ProbeError:  # of the alarm
        raise
    except WorkbenchError as error:
        raise ProbeError(f"{what}: {error.message}", hint=error.hint) from error
    except Exception as error:  # whatever a library raises: the run goes on, and says so
        raise ProbeError(f"{what}: {_line(error)}") from error


def _line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _alarm(what: str, seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise ProbeError(f"{what}: took longer than {seconds:g} s")

    before: Any = signal.signal(signal.SIGALRM, expire)
    earlier = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *earlier)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _watchdog(what: str, seconds: float) -> Iterator[None]:
    def end() -> None:
        sys.stderr.write(
            f"workbench: {what}: hangs in a library for {seconds:g} s, giving up; "
            "'workbench check BUNDLE --salvage' reads what was measured\n"
        )
        sys.stderr.flush()
        os._exit(ExitCode.UNFIT)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

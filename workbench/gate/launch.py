"""One launch: a fresh process that runs one variant into a bundle of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from workbench.errors import ExitCode, InputError, UnfitError
from workbench.gate.tree import Tree

SideName = Literal["base", "head"]
GRACE_SECONDS = 10.0
"""How long a launch that must end may take to close its bundle before it is killed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as it went. ``problem``: why there is no complete bundle; empty where there is one.

    ``seconds``: wall time of the process; ``other_cpus``: how many CPUs other processes kept busy meanwhile. Both are
    None for a recorded bundle.
    """

    side: SideName
    variant: str
    pair: int
    attempt: int
    bundle: Path
    problem: str = ""
    seconds: float | None = None
    other_cpus: float | None = None


def start(tree: Tree, scenario: Path, bundle: Path, *, timeout: float) -> tuple[str, float, float | None]:
    """Run ``scenario`` with the code of ``tree`` into ``bundle``; return problem, seconds and other CPUs.

    Output goes to ``bundle``.log. Raises InputError where the code refuses the scenario and UnfitError where it says
    that this machine cannot run it: another try would end the same.
    """
    log = bundle.with_name(f"{bundle.name}.log")
    command = [sys.executable, "-P", "-m", "workbench", "run", str(scenario), "--out", str(bundle), "--no-report"]
    began, busy = time.monotonic(), _busy_seconds()
    with log.open("wb") as output:
        # A session of its own, so that whatever it starts ends with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=tree.environment(),
            cwd=bundle.parent,
            start_new_session=True,
        )
        own = 0.0
        with _ended(process):
            late = True
            while (left := timeout - (time.monotonic() - began)) > 0:
                own = _own_seconds(process, own)
                try:
                    process.wait(min(0.5, left))
                except subprocess.TimeoutExpired:
                    continue
                late = False
                break
    seconds = time.monotonic() - began
    other = None if busy is None else max(0.0, ((_busy_seconds() or 0.0) - busy - own) / seconds)
    if late:
        return f"took longer than {timeout:.0f} s", seconds, other
    _raise_refusal(tree, process.returncode, log)
    return "" if process.returncode == 0 else f"ended with {process.returncode}: {_last_line(log)}", seconds, other


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Make sure that ``process`` and its children are gone at the end, asked first and killed then."""
    try:
        yield
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                _signal(process, getattr(signal, "SIGKILL", signal.SIGTERM))
                process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


def _raise_refusal(tree: Tree, code: int, log: Path) -> None:
    if code == ExitCode.USAGE:
        raise InputError(f"{tree}: refuses the scenario: {_last_line(log)}", hint=f"see {log}")
    if code == ExitCode.UNFIT:
        raise UnfitError(f"{tree}: cannot run the scenario here: {_last_line(log)}", hint=f"see {log}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("workbench: error: ")[:400] if lines else "no output"


def _busy_seconds() -> float | None:
    """Return CPU seconds that all processes of the machine have used, stolen time included; None where not told."""
    try:
        times = psutil.cpu_times()
    except OSError:
        return None
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle)


def _own_seconds(process: "subprocess.Popen[bytes]", before: float) -> float:
    """Return CPU seconds of ``process`` so far, or ``before`` once it is gone."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return before
    return max(before, float(times.user + times.system))

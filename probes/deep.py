"""Counters of single kernels by Nsight Compute: DRAM bytes, resident warps, local memory, why warps wait.

A process of its own decodes a few steps; each of its kernels is run again, alone, until all counters are read. So
durations are of such replays, never of a step, and there is no time line. The program ``ncu`` does it, or
NVIDIA's nsight-python on top of it, which cannot choose kernels by name.

Caches are left as they are, since a decode step finds L2 as the step before left it. A replay then finds there what
the replay before left: a kernel that reads less than L2 holds shows fewer DRAM bytes than in a step. ``cache="all"``
empties L2 before every replay: such a kernel then shows what it reads when nothing is cached.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import workbench
from workbench.errors import InputError, UnfitError
from workbench.fingerprint import gpu_list
from workbench.ingest.ncu_csv import read_ncu_csv
from workbench.ingest.ncu_report import read_ncu_report
from workbench.ingest.part import Part
from workbench.probes.counter_access import OPEN_COUNTERS, admins_only, is_admin, loaded_profilers
from workbench.probes.ncu_command import (
    METRICS,
    Cache,
    Ncu,
    Reason,
    failure,
    find_ncu,
    ncu_command,
    unknown_metrics,
)
from workbench.probes.nsight_python import misfit, nsight_version, reader_missing, report
from workbench.probes.protocol import Missing

NAME = "ncu"
"""``source`` of its counters, as of profiles that were ingested."""

LOST = "DRAM bytes, achieved occupancy and stall reasons of single kernels"
INSTEAD = "registers, spills and occupancy limits of the compiled kernels; bytes and occupancy over time by samples"

SECONDS = 1800.0
"""A replay of a large kernel saves and restores what it writes, pass by pass."""

RETRIES = 2
"""How often it starts again without the metrics that this ncu does not have for this GPU."""

Through = Literal["auto", "ncu", "nsight-python"]

Child = Callable[[bool, Sequence[str]], list[str]]
"""Given whether nsight-python profiles it, and the metrics, returns the command of the process to be profiled."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was read. ``through``: by which tool, with its version. ``unread``: metrics that are not known here."""

    part: Part
    through: str
    unread: tuple[str, ...] = ()
    cache: Cache = "none"


class DeepProbe:
    """Profiles the kernels of another process. ``kernels``: names to profile, none: all; at most ``launches`` of them
    in the order in which they run."""

    def __init__(
        self,
        *,
        kernels: Sequence[str] = (),
        launches: int = 512,
        cache: Cache = "none",
        through: Through = "auto",
        seconds: float = SECONDS,
    ) -> None:
        self._kernels, self._launches, self._cache, self._seconds = tuple(kernels), launches, cache, seconds
        self._through = through

    @property
    def cache(self) -> Cache:
        """What is done with L2 before a replay."""
        return self._cache

    def available(
        self,
        gpus: Callable[[], tuple[list[dict[str, Any]], str]] = gpu_list,
        restricted: Callable[[], bool | None] = admins_only,
    ) -> Missing | None:
        """Return why no kernel can be profiled here: no GPU, no ncu or one too old, no permission, another profiler."""
        listed, note = gpus()
        if not listed:
            here = (
                "pip install nvidia-ml-py" if "not installed" in note else "run where the NVIDIA driver and its GPU are"
            )
            return self._missing(Reason(f"no GPU is listed ({note})", here))
        if isinstance(found := find_ncu(), Reason):
            return self._missing(found)
        try:
            closed = bool(restricted()) and not is_admin()
        except FileNotFoundError:
            closed = False  # no /proc here, as under WSL: ncu itself will say
        if closed:
            return self._missing(Reason("counters are for administrators only (ERR_NVGPUCTRPERM)", OPEN_COUNTERS))
        if loaded := loaded_profilers():
            why = f"another profiler is loaded into every process from here ({', '.join(loaded)})"
            return self._missing(Reason(why, f"unset {' '.join(loaded)}"))
        if self._through == "nsight-python" and (reason := _nsight_problem(found, self._kernels)):
            return self._missing(reason)
        return None

    def profile(self, child: Child, folder: Path) -> Replayed:
        """Profile the process that ``child`` names and return its kernels; ``folder`` takes ncu's files.

        Raises UnfitError where nothing could be profiled, with ncu's reason.
        """
        ncu = find_ncu()
        if isinstance(ncu, Reason):
            raise UnfitError(ncu.why, hint=ncu.fix)
        problem = _nsight_problem(ncu, self._kernels)
        if self._through == "nsight-python" and problem:
            raise UnfitError(problem.why, hint=problem.fix)
        if self._through != "ncu" and problem is None:
            return self._by_nsight(ncu, child, folder)
        return self._by_ncu(ncu, child, folder)

    def _by_ncu(self, ncu: Ncu, child: Child, folder: Path) -> Replayed:
        log, unread, metrics = folder / "ncu.csv", tuple[str, ...](), METRICS
        for _ in range(RETRIES + 1):
            command = ncu_command(
                ncu, child(False, metrics), log, metrics=metrics, kernels=self._kernels, launches=self._launches,
                cache=self._cache,
            )  # fmt: skip
            code, tail = run_program(command, folder, self._seconds)
            text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            refused = unknown_metrics(f"{text}\n{tail}", metrics)
            try:
                part = read_ncu_csv(log) if log.is_file() else None
            except InputError:
                part = None
            if part is not None:
                return Replayed(part, f"ncu {ncu.version}", unread, self._cache)
            if not refused:
                reason = failure(f"{text}\n{tail}") or Reason(_last_line(tail, code), "see workbench doctor")
                raise UnfitError(reason.why, hint=reason.fix)
            unread += refused
            metrics = tuple(name for name in metrics if name not in refused)
        raise UnfitError(f"ncu refuses metric after metric, last {unread[-1]}", hint="update Nsight Compute")

    def _by_nsight(self, ncu: Ncu, child: Child, folder: Path) -> Replayed:
        code, tail = run_program(child(True, METRICS), folder, self._seconds)
        found = report(folder / "nsight-")
        if found is None:
            logs = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("nsight-*.log")))
            reason = failure("\n".join([*logs, tail])) or Reason(_last_line(tail, code), "or: --through ncu")
            raise UnfitError(reason.why, hint=reason.fix)
        # Its table may have failed over what is no single kernel; the report is whole all the same.
        through = f"nsight-python {nsight_version()} on ncu {ncu.version}"
        return Replayed(read_ncu_report(found), through, cache=self._cache)

    def _missing(self, reason: Reason) -> Missing:
        return Missing(NAME, LOST, reason.why, INSTEAD, reason.fix)


def _nsight_problem(ncu: Ncu, kernels: Sequence[str]) -> Reason | None:
    """Return why nsight-python is not the one to ask."""
    if reason := misfit(ncu, nsight_version()) or reader_missing():
        return reason
    if kernels:
        return Reason("nsight-python profiles all kernels of a step, not the chosen ones", "use --through ncu")
    return None


def run_program(command: Sequence[str], folder: Path, seconds: float) -> tuple[int, str]:
    """Run ``command`` and return its exit code and the end of what it printed; after ``seconds`` all of it is ended.

    Raises UnfitError then, or where it does not start.
    """
    printed = folder / "printed.txt"
    with printed.open("wb") as sink:
        try:
            # A session of its own: ncu's child must not outlive it.
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise UnfitError(f"{command[0]} does not start: {error.strerror}", hint="see workbench doctor") from None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise UnfitError(
                f"profiling took longer than {seconds:g} s", hint="fewer --kernels, --steps or --launches"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, printed.read_bytes()[-20_000:].decode("utf-8", "replace")


def child_environment() -> dict[str, str]:
    """Return the environment of a script of this package that is run by its path: it finds the package, installed or
    not, and its own folder is no place to import from."""
    paths = [str(Path(workbench.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def _last_line(text: str, code: int) -> str:
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
    return f"profiling ended with {code}: {line[:200]}"

"""What the host's scheduler gave the thread that decodes: CPU time, waits for a CPU, and sleeps of its own.

A step that is slow because other work had the CPU, or because the hypervisor had, is no loss of the engine's. Linux
says which it was: ``clock_gettime``, ``getrusage`` and ``/proc/thread-self/schedstat`` (Documentation/scheduler/
sched-stats.rst: time run, time ready to run and waiting, times run), 3 us a reading in all.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SCHEDSTAT = "/proc/thread-self/schedstat"


@dataclass(frozen=True, slots=True)
class HostUse:
    """Over one step. ``cpu_ns``: CPU time of the decoding thread; ``process_cpu_ns``: of all threads of its process;
    ``ready_ns``: time in which it was ready to run and had no CPU; ``sleeps``: how often it gave up the CPU by itself
    (a lock, a sleep, a read or write that waits). None: this system does not say."""

    cpu_ns: int
    process_cpu_ns: int
    ready_ns: int | None
    sleeps: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a thread used since it began, read at ``at_ns`` of the monotonic clock."""

    at_ns: int
    use: HostUse

    def since(self, before: "Reading", wall_ns: int) -> HostUse:
        """Return what was used between ``before`` and this reading, around a step of ``wall_ns``.

        A thread is often put aside on its way out of a system call, that is between a reading and the step's mark: as
        much as the readings are further apart than the step is long was not waited within it.
        """
        now, then = self.use, before.use
        outside = max(self.at_ns - before.at_ns - wall_ns, 0)
        ready = _less(now.ready_ns, then.ready_ns)
        return HostUse(
            now.cpu_ns - then.cpu_ns,
            now.process_cpu_ns - then.process_cpu_ns,
            None if ready is None else max(ready - outside, 0),
            _less(now.sleeps, then.sleeps),
        )


class HostMeter:
    """Reads what the calling thread used so far. Open and read it in the thread that decodes."""

    def __init__(self) -> None:
        self._file: int | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):  # not Linux, or a sandbox without it: ready_ns stays unknown
            self._file = os.open(SCHEDSTAT, os.O_RDONLY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self) -> Reading:
        """Return what was used so far."""
        at, ready = time.perf_counter_ns(), self._ready()
        return Reading(at, HostUse(time.thread_time_ns(), time.process_time_ns(), ready, _sleeps()))

    def _ready(self) -> int | None:
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file, 96, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return None


def _sleeps() -> int | None:
    thread = getattr(resource, "RUSAGE_THREAD", None)
    return None if thread is None else resource.getrusage(thread).ru_nvcsw


def _less(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before

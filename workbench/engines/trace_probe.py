"""The engine's own profiler as an instrument of the traced pass: its Kineto trace, on the run's clock."""

import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from workbench.engines.sglang_session import SglangSession
from workbench.errors import WorkbenchError
from workbench.ingest.environment import base_ns
from workbench.ingest.kineto import KinetoTrace, read_kineto
from workbench.probes.host import kineto_clock
from workbench.probes.kernels import NO_LOCAL, placed_capture
from workbench.probes.protocol import Capture, Missing
from workbench.trace.clocks import Fit

UNCHECKED_NS = 100_000
"""Residual of the engine's clock where it is taken from this process's Kineto: the same clock, read by another one."""


class EngineTraceProbe:
    """Asks the engine to profile itself, stacks and shapes off. For one capture."""

    name = "kernels"

    def __init__(self, session: SglangSession, *, host: bool = True) -> None:
        self._session, self._host = session, host
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-trace-")
        self._begin_ns = 0
        self._clock: Fit | None = None

    def available(self) -> Missing | None:
        """It is the engine's own; what is wrong with it shows at start."""
        return None

    def start(self) -> None:
        """Start the engine's profiler; first read how Kineto's clock is placed, in this process."""
        try:
            self._clock = kineto_clock()
        except WorkbenchError:
            self._clock = None
        self._begin_ns = time.perf_counter_ns()
        self._session.start_profile(Path(self._folder.name))

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Do nothing: the engine's process does not see our spans."""
        return nullcontext()

    def stop(self) -> Capture:
        """Stop it and read its trace."""
        path = self._session.stop_profile(Path(self._folder.name))
        end_ns = time.perf_counter_ns()
        try:
            trace = read_kineto(path)
        finally:
            self._folder.cleanup()
        clock, missing = self._placed(trace, end_ns)
        return placed_capture(trace, clock, clock, missing=[NO_LOCAL, *missing], host=self._host)

    def _placed(self, trace: KinetoTrace, end_ns: int) -> tuple[Fit, list[Missing]]:
        """Return how the trace is placed: by Kineto's clock if the trace then lies within the capture, else its end at
        the capture's end."""
        first, last = int(trace.host["start"].min()), int(trace.host["end"].max())
        clock = self._clock
        if clock is not None:  # Kineto counts from 1970 in memory, from the base that its header names in a file
            base = base_ns(trace.header) or 0
            clock = Fit(clock.origin_ns - base, base).then(clock)
        if clock is not None and self._begin_ns <= clock.place(first) and clock.place(last) <= end_ns:
            return replace(clock, residual_ns=clock.residual_ns + UNCHECKED_NS), []
        offset = end_ns - last
        slack = max(0, (end_ns - self._begin_ns) - (last - first))
        what = "when the engine's trace was, on the run's clock"
        why = "its clock is not that of this process's profiler"
        return Fit(0, offset, 0, slack), [
            Missing("kernels", what, why, f"its end set to the capture's, {slack} ns loose")
        ]

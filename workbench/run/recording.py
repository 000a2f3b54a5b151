"""Instruments switched on together around some steps: what fails is said and left out, what works goes on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from workbench.probes.protocol import Capture, Missing, Probe
from workbench.run.capture import write_capture
from workbench.run.guard import START_SECONDS, STOP_SECONDS, ProbeError, guarded
from workbench.run.sequence import NumberedStep
from workbench.run.state import Run

Finished = tuple[Probe, Capture]

FALLBACKS = {
    "pm_sampler": "NVML's mean over the capture, else bytes of the byte model over step time",
    "nvml": "bytes of the byte model over step time, tagged modelled",
    "kernels": "host operators, if they were recorded",
    "lanes": "the kernel as a whole in the traced pass",
}
"""What stands in for an instrument that failed."""


class Recording:
    """The probes of one pass of one variant. ``start``, then the steps, then ``stop``; ``annotate`` in between."""

    def __init__(self, run: Run, variant: str, probes: Sequence[Probe]) -> None:
        self._run, self._variant = run, variant
        self._wanted = probes
        self.running: list[Probe] = []
        self._showing: list[Probe] = []  # those that do something with a span

    def start(self) -> bool:
        """Start what can be started; return whether anything runs."""
        for probe in self._wanted:
            try:
                missing = guarded(f"{probe.name}: available", probe.available, START_SECONDS)
                if missing is None:
                    guarded(f"{probe.name}: start", probe.start, START_SECONDS)
                    self.running.append(probe)
                else:
                    self._run.miss(self._variant, missing)
            except ProbeError as error:
                self._failed(probe, error)
        self._showing = [probe for probe in self.running if not isinstance(probe.annotate(""), nullcontext)]
        return bool(self.running)

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Open a named span in every probe that shows them.

        This is time within a step: no stack of contexts that do nothing, which takes 2 us, three times a step.
        """
        if not self._showing:
            return nullcontext()
        if len(self._showing) == 1:
            return self._showing[0].annotate(name)
        stack = ExitStack()
        for probe in self._showing:
            stack.enter_context(probe.annotate(name))
        return stack

    def stop(self) -> list[Finished]:
        """Stop all, the last started first; return what those saw that ended well."""
        finished: list[Finished] = []
        while self.running:
            probe = self.running.pop()
            try:
                finished.append((probe, guarded(f"{probe.name}: stop", probe.stop, STOP_SECONDS)))
            except ProbeError as error:
                self._failed(probe, error)
        return finished[::-1]

    def write(self, finished: Sequence[Finished], steps: Sequence[NumberedStep]) -> list[Finished]:
        """Write what was seen; a capture that does not fit the schema is that instrument's failure. Return the rest."""
        written = []
        for probe, capture in finished:
            try:
                write = partial(write_capture, self._run, probe.name, self._variant, capture, steps)
                guarded(f"{probe.name}: rows", write, STOP_SECONDS)
                written.append((probe, capture))
            except ProbeError as error:
                self._failed(probe, error)
        return written

    def _failed(self, probe: Probe, error: ProbeError) -> None:
        self._run.miss(self._variant, failure(probe.name, error))


def failure(probe: str, error: ProbeError) -> Missing:
    """Return the row of ``limits`` for an instrument that failed."""
    return Missing(probe, f"everything {probe} reads", error.message, FALLBACKS.get(probe, ""), error.hint)

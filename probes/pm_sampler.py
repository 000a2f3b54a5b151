"""HBM bytes, CTAs per SM, warps and pipes of a GPU every 2 to 10 us, read by a process of its own.

The sampled process is not touched: no profiler is loaded into it, and any process on the GPU is seen. One set of
counters fits at a time; sample another in a second repetition. Sampling holds the GPU's clocks while it is armed
(pytorch/pytorch#188844), so it is armed for the capture alone.

``python -m workbench.probes.pm_sampler`` checks it against a loop that reads a known number of bytes.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.errors import InputError
from workbench.probes import pm_samples
from workbench.probes.counter_sets import CYCLES, counter_set, plan
from workbench.probes.device_uuid import cuda_uuid
from workbench.probes.protocol import Capture, Missing
from workbench.probes.sampler_environment import INSTALL, SamplerEnvironment, sampler_environment
from workbench.probes.sidecar_link import SidecarError, SidecarLink

PROGRAM = Path(__file__).resolve().parent / "pm_sidecar.py"
INTERVAL_NS = 10_000
SHORTEST_NS, LONGEST_NS = 1_000, 1_000_000
BUFFER_BYTES = 512 << 20
"""About half a second at 10 us, should the sidecar not get to run; it reads the buffer all the time."""

READY_SECONDS = 120.0
START_SECONDS = 20.0
STOP_SECONDS = 120.0
LEAST_READINGS = 2

TRAFFIC = "traffic"
"""The set that a run samples first."""

_FALLBACK = "NVML's mean over the capture, else bytes of the byte model over step time"


class PmSampler:
    """Samples one counter set on one GPU. ``start`` and ``stop`` may be called many times; ``close`` ends it.

    As a context manager it closes itself. The sidecar starts with ``prepare``, or else with the first ``start``, which
    then takes seconds: call ``prepare`` before the steps that count.
    """

    name = "pm_sampler"

    def __init__(
        self,
        device: int = 0,
        *,
        uuid: str = "",
        set_name: str = TRAFFIC,
        interval_ns: int = INTERVAL_NS,
        bin_ns: int = 0,
        environment: SamplerEnvironment | None = None,
        command: Sequence[str] = (sys.executable, "-P", str(PROGRAM)),
        ready_seconds: float = READY_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        """``device`` goes into the rows; the GPU is ``uuid``, or else this process's CUDA device of that number.

        ``bin_ns``: samples are merged into spans of at least that long (see ``pm_samples.to_table``). ``command`` and
        the limits are for tests. Raises InputError for a set or an interval that there is not.
        """
        if not SHORTEST_NS <= interval_ns <= LONGEST_NS:
            raise InputError(f"interval_ns: {interval_ns} is not between {SHORTEST_NS} and {LONGEST_NS}")
        self.set = counter_set(set_name)
        self.device = device
        self._uuid = uuid
        self._interval_ns = interval_ns
        self._bin_ns = bin_ns
        self._environment = environment or sampler_environment()
        self._command = command
        self._limits = ready_seconds, stop_seconds
        self._link: SidecarLink | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._asked_ns = self._started_ns = 0
        self._left_out, self._why = 0, ""
        self.ready: dict[str, Any] = {}
        """What the sidecar said of itself: device, chip, metric taken for each reading, those refused."""

    @property
    def source(self) -> str:
        """What the rows of ``counters`` name as their source: sets that are sampled one after the other are apart."""
        return pm_samples.SOURCE if self.set.name == TRAFFIC else f"{pm_samples.SOURCE}, {self.set.name}"

    @property
    def pid(self) -> int | None:
        """The sidecar's process id while it runs."""
        return self._link.pid if self._link else None

    def available(self) -> Missing | None:
        """Start the sidecar, which tests itself for some hundredths of a second; return why it cannot sample, if so."""
        if problem := self._environment.problem():
            return self.missing(problem, INSTALL)
        try:
            self.prepare()
        except SidecarError as error:
            return self.missing(error.message, error.hint)
        return None

    def missing(self, why: str, fix: str) -> Missing:
        """Return that the set cannot be sampled, and what stands in."""
        what = ", ".join(reading.name for reading in self.set.readings if reading.name != CYCLES)
        return Missing(self.name, what, f"{self._whose}{why}", _FALLBACK, fix)

    @property
    def _whose(self) -> str:
        return "" if self.set.name == TRAFFIC else f"set {self.set.name}: "

    def prepare(self) -> None:
        """Start the sidecar and configure the counters. Raises SidecarError where nothing can be sampled.

        A set may be accepted and still count nothing, or fit one pass and be refused as a whole: its last readings are
        then left out until it counts.
        """
        if self._link:
            return
        most = len(self.set.readings) - LEAST_READINGS
        for self._left_out in range(most + 1):
            answer = self._launch(plan(self.set, self._left_out))
            if answer["event"] == "ready":
                self.ready = answer
                return
            self._why = str(answer.get("why", "the set counts nothing with it"))
            self.close()
        raise SidecarError(
            f"the set {self.set.name!r} was accepted but counts nothing on this GPU ({self._why})",
            hint="try another set, and a GPU that is not idle",
        )

    def _launch(self, wanted: dict[str, Any]) -> dict[str, Any]:
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-sampler-")
        folder = Path(self._folder.name)
        uuid = self._uuid or cuda_uuid(self.device)
        options = ["--device", uuid, "--spool", str(folder), "--interval-ns", str(self._interval_ns)]
        options += ["--buffer-bytes", str(BUFFER_BYTES)]
        try:
            self._link = SidecarLink([*self._command, *options], folder, self._environment.variables(os.environ))
            self._link.send(json.dumps(wanted))
            return self._link.receive(self._limits[0], "ready", "empty")
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Arm the counters; they count when this returns. Raises SidecarError."""
        self.prepare()
        link = self._require()
        self._asked_ns = time.perf_counter_ns()
        link.send("start")
        link.receive(START_SECONDS, "started")
        self._started_ns = time.perf_counter_ns()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Do nothing: the sampler does not see the host."""
        return nullcontext()

    def stop(self) -> Capture:
        """Disarm the counters and return what was seen: rows of ``counters`` in ``Capture.columns``, and losses.

        A sidecar that fails here costs the capture, not the run: it comes back empty, with the reason.
        """
        link, stopped_ns = self._require(), time.perf_counter_ns()
        try:
            link.send("stop")
            stopped = link.receive(self._limits[1], "stopped")
            return self._capture(stopped, stopped_ns)
        except (SidecarError, InputError) as error:
            self.close()
            loss = {
                "kind": "capture-lost",
                "count": 1,
                "first_ns": self._started_ns,
                "last_ns": stopped_ns,
                "severity": "error",
                "detail": error.message,
            }
            return Capture({}, missing=[self.missing(error.message, error.hint)], losses=[loss])

    def _capture(self, stopped: dict[str, Any], stopped_ns: int) -> Capture:
        metrics: dict[str, str] = self.ready["metrics"]
        assert self._folder is not None  # noqa: S101 - made with the link
        raw = pm_samples.read_spool(Path(self._folder.name), int(stopped["samples"]), len(metrics))
        if len(raw.times) < 2:
            raise InputError("the sampler returned no samples", hint="a longer capture, or another set")
        placed, clock_name = pm_samples.place(raw, stopped["anchors"])
        window, interval_ns = (self._asked_ns, stopped_ns), int(self.ready["interval_ns"])
        samples = pm_samples.clean(raw, placed, clock_name, window, interval_ns, self._started_ns)
        if not len(samples.start_ns):
            raise InputError(f"none of {len(raw.times)} samples has a time within the capture")
        table = pm_samples.to_table(
            samples,
            self.set,
            metrics,
            int(self.ready["device"]["warps_per_sm"]),
            device=self.device,
            bin_ns=self._bin_ns,
            source=self.source,
        )
        return Capture(
            {},
            offset_ns=placed.offset_ns,
            residual_ns=placed.residual_ns,
            missing=self.unread(),
            losses=[*samples.losses, *pm_samples.overflow_losses(stopped, samples, stopped_ns)],
            columns={"counters": table},
            source=self.source,
        )

    def unread(self) -> list[Missing]:
        """Return the readings of the set that this GPU does not give, once ``prepare`` has found out."""
        refused: dict[str, str] = dict(self.ready.get("refused", {}))
        counted = len(self.set.readings) - self._left_out
        refused |= {reading.name: self._why for reading in self.set.readings[counted:]}
        meanings = {reading.name: reading.meaning for reading in self.set.readings}
        return [Missing(self.name, meanings[name], f"{self._whose}{name}: {why}") for name, why in refused.items()]

    def _require(self) -> SidecarLink:
        if self._link is None:
            raise SidecarError("the sampler is not running", hint="call start first")
        return self._link

    def close(self) -> None:
        """End the sidecar and remove its files."""
        if self._link:
            self._link.close()
        if self._folder:
            self._folder.cleanup()
        self._link = self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


if __name__ == "__main__":
    from workbench.probes.pm_check import main

    sys.exit(main())

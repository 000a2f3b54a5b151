"""Clocks, power, temperature, throttle reasons, memory and errors of one GPU by NVML, some twenty times a second.

NVML is no timeline of a step: it says under which conditions the steps ran. Where no counters can be sampled, its GPM
averages stand in for them (Hopper and later): means over a whole capture of 100 ms at least, never of a step.
"""

import math
import os
import threading
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from workbench.probes.nvml_queries import GPM_METRICS, QUERIES, Nvml, Query, facts
from workbench.probes.protocol import Capture, Missing

HZ = 20.0
SLOW_EVERY = 10
GPM_NS = 100_000_000
"""Means over less are not valid (NVIDIA/DCGM#310)."""

INSTALL = "pip install nvidia-ml-py"


class NvmlProbe:
    """Polls one GPU from a thread. ``gpm``: also means of SM, tensor and DRAM activity over each capture.

    GPM shares hardware with the counter sampler, so ask for it where that is missing.
    """

    name = "nvml"

    def __init__(
        self, uuid: str, device: int = 0, *, hz: float = HZ, gpm: bool = False, own_pids: Collection[int] = ()
    ) -> None:
        """``uuid`` as NVML writes it (``device_uuid.cuda_uuid``); ``device`` goes into the rows."""
        self._uuid = uuid
        self._device = device
        self._period = 1 / hz
        self._gpm = gpm
        self._own_pids = {os.getpid(), *own_pids}
        self._nvml: Nvml = None
        self._handle: Any = None
        self._unsupported: dict[str, str] = {}
        self._failed: dict[str, tuple[int, int, int, str]] = {}
        self._answered: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._gpm_begin: Any = None
        self._started_ns = 0

    def available(self) -> Missing | None:
        """Needs nvidia-ml-py, a driver, and the GPU."""
        try:
            self._open()
        except ImportError:
            return self._missing("clocks, power, throttling", "nvidia-ml-py is not installed", INSTALL)
        except self._nvml.NVMLError as error:
            return self._missing(
                "clocks, power, throttling", f"NVML: {error} ({self._uuid})", "look at nvidia-smi -L, or at the driver"
            )
        return None

    def _open(self) -> None:
        if self._handle is None:
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            try:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            except pynvml.NVMLError:
                pynvml.nvmlShutdown()
                raise

    def _missing(self, what: str, why: str, fix: str = "") -> Missing:
        return Missing(self.name, what, why, fix=fix)

    def facts(self) -> list[dict[str, str]]:
        """Return rows of the table ``env``: driver, modes, limits, other processes. What NVML refuses says so."""
        self._open()
        rows = [{"key": f"gpu{self._device}.uuid", "value": self._uuid}]
        for name, read in facts(self._nvml, self._handle, self._own_pids):
            try:
                value = read()
            except self._nvml.NVMLError as error:
                value = f"not known: {error}"
            rows.append({"key": f"gpu{self._device}.{name}", "value": value})
        return rows

    def start(self) -> None:
        """Read everything once, then poll until ``stop``."""
        self._open()
        self._rows, self._failed, self._unsupported, self._answered = [], {}, {}, set()
        self._started_ns = time.perf_counter_ns()
        self._gpm_begin = self._gpm_sample() if self._gpm else None
        self._poll(slow=True)
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="workbench-nvml", daemon=True)
        self._thread.start()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Do nothing: NVML does not see the host."""
        return nullcontext()

    def stop(self) -> Capture:
        """Read everything once more and return rows of ``counters``; a query that failed half-way is a loss."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
        self._poll(slow=True)
        missing = [self._missing(what, why) for what, why in self._unsupported.items()]
        missing += self._gpm_means() if self._gpm else []
        losses = [
            {
                "kind": "failed-query",
                "count": count,
                "first_ns": first,
                "last_ns": last,
                "severity": "data_loss",
                "detail": f"{what}: {why}",
            }
            for what, (count, first, last, why) in self._failed.items()
        ]
        return Capture({"counters": self._rows}, missing=missing, losses=losses)

    def close(self) -> None:
        """Let go of NVML."""
        if self._handle is not None:
            self._nvml.nvmlShutdown()
            self._handle = None

    def _run(self) -> None:
        tick, due = 0, time.monotonic() + self._period
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            tick += 1
            self._poll(slow=tick % SLOW_EVERY == 0)
            due = max(due + self._period, time.monotonic())  # late is not made up for by polling faster

    def _poll(self, *, slow: bool) -> None:
        for query in QUERIES:
            if (slow or not query.slow) and query.what not in self._unsupported:
                self._ask(query)

    def _ask(self, query: Query) -> None:
        before = time.perf_counter_ns()
        try:
            values = query.read(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            if query.what in self._answered:
                count, first, _, why = self._failed.get(query.what, (0, before, before, str(error)))
                self._failed[query.what] = (count + 1, first, before, why)
            else:
                self._unsupported[query.what] = str(error)
            return
        self._answered.add(query.what)
        moment = (before + time.perf_counter_ns()) // 2
        self._rows += [self._row(name, value, query.unit, moment, moment) for name, value in values.items()]

    def _row(self, name: str, value: float, unit: str, start_ns: int, end_ns: int) -> dict[str, Any]:
        return {
            "source": self.name,
            "name": name,
            "device": self._device,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "value": float(value),
            "unit": unit,
        }

    def _gpm_sample(self) -> Any:
        """Return a GPM sample, or the reason in words why there is none."""
        try:
            if not self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return "NVML's GPM needs Hopper or later"
            sample = self._nvml.nvmlGpmSampleAlloc()
            return self._nvml.nvmlGpmSampleGet(self._handle, sample)
        except self._nvml.NVMLError as error:
            return str(error)

    def _gpm_means(self) -> list[Missing]:
        """Add a row per GPM metric over the whole capture; return what could not be had."""
        what, fallback = "mean DRAM and SM activity", "bytes of the byte model over step time"
        end, now = self._gpm_sample(), time.perf_counter_ns()
        samples = [sample for sample in (self._gpm_begin, end) if sample is not None and not isinstance(sample, str)]
        try:
            reasons = [sample for sample in (self._gpm_begin, end) if isinstance(sample, str)]
            if not reasons and now - self._started_ns < GPM_NS:
                reasons = [f"the capture is shorter than {GPM_NS // 1_000_000} ms"]
            if reasons:
                return [Missing(self.name, what, reasons[0], fallback)]
            asked = self._nvml.c_nvmlGpmMetricsGet_t()
            asked.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics, asked.sample1, asked.sample2 = len(GPM_METRICS), self._gpm_begin, end
            for index, (number, _, _) in enumerate(GPM_METRICS.values()):
                asked.metrics[index].metricId = number
            try:
                self._nvml.nvmlGpmMetricsGet(asked)
            except self._nvml.NVMLError as error:
                return [Missing(self.name, what, str(error), fallback)]
            for index, (name, (_, unit, scale)) in enumerate(GPM_METRICS.items()):
                if asked.metrics[index].nvmlReturn == 0 and math.isfinite(asked.metrics[index].value):
                    value = asked.metrics[index].value * scale
                    self._rows.append(self._row(name, value, unit, self._started_ns, now))
            return []
        finally:
            for sample in samples:
                self._nvml.nvmlGpmSampleFree(sample)

"""What a run on CUDA shares between its variants: the marker, the sampler's sidecar, the device's identity."""

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch

from workbench.probes.device_uuid import cuda_uuid
from workbench.probes.marker import Marker
from workbench.probes.nvml import NvmlProbe
from workbench.probes.pm_sampler import TRAFFIC, PmSampler
from workbench.probes.pm_samples import activity, moved
from workbench.probes.protocol import Capture, Missing, Probe
from workbench.run.guard import START_SECONDS, ProbeError, guarded
from workbench.run.state import Run
from workbench.scenario import Instruments
from workbench.trace.clocks import Fit, find_pulses, fit
from workbench.trace.manifest import ClockSource

SEARCH_NS = 1_000_000
"""How far a sampler's Unix time may be from where its pulses are: 0.1 and 0.2 ms were seen between two clocks."""

UNCHECKED_NS = 250_000
"""Residual of a sampler's clock that no pulse confirmed."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pulsed:
    """Pulses at one end of a capture: by ``%globaltimer``, and how that is placed."""

    pulses: list[Span]
    clock: Fit

    @property
    def placed(self) -> list[Span]:
        """The pulses on the bundle's clock."""
        return [(self.clock.place(start), self.clock.place(end)) for start, end in self.pulses]


class CudaBench:
    """As a context manager it ends what it started. ``marker`` is None where marker kernels do not run."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.device = device
        self.ordinal = device.index if device.index is not None else torch.cuda.current_device()
        self.uuid = cuda_uuid(self.ordinal)
        major, minor = torch.cuda.get_device_capability(device)
        self.capability = 10 * major + minor
        self.marker: Marker | None = None
        self._sampler: PmSampler | None = None
        self._sampled = ("", 0)  # by which set and how often it samples
        self._no_sampler: dict[str, Missing] = {}  # by set
        self._run = run
        self._prepare_marker()

    def _prepare_marker(self) -> None:
        marker = Marker(self.device)
        try:
            missing = marker.available()
            if missing is None:
                guarded("marker: prepare", marker.prepare, START_SECONDS)
                self.marker = marker
        except ProbeError as error:
            what = "clock alignment to 2 us"
            fallback = "the host's clock before a launch and after waiting for it"
            missing = Missing("marker", what, error.message, fallback, error.hint)
        if missing:
            self._run.miss(None, missing)

    def sampling_probes(self, instruments: Instruments, counters: str = TRAFFIC) -> list[Probe]:
        """Return the instruments of the sampled pass of set ``counters`` that work here; what does not is noted once,
        with its fallback. NVML is read beside the first set alone."""
        probes: list[Probe] = []
        sampler = self._pm_sampler(instruments, counters) if instruments.pm else None
        if instruments.nvml and counters == instruments.pm_sets[0]:
            pids = [sampler.pid] if sampler is not None and sampler.pid else []
            # GPM shares the counters' hardware: it stands in for the sampler, never beside it.
            probes.append(NvmlProbe(self.uuid, self.ordinal, gpm=sampler is None, own_pids=pids))
        if sampler is not None:
            probes.append(sampler)
        return probes

    def _pm_sampler(self, instruments: Instruments, counters: str) -> PmSampler | None:
        if counters in self._no_sampler:
            return None
        wanted = (counters, instruments.pm_interval_us * 1000)
        if self._sampler is not None and wanted == self._sampled:
            return self._sampler
        self._close_sampler()
        sampler = PmSampler(self.ordinal, uuid=self.uuid, set_name=counters, interval_ns=wanted[1])
        try:
            missing = guarded("pm_sampler: available", sampler.available, START_SECONDS)
        except ProbeError as error:
            sampler.close()
            missing = sampler.missing(error.message, error.hint)
        if missing is not None:
            self._no_sampler[counters] = missing
            self._run.miss(None, missing)
            return None
        self._sampler, self._sampled = sampler, wanted
        return sampler

    def pulse(self) -> Pulsed | None:
        """Run pulses for the sampler to see; None without a marker."""
        if self.marker is None:
            return None
        clock = self.marker.clock()
        return Pulsed(self.marker.pulses(sample_ns=self._sampled[1]), clock)

    def host_clock(self) -> ClockSource | None:
        """Return how the host's clock stands to the bundle's, which is the device's; None without a marker."""
        if self.marker is None:
            return None
        found = self.marker.comparisons
        return ClockSource(
            name="the host's clock, by the device's",
            offset_ns=0,
            drift_ppb=found.drift_ppb or 0,
            residual_ns=found.host_residual_ns,
        )

    def env(self) -> list[dict[str, str]]:
        """Return rows of table ``env`` about the device."""
        properties: Any = torch.cuda.get_device_properties(self.device)
        rows = [
            {"key": f"gpu{self.ordinal}.torch_name", "value": properties.name},
            {"key": f"gpu{self.ordinal}.multiprocessors", "value": str(properties.multi_processor_count)},
            {"key": f"gpu{self.ordinal}.compute_capability", "value": f"{properties.major}.{properties.minor}"},
            {"key": f"gpu{self.ordinal}.memory_bytes", "value": str(properties.total_memory)},
        ]
        probe = NvmlProbe(self.uuid, self.ordinal)
        try:
            missing = guarded("nvml: available", probe.available, START_SECONDS)
            if missing is None:
                return rows + guarded("nvml: facts", probe.facts, START_SECONDS)
            self._run.miss(None, missing)
        except ProbeError as error:
            self._run.miss(None, Missing("nvml", "driver, modes and limits of the GPU", error.message, fix=error.hint))
        finally:
            probe.close()
        return rows

    def _close_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_sampler()


def aligned(capture: Capture, begin: Pulsed | None, end: Pulsed | None) -> Capture:
    """Return a sampler's capture moved to where the pulses at both ends say it was; unmoved, with a wide residual and
    the reason, where they cannot be found in it."""
    counters = capture.columns.get("counters")
    if counters is None:
        return capture
    samples = activity(counters)
    found = [
        [edge for pair in find_pulses(samples, pulsed.placed, SEARCH_NS) for edge in pair] if pulsed else []
        for pulsed in (begin, end)
    ]
    if not found[0] or begin is None:
        why = "no marker kernels ran" if begin is None else "the pulses of the marker are not in the samples"
        what = f"clock alignment of {capture.source or 'its samples'} to 2 us"
        missing = Missing("pm_sampler", what, why, "the sampler's Unix time, unconfirmed")
        residual = max(capture.residual_ns, UNCHECKED_NS)
        return replace(capture, residual_ns=residual, missing=[*capture.missing, missing])
    by = fit(found[0], found[1])
    residual = by.residual_ns + max(pulsed.clock.residual_ns for pulsed in (begin, end) if pulsed)
    by = replace(by, residual_ns=residual)
    clocks = {"samples, moved from where Unix time puts them": by}
    return replace(capture, residual_ns=residual, columns={"counters": moved(counters, by)}, clocks=clocks)

"""What detectors look at: one variant of one bundle, each table read when it is first asked for."""

from functools import cached_property
from typing import Any

import numpy as np

from workbench.diagnose.accounting import Accounting, account, account_split
from workbench.diagnose.byte_model import ByteClass, byte_classes
from workbench.diagnose.columns import Columns, load_columns
from workbench.diagnose.counted_floor import counted_floor
from workbench.diagnose.device_split import Split
from workbench.diagnose.floor import Floor
from workbench.diagnose.host_use import HostUse, load_host_use
from workbench.diagnose.load_split import PROFILED, find_hardware, load_counters, load_split
from workbench.diagnose.replays import without_replays
from workbench.diagnose.settings import UNKNOWN, variant_settings
from workbench.diagnose.signals import LaneTime, StepCounters, lane_time
from workbench.diagnose.steps import Ints, RunPass, Steps, load_steps
from workbench.errors import InputError
from workbench.hardware import Hardware
from workbench.quantity import Quantity, Tag
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict, verdict

TRUSTED: tuple[RunPass, ...] = ("clean", "sampled", "laned", "traced")
"""Passes in the order in which their step times are believed: the fewer instruments, the more."""


_WHILE = {"traced": "profiled", "laned": "stamped"}


class Facts:
    """One variant of one bundle. ``judged``: the bundle's verdict, where the caller has it already.

    Raises InputError where the bundle has no such variant, or one of its tables is damaged.
    """

    def __init__(self, bundle: Bundle, variant: str, judged: Verdict | None = None) -> None:
        names = [record.name for record in bundle.manifest.variants]
        if variant not in names:
            raise InputError(f"{bundle.path}: no variant {variant!r}", hint=f"it holds {', '.join(names) or 'none'}")
        self.bundle = bundle
        self.variant = variant
        self._whole = judged
        self._steps: dict[RunPass, Steps] = {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of the variant; ``unknown`` for what did not survive (``diagnose.settings``)."""
        return variant_settings(self.bundle)[self.variant]

    @cached_property
    def bundle_verdict(self) -> Verdict:
        """The verdict on the whole bundle."""
        return self._whole or verdict(self.bundle)

    @cached_property
    def verdict(self) -> Verdict:
        """What may be said of this variant at all."""
        return self.bundle_verdict.of(self.variant)

    @property
    def ingested(self) -> bool:
        """Whether the bundle was made from a foreign trace: steps are traced ones, settings are not known."""
        return self.bundle.manifest.source != "run"

    def steps_of(self, run_pass: RunPass) -> Steps:
        """Return the steps of one pass, warm-up left out; none where there was no such pass."""
        if run_pass not in self._steps:
            self._steps[run_pass] = load_steps(self.bundle, self.variant, run_pass)
        return self._steps[run_pass]

    @cached_property
    def time_pass(self) -> RunPass:
        """The pass whose step times are trusted most: the first of TRUSTED that has steps."""
        return next((name for name in TRUSTED if len(self.steps_of(name))), "clean")

    @property
    def profiled(self) -> bool:
        """Whether the step times are those of profiled steps, for want of others."""
        return self.time_pass in PROFILED

    @property
    def steps(self) -> Steps:
        """The steps of ``time_pass``: what every rate is computed from."""
        return self.steps_of(self.time_pass)

    @property
    def traced(self) -> Steps:
        """The steps of the traced pass: their structure is trusted, their times are not."""
        return self.steps_of("traced")

    @cached_property
    def kernels(self) -> Columns:
        """What the device ran, by start."""
        return load_columns(self.bundle, "kernels", self.variant)

    @cached_property
    def host(self) -> Columns:
        """What host threads did, by start."""
        return load_columns(self.bundle, "host", self.variant)

    @cached_property
    def syncs(self) -> Columns:
        """Waits of host or streams, by start."""
        return load_columns(self.bundle, "syncs", self.variant)

    @cached_property
    def counters(self) -> Columns:
        """Counter samples, by start; those of the whole run included."""
        return self._counters[0]

    @cached_property
    def replays(self) -> Columns:
        """Medians over replays of single kernels (``diagnose.replays``)."""
        return self._counters[1]

    @cached_property
    def _counters(self) -> tuple[Columns, Columns]:
        return without_replays(load_columns(self.bundle, "counters", self.variant))

    @cached_property
    def lanes(self) -> Columns:
        """Spans inside persistent kernels, by start."""
        return load_columns(self.bundle, "lanes", self.variant)

    @cached_property
    def static(self) -> Columns:
        """Resources of compiled kernels; those of the whole run included."""
        return load_columns(self.bundle, "static", self.variant)

    @cached_property
    def limits(self) -> Columns:
        """What could not be measured."""
        return load_columns(self.bundle, "limits", self.variant)

    @cached_property
    def losses(self) -> Columns:
        """What instruments lost."""
        return load_columns(self.bundle, "losses", self.variant)

    @cached_property
    def byte_classes(self) -> tuple[ByteClass, ...]:
        """The byte model by tensor class."""
        return byte_classes(self.bundle, self.variant)

    @cached_property
    def device(self) -> str:
        """The device's name as in ``roofs`` and the manifest."""
        wanted = self.settings["engine"]["device"]
        return str(self.bundle.manifest.device.get("name", UNKNOWN)) if wanted in ("auto", UNKNOWN) else str(wanted)

    @cached_property
    def hardware(self) -> Hardware | None:
        """The description of the GPU, where its name is known."""
        return find_hardware(self.bundle)

    @property
    def on_cpu(self) -> bool:
        """Whether the steps run on the host itself: no device row, and no other device named."""
        return not len(self.kernels) and "cuda" not in self.device and not self.ingested

    @cached_property
    def host_use(self) -> HostUse | None:
        """What the scheduler gave the decoding thread in ``steps``; None where that was not recorded."""
        return load_host_use(self.bundle, self.variant, self.steps, on_cpu=self.on_cpu)

    @cached_property
    def own_wall(self) -> Ints:
        """Wall time of each of ``steps`` without what other work on the machine took of it, where that is recorded."""
        return self.steps.wall - self.host_use.taken if self.host_use else self.steps.wall

    @cached_property
    def split(self) -> Split | None:
        """Kernels and gaps of ``steps`` by evidence; None where no kernel was traced within a step."""
        return load_split(self.bundle, self.variant, self.steps, self.floor, self.time_pass, counted=self.counters_hold)

    @cached_property
    def step_counters(self) -> StepCounters:
        """Hardware counters over the steps of the pass they were read in."""
        return load_counters(self.bundle, self.variant, self.counters if self.counters_hold else None)

    @property
    def counters_hold(self) -> bool:
        """Whether the verdict lets hardware counters speak."""
        return self.verdict.allows("counters")

    @cached_property
    def lane_time(self) -> LaneTime | None:
        """How CTAs of a persistent kernel spent their time; None without stamps."""
        return lane_time(self.lanes)

    @cached_property
    def floor(self) -> Floor | None:
        """The byte model over the roof; None where the bundle lacks either."""
        return counted_floor(self.bundle, self.variant, self.device, self.steps, counted=self.counters_hold)

    @cached_property
    def accounting(self) -> Accounting:
        """Where the time of ``steps`` went."""
        return account_split(self.split) if self.split else account(self.bundle, self.variant, self.steps, self.floor)

    @cached_property
    def tokens(self) -> int | None:
        """Tokens that ``steps`` committed; None where a step does not say."""
        committed = self.steps.committed
        return int(committed.sum()) if len(committed) and (committed >= 0).all() else None

    @property
    def wall_ns(self) -> int:
        """Wall time of ``steps``."""
        return int(self.steps.wall.sum())

    @cached_property
    def tok_s(self) -> Quantity | None:
        """Committed tokens over step time; steps/s where a trace does not say what was committed; None without steps.

        Modelled where acceptance is simulated; estimated where only steps with an instrument on were recorded, which
        stretches them.
        """
        if not len(self.steps) or not self.wall_ns:
            return None
        stretched = self.time_pass not in ("clean", "sampled")
        traced = f", while {_WHILE[self.time_pass]}: a step without it is shorter" if stretched else ""
        tag: Tag = "estimated" if stretched else "measured"
        if self.tokens is None:
            return Quantity(len(self.steps) * 1e9 / self.wall_ns, "steps/s", tag, note=f"steps{traced}")
        simulated = self.settings["drafter"]["kind"] == "simulated"
        note = f"committed tokens over step time{traced}"
        return Quantity(self.tokens * 1e9 / self.wall_ns, "tok/s", "modelled" if simulated else tag, note=note)

    @cached_property
    def noise(self) -> float:
        """Relative half-width of the mean step time's 95 % interval. A loss below it cannot be told from chance."""
        return self.spread_of(self.steps.wall)

    @staticmethod
    def spread_of(times: Ints) -> float:
        """Return the relative half-width of the 95 % interval of the mean of ``times``: blocks of consecutive steps,
        bootstrapped. 1 where there are fewer than two steps."""
        wall = times.astype(np.float64)
        if len(wall) < 2 or not wall.any():
            return 1.0
        blocks = np.array([block.mean() for block in np.array_split(wall, min(20, len(wall)))])
        draws = np.random.default_rng(0).integers(0, len(blocks), (1000, len(blocks)))
        low, high = np.percentile(blocks[draws].mean(axis=1), [2.5, 97.5])
        return float((high - low) / 2 / wall.mean())

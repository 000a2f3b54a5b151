"""What one run carries along from pass to pass."""

from collections.abc import Callable
from dataclasses import dataclass, field

from workbench.decode.engine import StepRecord
from workbench.probes.protocol import Missing
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import ClockSource, Perturbation

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""

Place = tuple[str, int]
"""A step by the prompt it extends and its position in the sequence: comparable between passes."""


ID_COLUMNS = {"host_id": "host", "parent_id": "host", "kernel_id": "kernels"}
"""Columns that number rows within a capture, and the table whose rows they number."""


@dataclass(slots=True)
class Run:
    """The open bundle, and counters for ids that are unique in it.

    ``measured``: by variant, the clean steps that are not warm-up. ``walls``: by variant and pass, the wall time in ns
    of each step that is not warm-up; ``prefills``: likewise, of each prefill; ``recorded``: the instruments that ended
    well. ``ids``: rows so far of the tables that others refer to. ``missing``: by variant, None for the whole run.
    """

    writer: BundleWriter
    progress: Progress
    steps: int = 0
    sequences: int = 0
    ids: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ID_COLUMNS.values(), 0))
    clocks: list[ClockSource] = field(default_factory=list)
    measured: dict[str, list[StepRecord]] = field(default_factory=dict)
    walls: dict[tuple[str, str], dict[Place, list[int]]] = field(default_factory=dict)
    prefills: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    recorded: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    missing: dict[str | None, list[Missing]] = field(default_factory=dict)
    costs: list[Perturbation] = field(default_factory=list)

    def miss(self, variant: str | None, *missing: Missing) -> None:
        """Note what could not be measured of ``variant`` (None: of the whole run), each once."""
        known = self.missing.setdefault(variant, [])
        for one in missing:
            if one not in known:
                known.append(one)

    def state_cost(self, variant: str, instrument: str, clean_ns: int, with_ns: int) -> None:
        """State the median step without and with ``instrument``, both in this process."""
        cost = Perturbation(variant=variant, instrument=instrument, clean_step_ns=clean_ns, traced_step_ns=with_ns)
        self.costs.append(cost)

"""What an instrument is to the runner."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.trace.clocks import Fit

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that could not be measured: a row of the bundle's ``limits`` table, without its variant."""

    instrument: str
    what: str
    why: str
    fallback: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Capture:
    """What an instrument saw between start and stop.

    ``tables`` maps table names to rows in the bundle's schema, without the columns only the runner knows (variant,
    step, phase). Times are on the runner's clock: ``offset_ns`` was added to the instrument's own, and spans closer
    than ``residual_ns`` have no order. ``losses`` are rows of the table of that name without variant and probe.
    ``columns`` holds, by table name, what is too long to go row by row (an Arrow table for
    ``BundleWriter.append_table``), without the same columns. ``clocks``: how each clock of the instrument was placed,
    by its name, where it has several or drifts; else offset and residual say it. ``source``: what its rows name as
    theirs, where that is more than the instrument's name.
    """

    tables: Mapping[str, Rows]
    offset_ns: int = 0
    residual_ns: int = 0
    missing: Sequence[Missing] = field(default_factory=tuple)
    losses: Rows = field(default_factory=tuple)
    columns: Mapping[str, "pa.Table"] = field(default_factory=dict)
    clocks: Mapping[str, "Fit"] = field(default_factory=dict)
    source: str = ""


class Probe(Protocol):
    """One instrument. ``start`` and ``stop`` are called once each, around the traced steps."""

    @property
    def name(self) -> str:
        """The instrument's name in ``limits``, ``losses`` and the manifest."""

    def available(self) -> Missing | None:
        """Return why this instrument cannot run here, or None if it can."""

    def start(self) -> None:
        """Begin capturing."""

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Open a named span that shows in the capture."""

    def stop(self) -> Capture:
        """End capturing and return what was seen."""

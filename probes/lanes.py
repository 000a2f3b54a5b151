"""What each CTA of a persistent kernel did, from the stamps that the kernel itself takes of ``%globaltimer``."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workbench.errors import InputError
from workbench.probes.marker import Marker
from workbench.probes.protocol import Capture, Missing
from workbench.trace.clocks import Bracket, Fit

KINDS = ("task", "compute", "wait")

Stamps = npt.NDArray[np.int64]
"""[ctas, records, 3]: ``%globaltimer`` ns when a task may start, has its input ready, is done; 0: no such stamp."""


@dataclass(frozen=True, slots=True)
class LaneSource:
    """A kernel compiled with stamps. ``read`` copies those of the last launch to the host.

    ``tasks`` names each record in the order in which a CTA runs them. ``sms``: which SM each CTA runs on, from the
    stamps. ``facts``: columns of the kernel's row in table ``kernels`` (grid, block, registers, shared memory).
    """

    kernel: str
    tasks: Sequence[str]
    read: Callable[[], Stamps]
    sms: Callable[[Stamps], Stamps]
    facts: dict[str, int]


class LanesProbe:
    """Collects the stamps of at most ``keep`` launches, the latest ones; ``collect`` after each step."""

    name = "lanes"

    def __init__(self, source: LaneSource, marker: Marker | None, *, keep: int = 4) -> None:
        self._source, self._marker, self._keep = source, marker, keep
        self._begin: list[Bracket] = []
        self._stamps: list[Stamps] = []

    def available(self) -> Missing | None:
        """Needs the marker: without it ``%globaltimer`` cannot be placed."""
        if self._marker is None:
            why = "marker kernels do not run here, so the stamps' clock cannot be placed"
            return Missing(self.name, "in-kernel spans", why, fix="pip install triton")
        return None

    def start(self) -> None:
        """Tie the device's clock to ours."""
        assert self._marker is not None  # noqa: S101 - available() said so
        self._begin, self._stamps = self._marker.sync(), []

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Do nothing: the kernel does not see the host."""
        return nullcontext()

    def collect(self) -> None:
        """Keep the stamps of the step that has just ended; between steps, so that no step waits for the copy."""
        self._stamps = [*self._stamps, self._source.read()][-self._keep :]

    def stop(self) -> Capture:
        """Return tables ``lanes`` and ``kernels``: one kernel row a kept launch, from its first stamp to its last."""
        assert self._marker is not None  # noqa: S101 - available() said so
        if not self._stamps:
            raise InputError("lanes: no step ended between start and stop")
        clock = self._marker.clock(self._begin)
        clock = replace(clock, residual_ns=clock.residual_ns + max(tick_ns(stamps) for stamps in self._stamps))
        kernels, tables, lost = [], [], 0
        for number, stamps in enumerate(self._stamps):
            table, dropped = lane_table(stamps, self._source, clock, number)
            lost += dropped
            if table.num_rows:
                tables.append(table)
                kernels.append(self._kernel_row(number, table))
        losses = [_loss("stamps-missing", lost, "tasks whose stamps are missing or out of order")] if lost else []
        return Capture(
            {"kernels": kernels},
            offset_ns=clock.offset_ns,
            residual_ns=clock.residual_ns,
            losses=losses,
            columns={"lanes": pa.concat_tables(tables)} if tables else {},
            clocks={"device": clock},
        )

    def _kernel_row(self, number: int, lanes: pa.Table) -> dict[str, Any]:
        return {
            "kernel_id": number,
            "name": self._source.kernel,
            "kind": "kernel",
            "stream": 0,
            "start_ns": int(lanes.column("start_ns").to_numpy().min()),
            "end_ns": int(lanes.column("end_ns").to_numpy().max()),
            **self._source.facts,
        }


def tick_ns(stamps: Stamps) -> int:
    """Return the step in which the stamps' clock counts, as their starts and ends show it: 32 ns on an H200."""
    times = stamps[:, :, ::2][stamps[:, :, ::2] > 0].astype(np.int64)  # the middle one may hold an SM's number
    return int(np.gcd.reduce(times - times.min())) if len(times) else 0


def lane_table(stamps: Stamps, source: LaneSource, clock: Fit, kernel_id: int) -> tuple[pa.Table, int]:
    """Return rows of ``lanes`` of one launch by start, and how many tasks were dropped for want of good stamps.

    A task is a span of kind ``task``; the part of it after its input was ready is ``compute`` where the kernel tells
    them apart; from the end of a task to the start of the next the CTA waits (``wait``, named after the next task).
    """
    records = stamps.shape[1]
    if records != len(source.tasks):
        raise InputError(f"lanes: {records} records for {len(source.tasks)} tasks")
    sms = source.sms(stamps)
    start, ready, done = (stamps[:, :, edge] for edge in range(3))
    good = (start > 0) & (done >= start)
    told = good & (ready > start) & (ready <= done)
    waits = good[:, 1:] & good[:, :-1] & (start[:, 1:] > done[:, :-1])
    parts = []
    for kind, mask, begins, ends, first in (
        ("task", good, start, done, 0),
        ("compute", told, ready, done, 0),
        ("wait", waits, done[:, :-1], start[:, 1:], 1),
    ):
        cta, record = np.nonzero(mask)
        parts.append(
            (cta, record + first, begins[cta, record], ends[cta, record], np.full(len(cta), KINDS.index(kind)))
        )
    cta, record, begin, end, kind_code = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((-end, begin))
    cta, record, kind_code = cta[order], record[order], kind_code[order]
    table = pa.table(
        {
            "kernel_id": pa.array(np.full(len(cta), kernel_id, np.int64)),
            "sm": pa.array(sms[cta], pa.int32()),
            "cta": pa.array(cta, pa.int32()),
            "task": pa.array(source.tasks).take(pa.array(record)),
            "kind": pa.array(KINDS).take(pa.array(kind_code)),
            "start_ns": pa.array(clock.place_all(begin[order])),
            "end_ns": pa.array(clock.place_all(end[order])),
        }
    )
    return table, int((~good).sum())


def _loss(kind: str, count: int, detail: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "count": count,
        "first_ns": None,
        "last_ns": None,
        "severity": "data_loss",
        "detail": detail,
    }

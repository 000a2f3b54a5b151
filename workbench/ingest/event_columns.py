"""Fields of events as int64 columns, with everything that does not fit counted in the losses."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from workbench.ingest.columns import Ints, Names
from workbench.ingest.kineto_events import (
    EXACT_BELOW_US,
    MAX_NS,
    MISSING,
    NO_SIZE,
    Args,
    Event,
    ExactEvent,
    microseconds_to_ns,
)
from workbench.ingest.losses import Losses, Severity

Events = Sequence[Event | ExactEvent]


class EventColumns:
    """Turns fields of events into columns. ``names`` and ``threads`` number what is text."""

    def __init__(self, losses: Losses) -> None:
        self.names = Names()
        self.threads = Names()
        self._losses = losses

    def common(self, events: Events, what: str, severity: Severity) -> dict[str, Any]:
        """Return name, start and end of each event, and which rows are usable."""
        start, known = self.nanoseconds(list(map(attrgetter("ts"), events)))
        duration, given = self.nanoseconds(list(map(attrgetter("dur"), events)))
        self._lose("no-start", "data_loss", f"{what} without a usable ts", int((~known).sum()))
        self._lose("no-duration", severity, f"{what} without a usable dur: kept with length 0", int((~given).sum()))
        negative = duration < 0
        self._lose("negative-duration", "data_loss", f"{what}: kept with length 0", int(negative.sum()))
        duration[negative] = 0
        names = self.names.codes(map(attrgetter("name"), events), len(events))
        return {"name": names, "start": start, "end": start + duration, "usable": known}

    def nanoseconds(self, values: list[Any]) -> tuple[Ints, Any]:
        """Return microseconds in ns, and which of them are numbers; the others are 0."""
        kinds = set(map(type, values))
        if kinds == {float}:
            floats = np.array(values, np.float64)
            good = np.abs(floats) < MAX_NS / 1000
            rounded = int((good & (np.abs(floats) >= EXACT_BELOW_US)).sum())
            self._lose("time-rounded", "info", "times beyond the precision of a float64: off by up to 1 us", rounded)
            return np.rint(np.where(good, floats, 0) * 1000).astype(np.int64), good
        if kinds == {int}:
            try:
                ints = np.array(values, np.int64)
            except OverflowError:
                ints = None
            if ints is not None and -MAX_NS // 1000 < ints.min() <= ints.max() < MAX_NS // 1000:
                return ints * 1000, np.ones(len(ints), bool)
        exact = [_nanoseconds(value) for value in values]
        good = np.array([value is not None for value in exact], bool)
        return np.array([value or 0 for value in exact], np.int64), good

    def integers(self, args: list[Args], names: Sequence[str]) -> dict[str, Ints]:
        """Return integer fields of ``args`` as columns."""
        try:
            # One pass over the objects for all fields: this is where reading a large trace spends its time.
            rows = map(attrgetter(*names), args)
            flat = chain.from_iterable(rows) if len(names) > 1 else rows
            table = np.fromiter(flat, np.int64, len(args) * len(names)).reshape(-1, len(names))
        except OverflowError:
            return {name: self.ints([getattr(arg, name) for arg in args]) for name in names}
        return {name: np.ascontiguousarray(table[:, column]) for column, name in enumerate(names)}

    def sizes(self, args: list[Args], side: str) -> dict[str, Ints]:
        """Return grid or block sizes as three columns."""
        found = list(map(attrgetter(side), args))
        if str in set(map(type, found)):
            wrong = sum(type(size) is str for size in found)
            self._lose("unusable-field", "data_loss", f"device rows whose {side} is text", wrong)
            found = [NO_SIZE if type(size) is str else size for size in found]
        try:
            table = np.fromiter(chain.from_iterable(found), np.int64, 3 * len(found))
        except OverflowError:
            table = self.ints(list(chain.from_iterable(found)))
        table = table.reshape(-1, 3)
        return {f"{side}_{letter}": self.small(table[:, axis]) for axis, letter in enumerate("xyz")}

    def ints(self, values: list[int]) -> Ints:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            fits = [value if -(1 << 63) < value < 1 << 63 else MISSING for value in values]
            outside = sum(value != kept for value, kept in zip(values, fits, strict=True))
            self._lose("integer-out-of-range", "data_loss", "integers beyond 64 bits: left out", outside)
            return np.array(fits, np.int64)

    @staticmethod
    def absent(count: int) -> Ints:
        return np.full(count, MISSING, np.int64)

    def small(self, values: Ints) -> Ints:
        """Return ``values`` without those that do not fit int32."""
        outside = (values != MISSING) & ((values < -(1 << 31)) | (values >= 1 << 31))
        self._lose("integer-out-of-range", "data_loss", "integers beyond 32 bits: left out", int(outside.sum()))
        return np.where(outside, MISSING, values)

    def or_else(self, values: Ints, fallback: list[int | str], otherwise: int) -> Ints:
        """Return ``values``, those that are missing taken from ``fallback``: pid and tid hold them as well."""
        absent = values == MISSING
        return np.where(absent, self.thread_ids(fallback, otherwise), values) if absent.any() else values

    def thread_ids(self, ids: list[int | str], otherwise: int = 0) -> Ints:
        """Return ids as integers; those written as text get negative numbers, absent ones are ``otherwise``."""
        if str in set(map(type, ids)):
            ids = [-1 - self.threads[one] if isinstance(one, str) else one for one in ids]
        numbers = self.ints(ids)  # type: ignore[arg-type]
        return np.where(numbers == MISSING, otherwise, numbers)

    def _lose(self, kind: str, severity: Severity, detail: str, count: int) -> None:
        self._losses.add(kind, severity, detail, count=count)


def _nanoseconds(value: Any) -> int | None:
    if value is None:
        return None
    return microseconds_to_ns(bytes(value) if isinstance(value, msgspec.Raw) else repr(value).encode())

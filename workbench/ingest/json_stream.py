"""The events of a Chrome trace, chunk by chunk, in bounded memory; whatever is damaged costs itself and nothing else.

A chunk ends at the last place that looks like the border of two events. If it then decodes as a list of events, that
place was a border, for JSON gives no two readings. If it does not, its events are taken one by one: a border is tried,
then brackets are counted, then repairs, and what stays unreadable is counted in the losses.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from workbench.errors import InputError
from workbench.ingest.json_repair import TOKENS, repair
from workbench.ingest.losses import Losses, Severity

CHUNK_BYTES = 4 << 20
MAX_EVENT_BYTES = 4 << 20
"""Larger events are dropped: a kernel's takes 1 kB."""

MAX_SURE_REPAIRS = 4
"""Repairs of one kind, in one event, up to which its meaning is taken as plain."""

MAX_HEADER_BYTES = 64 << 20
"""Most that may stand before the events, or after them."""

T = TypeVar("T")

_BORDER = re.compile(rb'\}\s*+,\s*+(?=\{\s*+")')
# Where reading can start again after a damaged event: what follows the border opens like an event.
_RESYNC = re.compile(rb'\}\s*+,?\s*+(?=\{\s*+"(?:ph|name|cat|args|bp|pid|tid|ts|dur|id|s)"\s*+:)')
_EVENTS = re.compile(rb'"traceEvents"\s*+:\s*+\[')
_ARRAY_OF_EVENTS = re.compile(rb'\[\s*+\{\s*+"(?:ph|name|cat|args|bp)"\s*+:')
# Behind damage: the next event, or the end of the list.
_EVENT_OPENS = re.compile(
    rb'\{(?=\s*+"(?:ph|name|cat|args|bp|pid|tid|ts|dur|id|s)"\s*+:)|\}\s*+\](?=\s*+(?:,\s*+"|\}\s*+\Z))'
)
_EVENT_START = re.compile(rb'\{\s*+"ph"\s*+:')
_FILL = re.compile(rb"[\s,]*+")
_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?\s*+([{\[])")
_AFTER_ARRAY = re.compile(rb'\]\s*+(?:,\s*+(?:"|\Z)|\}|\Z)')
_TAIL = 1 << 16

DAMAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError)
"""What decoding damaged bytes raises."""


class EventReader(Generic[T]):
    """Reads the events of one trace. After ``chunks`` is exhausted, ``header`` holds the other members' JSON.

    ``decode_list`` decodes a JSON array of events, and raises one of DAMAGE where one does not fit; ``decode_one``
    decodes a single event that it refused, more leniently.
    """

    def __init__(
        self,
        blocks: Iterator[bytes],
        losses: Losses,
        decode_list: Callable[[bytes], Sequence[T]],
        decode_one: Callable[[bytes], T],
        *,
        name: str,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.header: dict[str, msgspec.Raw] = {}
        self.events = 0
        self._blocks = blocks
        self._losses = losses
        self._decode_list = decode_list
        self._decode_one = decode_one
        self._name = name
        self._chunk_bytes = chunk_bytes
        self._ended = False
        self._scanned, self._consumed = 0, 0

    def chunks(self) -> Iterator[Sequence[T]]:
        """Yield the events, a chunk at a time. Raises InputError where the file holds no list of events."""
        data, final = self._find_events()
        while not self._ended:
            while len(data) < self._chunk_bytes and not final:
                block = next(self._blocks, b"")
                final = not block
                data += block
            border = _last_border(data)
            if border:
                fill = _FILL.match(data)
                events = self._whole(data[fill.end() if fill else 0 : border[0]])
                if events is not None:
                    self._consumed += border[1]
                    data = data[border[1] :]
                    yield events
                    continue
            events, used = self._one_by_one(data, final=final)
            self._consumed += used
            data = data[used:]
            yield events
            if final and not self._ended:
                break
            if not used and not final and not self._ended:
                data, final = self._grow(data)
        self._read_members(data)

    def _find_events(self) -> tuple[bytes, bool]:
        """Read up to the first event; return what follows the array's bracket, and whether the file ends there."""
        data, final, searched = b"", False, 0
        while not final and len(data) <= MAX_HEADER_BYTES:
            block = next(self._blocks, b"")
            final = not block
            data += block
            opening = _OPENING.match(data)
            if opening and opening[1] == b"[":
                return data[opening.end() :], final
            if not opening and data.strip():
                break
            found = _EVENTS.search(data, max(0, searched - 256))
            searched = len(data)
            if found:
                return self._start(data, found.start(), found.end()), final
        found = _ARRAY_OF_EVENTS.search(data) if _OPENING.match(data) else None
        if found:  # the member's name is damaged
            return self._start(data, found.start(), found.start() + 1), final
        raise InputError(
            f"{self._name}: not a torch.profiler trace (no traceEvents in it)",
            hint="name the .json or .json.gz that export_chrome_trace wrote",
        )

    def _start(self, data: bytes, members_end: int, events_start: int) -> bytes:
        members = data[data.index(b"{") : members_end].strip().rstrip(b",")
        self._parse_members(members + b"}")
        return data[events_start:]

    def _whole(self, text: bytes) -> Sequence[T] | None:
        try:
            _require_utf8(text)
            events = self._decode_list(b"[" + text + b"]")
        except DAMAGE:
            return None
        self.events += len(events)
        return events

    def _one_by_one(self, data: bytes, *, final: bool) -> tuple[list[T], int]:
        """Return the events of ``data`` one at a time, and how many bytes were used; the rest needs more bytes."""
        events: list[T] = []
        borders, starts = _Ahead(_BORDER, data), _Ahead(_RESYNC, data)
        at = 0
        while True:
            fill = _FILL.match(data, at)
            at = fill.end() if fill else at
            if at >= len(data):
                break
            if data[at] == 0x5D:  # ]
                if not final and len(data) - at < 256:
                    break
                if _AFTER_ARRAY.match(data, at):
                    self._ended = True
                    at += 1
                    break
            if data[at] != 0x7B:  # {
                found = _EVENT_OPENS.search(data, at)
                # An event's first key may lie beyond the data.
                start = found.end() - 1 if found else len(data) if final else max(at, len(data) - 256)
                if start == at:
                    break
                self._lose("unreadable-bytes", f"{start - at} bytes between events: {data[at : at + 40]!r}")
                at = start
                continue
            end, event = self._next(data, at, borders.after(at), starts.after(at + 1), final=final)
            if end is None:
                break
            if event is not None:
                events.append(event)
            at = end
        self.events += len(events)
        return events, at

    def _next(
        self, data: bytes, at: int, border: int | None, start_again: int | None, *, final: bool
    ) -> tuple[int | None, T | None]:
        """Return where the event at ``at`` ends, and the event if it can be read; (None, None): more bytes needed.

        ``border``: where the next border of two events seems to be, ``start_again`` where one before a likely event.
        """
        if border is not None:
            event = self._try(data[at:border])
            if event is not None:
                return border, event
        closed, complete = self._closing_bracket(data, at, start_again)
        if closed is not None:
            event = self._try(data[at:closed])
            if event is not None:
                return closed, event
        elif not complete and not final and len(data) - at < MAX_EVENT_BYTES:
            return None, None
        for end in sorted({end for end in (closed, start_again, border) if end is not None}):
            event = self._repaired(data[at:end])
            if event is not None:
                return end, event
        return self._give_up(data, at, start_again, closed, final=final)

    def _give_up(
        self, data: bytes, at: int, resync: int | None, closed: int | None, *, final: bool
    ) -> tuple[int, None]:
        """Count an unreadable event and return where to go on."""
        # Behind an odd quote the brackets mean nothing, so the next event's start is the better guess.
        end = resync if resync is not None else closed
        if end is None and final:
            self._lose("truncated-event", f"the file ends inside an event: {data[at : at + 60]!r}")
            return len(data), None
        if end is None:
            end = min(len(data), at + MAX_EVENT_BYTES)
        text = data[at:end]
        detail = f"{len(text)} bytes, {self._reason(text)}: {text[:60]!r}"
        self._lose("unreadable-event", detail, count=max(1, len(_EVENT_START.findall(text))))
        return end, None

    def _closing_bracket(self, data: bytes, at: int, start_again: int | None) -> tuple[int | None, bool]:
        """Return where the brackets opened at ``at`` are closed, and whether the answer is final.

        Brackets are followed beyond ``start_again``, where the next event seems to start, only as long as this stays in
        proportion to the file: damage can make each event seem to reach to the end.
        """
        far = self._scanned <= 4 * (self._consumed + at) + (16 << 20)
        limit = min(len(data), at + MAX_EVENT_BYTES)
        if not far:
            limit = min(limit, at + _TAIL if start_again is None else start_again)
        depth = 0
        for token in TOKENS.finditer(data, at, limit):
            byte = data[token.start()]
            if byte in b"{[":
                depth += 1
            elif byte in b"}]":
                depth -= 1
                if depth == 0:
                    self._scanned += token.end() - at
                    return token.end(), True
        self._scanned += limit - at
        return None, limit < len(data)

    def _try(self, text: bytes) -> T | None:
        try:
            _require_utf8(text)
            return self._decode_one(text)
        except DAMAGE:
            return None

    def _repaired(self, text: bytes) -> T | None:
        fixed, kinds = repair(text)
        if not kinds:
            return None
        event = self._try(fixed)
        if event is not None:
            for kind, count in kinds.items():
                # A string that needs many repairs may have swallowed what followed it.
                severity: Severity = "info" if count <= MAX_SURE_REPAIRS else "data_loss"
                self._losses.add(f"repaired-{kind}", severity, f"in {text[:80]!r}")
        return event

    def _reason(self, text: bytes) -> str:
        try:
            _require_utf8(text)
            self._decode_one(text)
        except DAMAGE as error:
            return str(error)[:120]
        return "not an event"

    def _lose(self, kind: str, detail: str, *, count: int = 1) -> None:
        self._losses.add(kind, "data_loss", detail[:300], count=count)

    def _grow(self, data: bytes) -> tuple[bytes, bool]:
        """Read on where not one event was complete in a whole chunk."""
        parts, size = [data], 0
        while size < self._chunk_bytes:
            block = next(self._blocks, b"")
            if not block:
                return b"".join(parts), True
            parts.append(block)
            size += len(block)
        return b"".join(parts), False

    def _read_members(self, data: bytes) -> None:
        """Read what follows the array of events to the end of the file."""
        if not self._ended:
            self._losses.add("truncated", "data_loss", "the file ends inside its list of events")
            return
        parts, size, left_out = [data], len(data), 0
        for block in self._blocks:
            size += len(block)
            if size > MAX_HEADER_BYTES:
                left_out += len(block)
            else:
                parts.append(block)
        rest = b"".join(parts)
        if left_out:
            self._lose("members-left-out", f"{left_out} bytes after the events were not read")
        if hidden := len(_EVENT_START.findall(rest)):
            self._losses.add(
                "events-after-the-end", "data_loss", "events stand after the end of their list", count=hidden
            )
        text = rest.strip().lstrip(b",").strip()
        if text not in (b"", b"}"):
            self._parse_members(b"{" + text)

    def _parse_members(self, text: bytes) -> None:
        for candidate in (text, text + b"}", repair(text)[0]):
            try:
                self.header |= msgspec.json.decode(candidate, type=dict[str, msgspec.Raw])
                return
            except DAMAGE:
                continue
        self._losses.add("header-damaged", "data_loss", f"members beside the events: {text[:60]!r}")


class _Ahead:
    """Where a border comes next: each stretch of the data is searched once, however often this is asked."""

    def __init__(self, pattern: re.Pattern[bytes], data: bytes) -> None:
        self._pattern = pattern
        self._data = data
        self._next: int | None = 0

    def after(self, at: int) -> int | None:
        """Return the end of the bracket of the first border at or after ``at``; None beyond MAX_EVENT_BYTES."""
        if self._next is not None and self._next <= at:
            found = self._pattern.search(self._data, at)
            self._next = found.start() + 1 if found else None
        return self._next if self._next is not None and self._next <= at + MAX_EVENT_BYTES else None


def _require_utf8(text: bytes) -> None:
    """Raise UnicodeDecodeError where ``text`` is not UTF-8: the decoder does not look into what it skips."""
    if not text.isascii():
        text.decode("utf-8")


def _last_border(data: bytes) -> tuple[int, int] | None:
    """Return where the last border of two events in ``data`` starts (after the bracket) and ends."""
    for start in (max(0, len(data) - _TAIL), 0):
        last = deque(_BORDER.finditer(data, start), maxlen=1)
        if last:
            return last[0].start() + 1, last[0].end()
    return None

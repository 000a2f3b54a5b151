"""One event of a Kineto trace: the fields that are needed, decoded strictly, or leniently where that fails.

Field names are those of pytorch/kineto's output_json.cpp. Integers that a trace leaves out are MISSING.
"""

from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

MISSING = -(1 << 63)
"""Stands for an absent integer: no id or count of a trace takes this value."""

MAX_NS = 1 << 61
"""Times are refused beyond this (the year 2043): their sums would not fit int64."""

EXACT_BELOW_US = float(1 << 43)
"""Below this many microseconds, a decimal number of up to three places keeps its nanosecond as a float64.

The float is off by at most 2**-11 us, so 1000 times it is off by less than half a nanosecond; the product is below
2**53 and rounds to the right integer. Kineto counts from a base of at most three months ago, which is below; traces
without baseTimeNanoseconds count from 1970 and are not.
"""

ABSENT = Raw(b"")
"""Stands for an absent number."""

NO_SIZE = (MISSING, MISSING, MISSING)
"""Stands for an absent grid or block."""


class Occupancy(Struct, gc=False):
    """What newer versions work out for a kernel's launch."""

    blocks: int = field(name="activeBlocksPerMultiprocessor", default=MISSING)


class Args(Struct, gc=False):
    """Arguments of an event that a table has a column for.

    Text where a number belongs is decoded too: launches of Triton and HIP, as host rows, have such fields.
    """

    correlation: int = MISSING
    device: int = MISSING
    stream: int = MISSING
    graph_id: int = field(name="graph id", default=MISSING)
    graph_node: int = field(name="graph node id", default=MISSING)
    grid: tuple[int, int, int] | str = NO_SIZE
    block: tuple[int, int, int] | str = NO_SIZE
    registers: int = field(name="registers per thread", default=MISSING)
    shared: int = field(name="shared memory", default=MISSING)
    bytes: int | str = MISSING
    occupancy: Occupancy | None = None
    sync_kind: str = field(name="cuda_sync_kind", default="")


class Event(Struct, gc=False):
    """An event whose times are microseconds: an int where they are written without a point, else a float64."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = MISSING
    tid: int | str = MISSING
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args | None = None


class ExactEvent(Struct, gc=False):
    """An event whose times are kept as written, empty where absent. ``issues`` names fields of a wrong type."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = MISSING
    tid: int | str = MISSING
    ts: Raw = ABSENT
    dur: Raw = ABSENT
    args: Args | None = None
    issues: tuple[str, ...] = ()


class CounterEvent(Struct, gc=False):
    """An event with all of its arguments: the counters' names are the arguments' names."""

    ph: str = ""
    name: str = ""
    pid: int | str = MISSING
    ts: Raw = ABSENT
    args: Any = None


_EVENT = msgspec.json.Decoder(Event)
_EXACT = msgspec.json.Decoder(ExactEvent)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
decode_events = msgspec.json.Decoder(list[Event]).decode
decode_exact_events = msgspec.json.Decoder(list[ExactEvent]).decode
decode_counters = msgspec.json.Decoder(list[CounterEvent]).decode

_ARG_FIELDS = {entry.encode_name: entry for entry in msgspec.structs.fields(Args)}


def decode_event(text: bytes) -> ExactEvent:
    """Decode one event; fields of a wrong type are left out and named in ``issues``.

    Raises msgspec.MsgspecError where ``text`` is not a JSON object.
    """
    try:
        return _EXACT.decode(text)
    except msgspec.ValidationError:
        return _lenient(_FIELDS.decode(text))


def _lenient(fields: dict[str, Raw]) -> ExactEvent:
    issues: list[str] = []
    event = ExactEvent(ts=fields.get("ts", ABSENT), dur=fields.get("dur", ABSENT))
    for name in ("ph", "cat", "name"):
        if name in fields and (text := _convert(fields[name], str)) is not None:
            setattr(event, name, text)
        elif name in fields:
            issues.append(name)
    for name in ("pid", "tid"):
        if name in fields and (number := _convert(fields[name], int | str)) is not None:
            setattr(event, name, number)
        elif name in fields:
            issues.append(name)
    if "args" in fields:
        values = _convert(fields["args"], dict[str, Raw])
        if values is None:
            issues.append("args")
        else:
            event.args = _lenient_args(values, issues)
    event.issues = tuple(issues)
    return event


def _lenient_args(values: dict[str, Raw], issues: list[str]) -> Args:
    args = Args()
    for name in _ARG_FIELDS.keys() & values.keys():
        entry = _ARG_FIELDS[name]
        value = _convert(values[name], entry.type)
        if value is None and entry.type is int:
            value = _integer(values[name])
        if value is not None:
            setattr(args, entry.name, value)
        elif bytes(values[name]) != b"null":
            issues.append(name)
    return args


def _convert(raw: Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _integer(raw: Raw) -> int | None:
    """Return the integer that ``raw`` writes as a string or as a number with a point."""
    try:
        number = _number(bytes(raw))
    except InvalidOperation:
        return None
    whole = number.is_finite() and number.adjusted() < 19 and number == number.to_integral_value()
    return int(number) if whole else None


def microseconds_to_ns(text: bytes) -> int | None:
    """Return the nanoseconds in a JSON number of microseconds, rounded half to even; None where it is no such number.

    No float comes in between. A number within a string counts.
    """
    whole, _, places = text.partition(b".")
    if whole.isdigit() and len(places) <= 3 and len(whole) < 17 and (places.isdigit() or not places):
        value = int(whole) * 1000 + int(places.ljust(3, b"0"))
        return value if value <= MAX_NS else None
    try:
        number = _number(text)
    except InvalidOperation:
        return None
    if not number.is_finite() or number.adjusted() > 16:
        return None
    value = int((number * 1000).to_integral_value())
    return value if abs(value) <= MAX_NS else None


def _number(text: bytes) -> Decimal:
    if len(text) > 400:  # no time takes that many digits, and the conversion is quadratic
        raise InvalidOperation
    return Decimal(text.strip(b'"').decode("ascii", "replace"))

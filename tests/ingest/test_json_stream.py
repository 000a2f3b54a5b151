import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.ingest.json_stream import EventReader
from workbench.ingest.losses import Losses

Event = dict[str, Any]

DECODE_LIST = msgspec.json.Decoder(list[Event]).decode
DECODE_ONE = msgspec.json.Decoder(Event).decode

NESTED = {"ph": "X", "name": "n", "args": {"list": [{"a": 1}, {"b": [{"c": 2}, {"ph": 3}]}], "text": '},{"ph":"X"'}}


def blocks(text: bytes, size: int) -> Iterator[bytes]:
    for first in range(0, len(text), size):
        yield text[first : first + size]


def read(text: bytes, *, block: int = 1 << 20, chunk: int = 1 << 20) -> tuple[list[Event], Losses, EventReader[Event]]:
    losses = Losses("kineto")
    reader = EventReader(blocks(text, block), losses, DECODE_LIST, DECODE_ONE, name="t.json", chunk_bytes=chunk)
    return [event for events in reader.chunks() for event in events], losses, reader


def simple(count: int) -> list[Event]:
    return [{"ph": "X", "name": f"k{i}", "ts": i, "args": {"grid": [1, 1, 1]}} for i in range(count)]


def trace(events: list[Event], **header: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, **header, "traceEvents": events, "traceName": "x"}).encode()


EVENTS = st.lists(
    st.fixed_dictionaries(
        {"ph": st.just("X"), "name": st.text(max_size=8) | st.sampled_from(['},{"ph":"X"', "]", "}", "},{", '"}],{"'])},
        optional={"args": st.recursive(st.integers(0, 9), lambda x: st.lists(x, max_size=3) | st.dictionaries(
            st.sampled_from(["ph", "a"]), x, max_size=2), max_leaves=8)},
    ),
    max_size=12,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(EVENTS, st.integers(1, 60), st.integers(1, 200), st.sampled_from([None, 2]))
def test_every_event_comes_once_whatever_the_block_and_chunk_sizes(
    events: list[Event], block: int, chunk: int, indent: int | None
) -> None:
    text = json.dumps({"a": [{"b": 1}, {"c": 2}], "traceEvents": events, "z": [{"y": 1}, {"x": 2}]}, indent=indent)
    found, losses, reader = read(text.encode(), block=block, chunk=chunk)
    assert found == events
    assert [row for row in losses.rows() if row["severity"] != "info"] == []
    assert reader.events == len(events)
    assert {key: msgspec.json.decode(raw) for key, raw in reader.header.items()} == {
        "a": [{"b": 1}, {"c": 2}],
        "z": [{"y": 1}, {"x": 2}],
    }


@settings(deadline=None)
@given(st.integers(0, 20), st.data())
def test_a_cut_trace_gives_every_complete_event(count: int, data: st.DataObject) -> None:
    text = trace(simple(count))
    start = text.index(b'"traceEvents"') + len('"traceEvents": [')
    cut = data.draw(st.integers(start, len(text)))
    found, losses, _ = read(text[:cut], block=37, chunk=150)
    ends = [text.index(f'"k{i}"'.encode()) for i in range(count)]
    ends = [text.index(b"}}", end) + 2 for end in ends]
    assert found == simple(sum(end <= cut for end in ends))
    complete = text.index(b"]", ends[-1]) if ends else text.index(b"[]") + 1
    assert bool(losses.count("truncated")) == (cut <= complete)
    inside = any(text.index(f'"k{i}"'.encode()) < cut < ends[i] for i in range(count))
    assert not inside or losses.count("truncated-event") == 1


def test_the_array_alone_is_a_trace_too() -> None:
    assert read(json.dumps(simple(3)).encode())[0] == simple(3)
    assert read(b"\xef\xbb\xbf [" + b",\n".join(json.dumps(e).encode() for e in simple(3)))[0] == simple(3)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello",
        b"\x00\x01\x02",
        b"<html>",
        b"{}",
        b'{"a": 1}',
        b'{"traceEvents": null}',
        b'{"traceEvents": {"a": 1}}',
        b'{"log": "\\"traceEvents\\": ["}',
        b'"traceEvents": [',
        b"3",
    ],
)
def test_what_is_no_trace_gets_one_line(text: bytes) -> None:
    with pytest.raises(InputError, match=r"t\.json: not a torch\.profiler trace \(no traceEvents in it\); name the"):
        read(text)


@pytest.mark.parametrize(
    ("old", "new", "kept", "kind"),
    [
        (b'"k5"', b'"k\x015"', 10, "repaired-control-characters"),
        (b'"ts": 5', b'"ts": NaN', 10, "repaired-not-a-number"),
        (b'"k5"', b'"k"5', 9, "unreadable-event"),
        (b'"k5"', b'"k"5"', 10, "repaired-quotes"),
        (b'"k5"', b'k5"', 9, "unreadable-event"),
        (b'"k5"', b'"k5', 9, "unreadable-event"),
        (b'"ts": 5, "args": {', b'"ts": 5, "args": ', 9, "unreadable-event"),
        (b'{"ph": "X", "name": "k5"', b'"ph": "X", "name": "k5"', 9, "unreadable-bytes"),
        (b'}}, {"ph": "X", "name": "k5"', b'}, {"ph": "X", "name": "k5"', 9, "unreadable-event"),
        (b'}}, {"ph": "X", "name": "k5"', b'}}] {"ph": "X", "name": "k5"', 10, "unreadable-bytes"),
        (b'}}, {"ph": "X", "name": "k5"', b'}}, log line {"ph": "X", "name": "k5"', 10, "unreadable-bytes"),
        (b'}}, {"ph": "X", "name": "k5"', b"}}, " + bytes(64) + b' {"ph": "X", "name": "k5"', 10, "unreadable-bytes"),
        (b'}}, {"ph": "X", "name": "k5"', b'}}, null, {"ph": "X", "name": "k5"', 10, "unreadable-bytes"),
    ],
)
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_damage_costs_itself_and_nothing_else(old: bytes, new: bytes, kept: int, kind: str, chunk: int) -> None:
    text = trace(simple(10))
    assert old in text
    found, losses, _ = read(text.replace(old, new, 1), block=64, chunk=chunk)
    assert len(found) == kept
    assert losses.count(kind) >= 1
    assert {event["name"] for event in found} >= {f"k{i}" for i in range(10) if i not in (4, 5)}


def test_a_missing_comma_between_events_loses_nothing() -> None:
    text = trace(simple(4)).replace(b'}}, {"ph": "X", "name": "k2"', b'}} {"ph": "X", "name": "k2"')
    assert read(text)[0] == simple(4)


def test_an_array_of_objects_within_an_event_is_no_border() -> None:
    events = [NESTED, *simple(3), NESTED]
    for chunk in (20, 90, 1 << 20):
        found, losses, _ = read(trace(events), block=16, chunk=chunk)
        assert found == events
        assert losses.rows() == []


def test_events_deeper_than_the_stack_are_lost_alone() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    text = trace(simple(3)).replace(b'"ts": 1', b'"ts": 1, "deep": ' + deep)
    found, losses, _ = read(text)
    assert [event["name"] for event in found] == ["k0", "k2"]
    assert losses.count("unreadable-event") == 1


def test_an_endless_string_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.ingest.json_stream.MAX_EVENT_BYTES", 10_000)
    text = trace(simple(3)).replace(b'"k1"', b'"' + b"x" * 50_000 + b'"')
    found, losses, _ = read(text, block=1000, chunk=2000)
    assert [event["name"] for event in found] == ["k0", "k2"]
    assert losses.count("unreadable-event") >= 1


def test_events_after_the_end_of_their_list_are_counted() -> None:
    text = trace(simple(2)) + trace(simple(5))
    found, losses, _ = read(text)
    assert found == simple(2)
    assert losses.count("events-after-the-end") == 5


def test_a_damaged_header_costs_the_header() -> None:
    text = trace(simple(2), name="x").replace(b'"schemaVersion": 1', b'"schemaVersion": ')
    found, losses, reader = read(text)
    assert found == simple(2)
    assert losses.count("header-damaged") == 1
    assert list(reader.header) == ["traceName"]


def test_a_damaged_member_name_is_found_by_its_content() -> None:
    found, losses, _ = read(trace(simple(2)).replace(b"traceEvents", b"traceEvfnts"))
    assert found == simple(2)
    assert losses.count("header-damaged") == 1


@pytest.mark.parametrize("filler", [b"\x00", b"\xff"])
@pytest.mark.parametrize("place", [b'k1"', b'name": "k1"'])
def test_a_string_that_swallowed_an_event_is_a_loss(filler: bytes, place: bytes) -> None:
    """Bytes over the border of two events: repaired, they read as one long name or key."""
    text = trace(simple(3))
    start, stop = text.index(place) + 2, text.index(b'"ts": 2')
    end = b'", ' if place.startswith(b"k") else b'": 1, '
    text = text[:start] + filler * (stop - start - len(end)) + end + text[stop:]
    found, losses, _ = read(text)
    assert len(found) == 2
    assert [row["severity"] for row in losses.rows()] == ["data_loss"]

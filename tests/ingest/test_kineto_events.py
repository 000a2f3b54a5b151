from decimal import Decimal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.ingest.event_columns import EventColumns
from workbench.ingest.kineto_events import EXACT_BELOW_US, MAX_NS, MISSING, decode_event, microseconds_to_ns
from workbench.ingest.losses import Losses


@given(st.integers(1000 - MAX_NS, MAX_NS), st.integers(0, 3))
def test_text_gives_the_exact_nanosecond(ns: int, cut: int) -> None:
    ns -= ns % 10**cut
    sign, size = "-" if ns < 0 else "", abs(ns)
    text = f"{sign}{size // 1000}.{size % 1000:03}"
    text = text[: len(text) - cut].rstrip(".") if cut else text
    assert microseconds_to_ns(text.encode()) == ns


@given(st.decimals(-2 * 10**15, 2 * 10**15, allow_nan=False, places=6))
def test_more_places_are_rounded_half_to_even(us: Decimal) -> None:
    assert microseconds_to_ns(str(us).encode()) == int((us * 1000).to_integral_value())


@given(st.lists(st.integers(0, int(EXACT_BELOW_US) * 1000 - 1), min_size=1))
def test_float64_gives_the_same_nanoseconds_below_the_bound(values: list[int]) -> None:
    floats = [float(f"{ns // 1000}.{ns % 1000:03}") for ns in values]
    found, good = EventColumns(Losses("kineto")).nanoseconds(floats)
    assert good.all()
    assert found.tolist() == values


def test_the_bound_is_needed() -> None:
    ns = 1_712_195_495_519_689_437  # microseconds since 1970 as a float64 step by 0.25
    text = f"{ns // 1000}.{ns % 1000:03}"
    assert round(float(text) * 1000) != ns
    assert microseconds_to_ns(text.encode()) == ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"12", 12_000),
        (b"1e3", 1_000_000),
        (b"1.5E-3", 2),
        (b'"12.5"', 12_500),
        (b"-0.001", -1),
        (b"null", None),
        (b"NaN", None),
        (b"Infinity", None),
        (b"true", None),
        (b"1e999999999999", None),
        (b"1e-999999999", 0),
        (b"9" * 500, None),
        (b"9" * 30, None),
        (b"9999999999999999", None),
        (b"2305843009213693.951", MAX_NS - 1),
        (b"2305843009213693.953", None),
        (b"", None),
        (b"[1]", None),
    ],
)
def test_other_forms_of_a_time(text: bytes, ns: int | None) -> None:
    assert microseconds_to_ns(text) == ns


def test_fields_of_a_wrong_type_are_left_out_and_named() -> None:
    event = decode_event(
        b'{"ph": "X", "cat": "kernel", "name": 5, "ts": "12.5", "tid": [1], "args": '
        b'{"correlation": "17", "stream": 7.0, "device": 1.5, "grid": [1, 2], "registers per thread": null}}'
    )
    assert (event.name, event.tid, bytes(event.ts)) == ("", MISSING, b'"12.5"')
    assert event.args is not None
    assert (event.args.correlation, event.args.stream, event.args.device) == (17, 7, MISSING)
    assert set(event.issues) == {"name", "tid", "device", "grid"}


@pytest.mark.parametrize("text", [b"[]", b"3", b'"x"', b"{", b"null", b'{"ph": "X"', b'{"a": "\x00"}'])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_event(text)


def test_integers_beyond_the_column_are_left_out_and_counted() -> None:
    losses = Losses("kineto")
    columns = EventColumns(losses)
    assert columns.ints([1, 1 << 70, -(1 << 63)]).tolist() == [1, MISSING, MISSING]
    assert columns.small(np.array([1, 1 << 40, MISSING])).tolist() == [1, MISSING, MISSING]
    assert losses.count("integer-out-of-range") == 2

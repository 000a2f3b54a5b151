import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.ingest.json_repair import TOKENS, repair

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 2]), st.booleans())
def test_valid_json_is_left_alone(value: Any, indent: int | None, ascii_only: bool) -> None:
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    assert repair(text) == (text, {})


@pytest.mark.parametrize(
    ("text", "value", "kinds"),
    [
        (b'{"name": "a\x01b\nc"}', {"name": "a\x01b\nc"}, ["control-characters"]),
        (b'{"a": NaN, "b": -Infinity, "c": -nan, "d": inf}', dict.fromkeys("abcd"), ["not-a-number"]),
        (b'{"a": -nan(ind)}', {"a": None}, ["not-a-number"]),
        (b'{"name": "op "x" end", "ts": 1}', {"name": 'op "x" end', "ts": 1}, ["quotes"]),
        (b'{"name": "C:\\dir\\x"}', {"name": "C:\\dir\\x"}, ["escapes"]),
        (b'{"name": "a\\\\\\x"}', {"name": "a\\\\x"}, ["escapes"]),
        (b'{"name": "\\u12"}', {"name": "\\u12"}, ["escapes"]),
        (b'{"name": "\xff"}', {"name": "\\xff"}, ["utf-8"]),
        (b'{"NaN": "nan", "inf": "NaN"}', {"NaN": "nan", "inf": "NaN"}, []),
    ],
)
def test_what_profilers_write_wrongly_is_repaired(text: bytes, value: Any, kinds: list[str]) -> None:
    fixed, found = repair(text)
    assert json.loads(fixed) == value
    assert list(found) == kinds


@given(st.binary(max_size=200))
def test_any_bytes_are_taken(text: bytes) -> None:
    fixed, kinds = repair(text)
    assert bool(kinds) == (fixed != text)


@pytest.mark.parametrize("piece", [b'"', b"\\", b'"\\', b'{"a', b'"a" ', b'" ', b'\\"', b"[", b"\x00", b"nan"])
def test_no_input_takes_long(piece: bytes) -> None:
    """Linear time: a quadratic one would take minutes here."""
    begin = time.process_time()
    repair(piece * 100_000)
    for _ in TOKENS.finditer(piece * 100_000):
        pass
    assert time.process_time() - begin < 20

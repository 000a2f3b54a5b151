import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.terminal import json_text, print_table, print_text, printable


@given(st.text())
def test_printable_is_one_line_without_anything_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert "\n" not in shown
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in shown)
    assert not any("\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069" for char in shown)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_json_is_valid_and_ascii_whatever_the_numbers(value: object) -> None:
    text = json_text(value)
    assert text.isascii()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null() -> None:
    assert json.loads(json_text({"a": math.nan, "b": [math.inf, 1.5]})) == {"a": None, "b": [None, 1.5]}


def test_a_table_away_from_a_terminal_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "value"), [("a" * 300, "1"), ("[red]b", "22")], title="[bold]title")
    title, head, first, second = capsys.readouterr().out.splitlines()
    assert title == "[bold]title"
    assert head.split() == ["name", "value"]
    assert first == "a" * 300 + "      1"
    assert second.startswith("[red]b ")
    assert len(second) == len(first)


def test_text_keeps_long_lines_and_loses_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("a\tb\n" + "x" * 5000 + "\x1b[0m\n")
    assert capsys.readouterr().out == "a   b\n" + "x" * 5000 + "\\x1b[0m\n"

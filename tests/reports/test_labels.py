import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.reports.labels import figure_labels, figure_text, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("dflash", "dflash"),
        ("größe 尺寸 מידה", "größe 尺寸 מידה"),
        ("a\u202eb\u2066c\u200f", "a\\u202eb\\u2066c\\u200f"),
        ("a\x00b\x1b[31m\n", "a\\x00b\\x1b[31m\\n"),
        ("\ud800", "\\ud800"),
    ],
)
def test_what_cannot_be_seen_is_spelt_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_long_name_is_cut_and_says_so() -> None:
    assert visible("x" * 1_000_000, 5) == "xxxxx… (1,000,000 characters)"
    assert visible("{\n}", keep="\n") == "{\n}"


@given(st.text())
def test_nothing_invisible_is_left(text: str) -> None:
    assert not {unicodedata.category(char) for char in visible(text)} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text())
def test_figure_text_holds_no_markup(text: str) -> None:
    shown = figure_text(text)
    assert not set("<>") & set(shown)
    assert shown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == text


def test_labels_are_short_and_differ() -> None:
    labels = figure_labels(["a" * 50 + "1", "b", "a" * 50 + "2"])
    assert len(set(labels)) == 3
    assert max(map(len, labels)) < 30
    assert labels[1] == "b"

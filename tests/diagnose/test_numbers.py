import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.diagnose.numbers import byte_text, parts_that_add_up, percent, significant


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (151.124, 4, "151.1"),
        (12180.4, 3, "12,180"),
        (0.0124067, 3, "0.0124"),
        (0.0, 4, "0"),
        (-2.5, 3, "-2.50"),
        (1e-12, 3, "1.00e-12"),
        (float("inf"), 3, "inf"),
    ],
)
def test_significant_digits(value: float, digits: int, text: str) -> None:
    assert significant(value, digits) == text


def test_percent_and_bytes_carry_their_unit() -> None:
    assert percent(0.012406) == "1.24 %"
    assert percent(1) == "100 %"
    assert byte_text(4_760_579) == "4.761 MB"
    assert byte_text(999) == "999.0 B"
    assert byte_text(6.65e9) == "6.650 GB"


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=20), st.integers(0, 10**7))
def test_parts_add_up_and_stay_within_one(parts: list[int], whole: int) -> None:
    shown = parts_that_add_up(parts, whole)
    if not sum(parts):
        assert shown == [0] * len(parts)
        return
    assert sum(shown) == whole
    for part, value in zip(parts, shown, strict=True):
        # |value - part * whole / sum| < 1, in integers
        assert abs(value * sum(parts) - part * whole) < sum(parts)

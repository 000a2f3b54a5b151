import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.decode import e2m1

CODES = torch.arange(16, dtype=torch.uint8)


def nearest_code(value: float) -> int:
    """Search the table: nearest magnitude, the even code on a tie; the sign bit follows the value's sign."""
    magnitude = min(range(8), key=lambda code: (abs(abs(value) - e2m1.VALUES[code]), code % 2))
    return magnitude + (8 if math.copysign(1, value) < 0 else 0)


def test_decode_gives_the_sixteen_values_of_the_format() -> None:
    values = e2m1.decode(CODES)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8


def test_decode_follows_the_bit_fields() -> None:
    for code in range(16):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
        assert e2m1.decode(CODES[code]).item() == (-magnitude if sign else magnitude)


def test_encode_undoes_decode_for_every_code() -> None:
    assert torch.equal(e2m1.encode(e2m1.decode(CODES)), CODES)


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (-0.25, 8), (-5.0, 14), (-0.0, 8)],
)
def test_ties_go_to_the_even_code(value: float, code: int) -> None:
    assert e2m1.encode(torch.tensor(value)).item() == code


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_one_ulp_beside_a_tie_decides(tie: float) -> None:
    below, above = (torch.nextafter(torch.tensor(tie), torch.tensor(to)) for to in (0.0, 9.0))
    lower = max(i for i, v in enumerate(e2m1.VALUES) if v < tie)
    assert e2m1.encode(below).item() == lower
    assert e2m1.encode(above).item() == lower + 1


@pytest.mark.parametrize("value", [6.0, 6.5, 7.999, 1e30, math.inf])
def test_large_magnitudes_saturate(value: float) -> None:
    assert e2m1.encode(torch.tensor([value, -value])).tolist() == [7, 15]


@given(st.floats(-8, 8, width=32))
def test_encode_agrees_with_a_table_search(value: float) -> None:
    assert e2m1.encode(torch.tensor(value)).item() == nearest_code(value)


@given(st.floats(0, 8, width=32))
def test_nearest_is_the_decoded_code(value: float) -> None:
    x = torch.tensor(value)
    assert torch.equal(e2m1.nearest(x), e2m1.decode(e2m1.encode(x)))


def test_nearest_keeps_nan() -> None:
    assert e2m1.nearest(torch.tensor(math.nan)).isnan()


def test_the_even_index_is_in_the_low_nibble() -> None:
    assert e2m1.pack(torch.tensor([0x1, 0xF, 0x8, 0x0], dtype=torch.uint8)).tolist() == [0xF1, 0x08]


def test_unpack_undoes_pack_for_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    codes = e2m1.unpack(packed)
    assert codes.shape == (4, 128)
    assert int(codes.max()) == 15
    assert torch.equal(e2m1.pack(codes), packed)

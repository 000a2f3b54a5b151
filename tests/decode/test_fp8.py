import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decode.fp8 import LARGEST, dequantize_blocks, fake_quantize_groups, quantize_blocks
from workbench.errors import InputError


def draw(rows: int, columns: int, seed: int, spread: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return torch.ldexp(values, torch.randint(-spread, spread + 1, values.shape, generator=generator))


@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=st.integers(0, 99), spread=st.integers(0, 12))
@settings(max_examples=25, deadline=None)
def test_blocks_lose_half_a_step_at_most_and_nothing_the_second_time(
    rows: int, columns: int, seed: int, spread: int
) -> None:
    matrix = draw(rows, columns, seed, spread)
    q = quantize_blocks(matrix)
    assert q.values.shape == matrix.shape
    assert q.scales.shape == (-(-rows // 128), -(-columns // 128))
    back = dequantize_blocks(q)
    # Half a step: 2^-4 of a normal value, half the smallest subnormal (2^-9) of the scale below.
    scale = q.scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert bool(((back - matrix).abs() <= torch.maximum(matrix.abs() * 2.0**-4, scale * 2.0**-10)).all())
    assert torch.equal(dequantize_blocks(quantize_blocks(back)), back)
    assert torch.equal(dequantize_blocks(q, torch.bfloat16).float(), back)


def test_scales_are_the_smallest_powers_of_two_that_clip_nothing() -> None:
    matrix = torch.zeros(3, 256)
    matrix[0, 0], matrix[1, 130] = LARGEST * 4, LARGEST * 4.1
    assert quantize_blocks(matrix).scales.tolist() == [[4.0, 8.0]]
    assert quantize_blocks(torch.zeros(2, 2)).scales.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_have_scales_of_their_own(dtype: torch.dtype) -> None:
    x = torch.ones(2, 64, dtype=dtype)
    x[:, 32:] = 2.0**-20
    x[0, 0] = 2.0**40
    y = fake_quantize_groups(x)
    assert y.dtype == dtype
    assert y[0, :32].tolist() == [2.0**40, *[0.0] * 31]
    assert torch.equal(y[1], x[1])
    assert torch.equal(y[0, 32:], x[0, 32:])
    assert torch.equal(fake_quantize_groups(y), y)


def test_large_magnitudes_of_bfloat16_are_kept_apart_from_infinity() -> None:
    x = (draw(1, 32, 3) * 2.0**64).bfloat16()
    y = fake_quantize_groups(x)
    assert bool(y.isfinite().all())
    torch.testing.assert_close(y, x, rtol=2.0**-4, atol=2.0**58)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(2, 2, 2\)"):
        quantize_blocks(torch.zeros(2, 2, 2))
    with pytest.raises(InputError, match="multiple of 32"):
        fake_quantize_groups(torch.zeros(2, 48))

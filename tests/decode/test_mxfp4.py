import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.decode import e2m1, mxfp4
from workbench.decode.blocks import DTYPES
from workbench.decode.mxfp4 import MxFp4, ScaleRounding
from workbench.errors import InputError

ROUNDINGS: tuple[ScaleRounding, ...] = ("up", "ocp")
both = pytest.mark.parametrize("rounding", ROUNDINGS)


def oracle(block: list[float], rounding: ScaleRounding) -> tuple[int, list[int]]:
    """Quantise one block in exact rational arithmetic by searching every scale and every code."""
    if not all(map(math.isfinite, block)):
        return 0xFF, [0] * len(block)
    amax = max(abs(Fraction(v)) for v in block)
    scales = {e: Fraction(2) ** (e - 127) for e in range(255)}
    if rounding == "up":
        exponent = min(e for e, s in scales.items() if amax <= 6 * s)
    else:
        exponent = max((e for e, s in scales.items() if 4 * s <= amax), default=0)
    codes = []
    for value in block:
        scaled = abs(Fraction(value)) / scales[exponent]
        code = min(range(8), key=lambda c: (abs(scaled - Fraction(e2m1.VALUES[c])), c % 2))
        codes.append(code + (8 if math.copysign(1, value) < 0 else 0))
    return exponent, codes


@st.composite
def float_blocks(draw: st.DrawFn) -> Tensor:
    """Blocks whose elements lie within a few binades of each other and often on ties, at any magnitude."""
    top = draw(st.integers(0, 254))
    mantissas = st.sampled_from([0, 0x20_0000, 0x40_0000, 0x40_0001, 0x60_0000, 0x7F_FFFF]) | st.integers(0, 0x7F_FFFF)
    elements = st.tuples(st.booleans(), st.integers(0, 6), mantissas)
    drawn = draw(st.lists(elements, min_size=mxfp4.BLOCK, max_size=mxfp4.BLOCK))
    bits = [sign << 31 | max(top - drop, 0) << 23 | mantissa for sign, drop, mantissa in drawn]
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Equality that tells -0 from +0."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@both
@given(block=float_blocks())
@settings(max_examples=150, deadline=None)
def test_agrees_with_exact_search(block: Tensor, rounding: ScaleRounding) -> None:
    q = mxfp4.quantize(block, rounding)
    exponent, codes = oracle(block.tolist(), rounding)
    assert q.scales.tolist() == [exponent]
    assert e2m1.unpack(q.blocks).tolist() == codes


@both
@given(block=float_blocks())
@settings(deadline=None)
def test_fake_quantize_is_the_round_trip_bit_for_bit(block: Tensor, rounding: ScaleRounding) -> None:
    assert bits_equal(mxfp4.fake_quantize(block, rounding), mxfp4.dequantize(mxfp4.quantize(block, rounding)))


@both
@given(block=float_blocks())
@settings(deadline=None)
def test_values_are_stable_under_requantisation(block: Tensor, rounding: ScaleRounding) -> None:
    once = mxfp4.fake_quantize(block, rounding)
    if not once.isfinite().all():
        assert block.abs().max() > 5 * 2.0**125  # only a maximum that rounds past float32 can overflow
        return
    assert bits_equal(mxfp4.fake_quantize(once, rounding), once)


@both
@given(block=float_blocks())
@settings(deadline=None)
def test_error_is_bounded(block: Tensor, rounding: ScaleRounding) -> None:
    q = mxfp4.quantize(block, rounding)
    values = e2m1.decode(e2m1.unpack(q.blocks)).double() * mxfp4.scale_value(q.scales).double()
    error = (values - block.double()).abs()
    # Half a step: a quarter scale below one scale, a fifth of the value above; saturation costs up to (8 - 6) / 8.
    relative = 1 / 5 if rounding == "up" else 1 / 4
    bound = torch.maximum(mxfp4.scale_value(q.scales).double() / 4, block.double().abs() * relative)
    assert (error <= bound * (1 + 1e-12)).all()


@both
def test_every_code_at_every_scale_survives_bit_for_bit(rounding: ScaleRounding) -> None:
    exponents = torch.arange(253, dtype=torch.uint8)  # 6 * 2^(253 - 127) exceeds float32
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(len(exponents), mxfp4.BLOCK)
    q = MxFp4(e2m1.pack(codes), exponents.unsqueeze(-1))
    values = mxfp4.dequantize(q)
    for exponent in (0, 1, 126, 127, 252):
        expected = [math.ldexp(v, exponent - 127) for v in e2m1.decode(codes[0]).tolist()]
        assert values[exponent].tolist() == expected
    again = mxfp4.quantize(values, rounding)
    assert torch.equal(again.blocks, q.blocks)
    assert torch.equal(again.scales, q.scales)


def test_scale_byte_is_an_exponent_not_a_number() -> None:
    scales = torch.arange(256, dtype=torch.uint8)
    values = mxfp4.scale_value(scales)
    assert values[:255].tolist() == [math.ldexp(1, e - 127) for e in range(255)]
    assert values[255].isnan()


def test_the_largest_scales_overflow_to_infinity() -> None:
    q = MxFp4(torch.full((1, 16), 0x76, dtype=torch.uint8), torch.tensor([[254]], dtype=torch.uint8))
    assert mxfp4.dequantize(q).isinf().all()


@pytest.mark.parametrize(
    ("rounding", "amax", "exponent"),
    [
        ("up", 6.0, 127),
        ("up", 6.0000005, 128),
        ("up", 1.0, 125),
        ("up", 3.0, 126),
        ("ocp", 4.0, 127),
        ("ocp", 3.9999998, 126),
        ("ocp", 7.9999995, 127),
        ("ocp", 8.0, 128),
        ("ocp", 1.0, 125),
    ],
)
def test_scale_of_known_maxima(rounding: ScaleRounding, amax: float, exponent: int) -> None:
    block = torch.zeros(mxfp4.BLOCK)
    block[5] = -amax
    assert mxfp4.quantize(block, rounding).scales.tolist() == [exponent]


def test_known_block() -> None:
    block = torch.zeros(mxfp4.BLOCK)
    block[:8] = torch.tensor([6.0, -6.0, 0.3, 0.74, -1.3, 2.4, 3.6, -5.1])
    q = mxfp4.quantize(block)
    assert q.scales.tolist() == [127]
    assert q.blocks[:4].tolist() == [0xF7, 0x11, 0x4B, 0xF6]
    assert mxfp4.dequantize(q)[:8].tolist() == [6, -6, 0.5, 0.5, -1.5, 2, 4, -6]


def test_ocp_saturates_where_up_does_not() -> None:
    block = torch.full((mxfp4.BLOCK,), 7.5)
    assert mxfp4.fake_quantize(block, "ocp").unique().tolist() == [6]
    assert mxfp4.fake_quantize(block, "up").unique().tolist() == [8]


@both
def test_zero_block_has_the_smallest_scale_and_keeps_the_sign(rounding: ScaleRounding) -> None:
    block = torch.zeros(mxfp4.BLOCK)
    block[1] = -0.0
    q = mxfp4.quantize(block, rounding)
    assert q.scales.tolist() == [0]
    assert q.blocks.tolist() == [0x80] + [0] * 15
    assert bits_equal(mxfp4.dequantize(q), block)


@both
def test_subnormal_maximum_uses_the_smallest_scale(rounding: ScaleRounding) -> None:
    block = torch.full((mxfp4.BLOCK,), 2.0**-128)
    block[0] = 2.0**-149
    q = mxfp4.quantize(block, rounding)
    assert q.scales.tolist() == [0]
    assert mxfp4.dequantize(q).tolist() == [0.0] + [2.0**-128] * 31


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_makes_only_its_block_nan(bad: float, rounding: ScaleRounding) -> None:
    x = torch.ones(2, 96)
    x[1, 40] = bad
    q = mxfp4.quantize(x, rounding)
    assert (q.scales == mxfp4.SCALE_NAN).nonzero().tolist() == [[1, 1]]
    assert q.blocks[1, 16:32].tolist() == [0] * 16
    for values in (mxfp4.dequantize(q), mxfp4.fake_quantize(x, rounding)):
        expected = torch.zeros(2, 96, dtype=torch.bool)
        expected[1, 32:64] = True
        assert torch.equal(values.isnan(), expected)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_inputs_quantise_like_their_float32_value(dtype: torch.dtype, rounding: ScaleRounding) -> None:
    x = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    q, wide = mxfp4.quantize(x, rounding), mxfp4.quantize(x.float(), rounding)
    assert torch.equal(q.blocks, wide.blocks)
    assert torch.equal(q.scales, wide.scales)
    assert q.blocks.shape == (3, 5, 32)
    assert q.scales.shape == (3, 5, 2)
    fake = mxfp4.fake_quantize(x, rounding)
    assert fake.dtype == dtype
    assert torch.equal(fake, mxfp4.dequantize(q, dtype))
    assert torch.equal(fake.float(), mxfp4.dequantize(q))


def test_float16_overflows_when_the_maximum_rounds_past_its_range() -> None:
    x = torch.full((mxfp4.BLOCK,), 65504.0, dtype=torch.float16)
    assert mxfp4.dequantize(mxfp4.quantize(x)).unique().tolist() == [65536]
    assert mxfp4.fake_quantize(x).isinf().all()


def test_memory_layout_does_not_matter() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    a, b = mxfp4.quantize(x.T), mxfp4.quantize(x.T.contiguous())
    assert torch.equal(a.blocks, b.blocks)
    assert torch.equal(a.scales, b.scales)
    assert torch.equal(mxfp4.fake_quantize(x.T), mxfp4.dequantize(b))


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0,)])
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert mxfp4.dequantize(mxfp4.quantize(x)).shape == x.shape
    assert mxfp4.fake_quantize(x).shape == x.shape


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_passes_unchanged(dtype: torch.dtype, rounding: ScaleRounding) -> None:
    x = torch.linspace(-8, 8, 64).to(dtype).requires_grad_()
    upstream = torch.linspace(1, 2, 64).to(dtype)
    mxfp4.fake_quantize(x, rounding).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


def test_input_is_left_alone() -> None:
    x = torch.randn(2, 32)
    kept = x.clone()
    mxfp4.quantize(x)
    mxfp4.fake_quantize(x)
    assert torch.equal(x, kept)


@both
def test_compiles_into_one_graph(rounding: ScaleRounding) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    compiled = torch.compile(mxfp4.fake_quantize, backend="aot_eager", fullgraph=True)
    y = compiled(x, rounding)
    y.sum().backward()
    assert torch.equal(y, mxfp4.fake_quantize(x, rounding))
    assert x.grad is not None
    assert (x.grad == 1).all()


@pytest.mark.parametrize("function", [mxfp4.quantize, mxfp4.fake_quantize])
def test_errors_name_shape_dtype_and_rounding(function) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=r"\(2, 33\).*multiple of 32"):
        function(torch.zeros(2, 33))
    with pytest.raises(InputError, match=r"shape \(\)"):
        function(torch.tensor(1.0))
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(InputError, match=str(dtype)):
            function(torch.zeros(32, dtype=dtype))
    with pytest.raises(InputError, match=r"'down'.*up or ocp"):
        function(torch.zeros(32), "down")


def test_mismatched_parts_are_refused() -> None:
    byte = torch.uint8
    with pytest.raises(InputError, match=r"\(4, 16\).*\(4, 2\)"):
        MxFp4(torch.zeros(4, 16, dtype=byte), torch.zeros(4, 2, dtype=byte))
    with pytest.raises(InputError, match=r"torch\.int32"):
        MxFp4(torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4, 1, dtype=byte))


def test_storage_cost() -> None:
    q = mxfp4.quantize(torch.zeros(64, 128))
    assert (q.blocks.nbytes + q.scales.nbytes) * 8 == mxfp4.BITS_PER_VALUE * 64 * 128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@both
def test_cuda_equals_cpu(rounding: ScaleRounding) -> None:
    bits = torch.randint(-(2**31), 2**31, (256, 1024), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    wild = bits.to(torch.int32).view(torch.float32)
    for x in (wild, torch.randn(256, 1024), torch.randn(256, 1024) * 2.0**-127, torch.randn(256, 1024).bfloat16()):
        host, device = mxfp4.quantize(x, rounding), mxfp4.quantize(x.cuda(), rounding)
        assert torch.equal(device.blocks.cpu(), host.blocks)
        assert torch.equal(device.scales.cpu(), host.scales)
        values = mxfp4.dequantize(host, x.dtype)
        compiled = torch.compile(mxfp4.fake_quantize, fullgraph=True)
        for fake in (mxfp4.fake_quantize(x.cuda(), rounding), compiled(x.cuda(), rounding)):
            torch.testing.assert_close(fake.cpu(), values, rtol=0, atol=0, equal_nan=True)

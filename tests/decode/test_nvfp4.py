import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.decode import e2m1, nvfp4
from workbench.decode.blocks import DTYPES
from workbench.decode.nvfp4 import NvFp4
from workbench.errors import InputError


def e4m3(code: int) -> float:
    """Value of a positive E4M3 code, from its bit fields: bias 7, three mantissa bits, 0x7F = NaN."""
    exponent, mantissa = code >> 3, code & 7
    return math.ldexp(mantissa / 8, -6) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7)


E4M3 = [e4m3(code) for code in range(0x7F)]


def nearest(value: float, table: list[float]) -> int:
    """Index of the entry nearest to the magnitude, the even one on a tie, the last one beyond the table."""
    magnitude = min(abs(value), table[-1])
    return min(range(len(table)), key=lambda i: (abs(magnitude - table[i]), i % 2))


def oracle(rows: list[list[float]], tensor_scale: float | None) -> tuple[float, list[list[int]], list[list[int]]]:
    """Return the tensor scale, E4M3 codes and E2M1 codes of ``rows``: single float32 operations and table searches."""
    f32 = np.float32
    amaxes = [max(map(abs, row)) if all(map(math.isfinite, row)) else math.nan for row in rows]
    if tensor_scale is None:
        largest = max((a for a in amaxes if not math.isnan(a)), default=0.0)
        tensor_scale = float(max(f32(largest) / f32(2688), f32(2.0**-117)))
    scales, codes = [], []
    for row, amax in zip(rows, amaxes, strict=True):
        if math.isnan(amax):
            scales.append([0x7F])
            codes.append([0] * len(row))
            continue
        with np.errstate(over="ignore"):
            wanted = f32(amax) / (f32(6) * f32(tensor_scale))
            scale = 0x38 if wanted == 0 else max(1, nearest(float(wanted), E4M3))
            scaled = [float(f32(v) / (f32(E4M3[scale]) * f32(tensor_scale))) for v in row]
        scales.append([scale])
        codes.append([nearest(v, list(e2m1.VALUES)) + 8 * (math.copysign(1, v) < 0) for v in scaled])
    return tensor_scale, scales, codes


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A few blocks that lie up to 2^24 apart, each spanning a few binades, NaN and infinity included."""
    top = draw(st.integers(0, 255))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        below = draw(st.integers(0, 24))
        mantissas = st.sampled_from([0, 0x20_0000, 0x40_0000, 0x7F_FFFF]) | st.integers(0, 0x7F_FFFF)
        elements = st.tuples(st.booleans(), st.integers(0, 6), mantissas)
        drawn = draw(st.lists(elements, min_size=nvfp4.BLOCK, max_size=nvfp4.BLOCK))
        rows.append([sign << 31 | max(top - below - drop, 0) << 23 | mantissa for sign, drop, mantissa in drawn])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.float32))


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Equality that tells -0 from +0 and takes NaN as equal to itself."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(x=tensors(), power=st.none() | st.integers(-117, 100))
@settings(max_examples=150, deadline=None)
def test_agrees_with_table_search(x: Tensor, power: int | None) -> None:
    given_scale = None if power is None else 2.0**power
    q = nvfp4.quantize(x, None if given_scale is None else torch.tensor(given_scale))
    tensor_scale, scales, codes = oracle(x.tolist(), given_scale)
    assert q.tensor_scale.item() == tensor_scale
    assert q.scales.view(torch.uint8).tolist() == scales
    assert e2m1.unpack(q.blocks).tolist() == codes


@given(x=tensors())
@settings(deadline=None)
def test_fake_quantize_is_the_round_trip_bit_for_bit(x: Tensor) -> None:
    assert bits_equal(nvfp4.fake_quantize(x), nvfp4.dequantize(nvfp4.quantize(x)))


@given(x=tensors())
@settings(deadline=None)
def test_error_is_bounded(x: Tensor) -> None:
    q = nvfp4.quantize(x)
    scale = q.scales.double()
    unit = scale * q.tensor_scale.double()
    values = e2m1.decode(e2m1.unpack(q.blocks)).double() * unit
    error = (values - x.double()).abs()
    # A fifth of the value is E2M1's half step; a third is saturation where E4M3 itself has steps of its own size.
    relative = torch.where(scale >= 2.0**-6, 1 / 5, 1 / 3)
    bound = torch.maximum(unit / 4, x.double().abs() * relative)
    assert ((error <= bound * (1 + 1e-5)) | q.scales.float().isnan()).all()


@given(x=tensors())
@settings(deadline=None)
def test_requantising_with_the_same_tensor_scale_changes_nothing(x: Tensor) -> None:
    q = nvfp4.quantize(x)
    values = nvfp4.dequantize(q)
    again = nvfp4.quantize(values, q.tensor_scale)
    normal = (q.scales.float() >= 2.0**-6).squeeze(-1) & values.isfinite().all(-1)
    assert torch.equal(again.blocks[normal], q.blocks[normal])
    assert torch.equal(again.scales.view(torch.uint8)[normal], q.scales.view(torch.uint8)[normal])


@pytest.mark.parametrize("tensor_scale", [1.0, 0.0371, 2.0**-117, 2.0**110])
def test_every_code_at_every_normal_scale_survives_bit_for_bit(tensor_scale: float) -> None:
    scales = torch.arange(0x08, 0x7F, dtype=torch.uint8).unsqueeze(-1).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8).expand(len(scales), 16)
    q = NvFp4(e2m1.pack(codes), scales, torch.tensor(tensor_scale))
    again = nvfp4.quantize(nvfp4.dequantize(q), q.tensor_scale)
    assert torch.equal(again.blocks, q.blocks)
    assert torch.equal(again.scales.view(torch.uint8), scales.view(torch.uint8))


def test_dequantize_known_values() -> None:
    q = NvFp4(
        torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8),
        torch.tensor([[1.5]]).to(torch.float8_e4m3fn),
        torch.tensor(0.25),
    )
    expected = [v * 1.5 * 0.25 for v in e2m1.decode(torch.arange(16, dtype=torch.uint8)).tolist()]
    assert nvfp4.dequantize(q).tolist() == [expected]


def test_known_scales() -> None:
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 3] = -2688.0, 6.0
    q = nvfp4.quantize(x)
    assert q.tensor_scale.item() == 1
    assert q.scales.float().tolist() == [[448], [1], [1]]
    assert e2m1.unpack(q.blocks)[:2, :4].tolist() == [[15, 0, 0, 0], [0, 0, 0, 7]]


def test_zero_tensor_keeps_its_signs() -> None:
    x = torch.zeros(2, 16)
    x[1, 2] = -0.0
    q = nvfp4.quantize(x)
    assert q.tensor_scale.item() == 2.0**-117
    assert q.scales.float().tolist() == [[1], [1]]
    assert bits_equal(nvfp4.dequantize(q), x)


def test_a_tiny_block_keeps_the_smallest_scale() -> None:
    x = torch.stack((torch.full((16,), 2688.0), torch.full((16,), 2.0**-9), torch.full((16,), 2.0**-12)))
    q = nvfp4.quantize(x)
    assert q.scales.float().tolist() == [[448], [2.0**-9], [2.0**-9]]
    assert nvfp4.dequantize(q)[1:, 0].tolist() == [2.0**-9, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_makes_only_its_block_nan(bad: float) -> None:
    x = torch.ones(2, 48)
    clean = nvfp4.quantize(x)
    x[1, 20] = bad
    q = nvfp4.quantize(x)
    assert q.tensor_scale.item() == clean.tensor_scale.item()
    assert q.scales.float().isnan().nonzero().tolist() == [[1, 1]]
    assert q.blocks[1, 8:16].tolist() == [0] * 8
    expected = torch.zeros(2, 48, dtype=torch.bool)
    expected[1, 16:32] = True
    for values in (nvfp4.dequantize(q), nvfp4.fake_quantize(x)):
        assert torch.equal(values.isnan(), expected)


def test_a_tensor_scale_that_is_too_small_saturates() -> None:
    x = torch.full((16,), 1e6)
    assert nvfp4.dequantize(nvfp4.quantize(x, torch.tensor(1.0))).unique().tolist() == [2688]


def test_one_tensor_scale_per_expert() -> None:
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 100, 1e-3])[:, None, None]
    each = [nvfp4.quantize(expert) for expert in x]
    q = nvfp4.quantize(x, torch.stack([e.tensor_scale for e in each])[:, None, None])
    assert torch.equal(q.blocks, torch.stack([e.blocks for e in each]))
    assert torch.equal(nvfp4.dequantize(q), torch.stack([nvfp4.dequantize(e) for e in each]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_inputs_quantise_like_their_float32_value(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    q, wide = nvfp4.quantize(x), nvfp4.quantize(x.float())
    assert torch.equal(q.blocks, wide.blocks)
    assert torch.equal(q.scales.view(torch.uint8), wide.scales.view(torch.uint8))
    assert (q.blocks.shape, q.scales.shape, q.tensor_scale.shape) == ((3, 5, 32), (3, 5, 4), ())
    fake = nvfp4.fake_quantize(x)
    assert fake.dtype == dtype
    assert torch.equal(fake, nvfp4.dequantize(q, dtype))


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,)])
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert nvfp4.dequantize(nvfp4.quantize(x)).shape == x.shape
    assert nvfp4.fake_quantize(x).shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_passes_unchanged(dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 64).to(dtype).requires_grad_()
    upstream = torch.linspace(1, 2, 64).to(dtype)
    nvfp4.fake_quantize(x).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


def test_compiles_into_one_graph() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    y = torch.compile(nvfp4.fake_quantize, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert torch.equal(y, nvfp4.fake_quantize(x))
    assert x.grad is not None
    assert (x.grad == 1).all()


def test_errors_name_shape_and_dtype() -> None:
    for function in (nvfp4.quantize, nvfp4.fake_quantize):
        with pytest.raises(InputError, match=r"nvfp4: shape \(2, 24\).*multiple of 16"):
            function(torch.zeros(2, 24))
        with pytest.raises(InputError, match=r"torch\.float64"):
            function(torch.zeros(16, dtype=torch.float64))
        with pytest.raises(InputError, match=r"tensor_scale \(3,\).*\(2, 1\)"):
            function(torch.zeros(2, 16), torch.ones(3))
        with pytest.raises(InputError, match=r"tensor_scale \(\) torch\.float64"):
            function(torch.zeros(2, 16), torch.tensor(1.0, dtype=torch.float64))


def test_mismatched_parts_are_refused() -> None:
    q = nvfp4.quantize(torch.ones(4, 32))
    with pytest.raises(InputError, match=r"\(4, 16\).*\(4, 1\)"):
        NvFp4(q.blocks, q.scales[:, :1], q.tensor_scale)
    with pytest.raises(InputError, match="need uint8, float8_e4m3fn, float32"):
        NvFp4(q.blocks, q.scales.view(torch.uint8), q.tensor_scale)


def test_storage_cost() -> None:
    q = nvfp4.quantize(torch.zeros(64, 128))
    assert (q.blocks.nbytes + q.scales.nbytes) * 8 == nvfp4.BITS_PER_VALUE * 64 * 128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_equals_cpu() -> None:
    bits = torch.randint(-(2**31), 2**31, (256, 1024), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    wild = bits.to(torch.int32).view(torch.float32)
    for x in (wild, torch.randn(256, 1024), torch.randn(256, 1024) * 2.0**-127, torch.randn(256, 1024).bfloat16()):
        host, device = nvfp4.quantize(x), nvfp4.quantize(x.cuda())
        assert torch.equal(device.blocks.cpu(), host.blocks)
        assert torch.equal(device.scales.cpu().view(torch.uint8), host.scales.view(torch.uint8))
        assert device.tensor_scale.item() == host.tensor_scale.item()
        values = nvfp4.dequantize(host, x.dtype)
        torch.testing.assert_close(nvfp4.fake_quantize(x.cuda()).cpu(), values, rtol=0, atol=0, equal_nan=True)

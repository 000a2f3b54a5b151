"""The re-layout for the CUDA expert pass: exact round trips, and the kernel's fragment arithmetic emulated lane by
lane."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.kernels import mxfp4_tiles
from workbench.kernels.mxfp4_cuda import dequantise

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def draw(experts: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 255, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@given(
    experts=st.integers(1, 3),
    tiles=st.integers(1, 4),
    units=st.integers(1, 5),
    order=st.sampled_from(["plain", "interleaved", "halves"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_round_trip_is_exact_and_keeps_the_size(
    experts: int, tiles: int, units: int, order: mxfp4_tiles.Rows, seed: int
) -> None:
    blocks, scales = draw(experts, tiles * 16, units * 64, seed)
    packed = mxfp4_tiles.pack_tiles(blocks, scales, order=order)
    assert packed.numel() == blocks.numel() + scales.numel()
    back, back_scales = mxfp4_tiles.unpack_tiles(packed, units * 64, order=order)
    assert torch.equal(back, blocks)
    assert torch.equal(back_scales, scales)


def test_bit_places_tile_a_half_word() -> None:
    assert sorted(place for places in mxfp4_tiles.BIT_PLACES for place in places) == list(range(16))


@pytest.mark.parametrize(("order", "pair"), [("interleaved", (6, 7)), ("halves", (3, 35))])
def test_gate_and_up_of_a_channel_share_a_tile(order: mxfp4_tiles.Rows, pair: tuple[int, int]) -> None:
    source = mxfp4_tiles.row_order(64, order)
    assert (int(source[3]), int(source[11])) == pair


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, s: (b.to(torch.int32), s), "uint8"),
        (lambda b, s: (b[:, :15], s[:, :15]), "multiple of 16"),
        (lambda b, s: (b[:, :, :3], s[:, :, :3]), "columns of 64"),
        (lambda b, s: (b, s[:, :, :2]), "scales"),
        (lambda b, s: (b, s.fill_(255)), "NaN"),
        (lambda b, s: (b.fill_(0x21), s.fill_(0)), "below the kernel's range"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(change, message) -> None:  # type: ignore[no-untyped-def]
    blocks, scales = change(*draw(1, 16, 128, 0))
    with pytest.raises(InputError, match=message):
        mxfp4_tiles.pack_tiles(blocks, scales)


def test_scale_zero_over_zero_codes_is_kept() -> None:
    blocks, scales = draw(1, 16, 64, 0)
    blocks[0, 3, 1] = 0x80  # zeros of both signs
    scales[0, 3, 1] = 0
    packed = mxfp4_tiles.pack_tiles(blocks, scales)
    assert torch.equal(mxfp4_tiles.unpack_tiles(packed, 64)[1], scales)


def decode(word: np.ndarray) -> list[np.ndarray]:
    """The kernel's nine operations (kernels/cuda/mxfp4.cuh), on uint32: four fragment registers."""
    up, down = word << np.uint32(1), (word >> np.uint32(2)) & np.uint32(0x0C0C0C0C)
    rest = (up & np.uint32(0x82828282)) | down
    low_bytes = ((rest & np.uint32(0xFF)) << np.uint32(8)) | ((rest & np.uint32(0xFF0000)) << np.uint32(8))
    mask = np.uint32(0x8E008E00)
    return [word & mask, (word << np.uint32(8)) & mask, rest & np.uint32(0xFF00FF00), low_bytes]


def halves(register: np.ndarray) -> np.ndarray:
    """The two fp16 numbers of each register, low first: float64 [..., 2]."""
    pairs = np.stack((register & np.uint32(0xFFFF), register >> np.uint32(16)), axis=-1).astype(np.uint16)
    return pairs.view(np.float16).astype(np.float64)


def test_decode_is_exact_for_every_code_in_every_place() -> None:
    table = mxfp4_tiles.spread_table().numpy()
    generator = np.random.default_rng(0)
    for _ in range(200):
        codes = generator.integers(0, 16, (4, 2))
        word = 0
        for register in range(4):
            for half in range(2):
                word |= int(table[register, codes[register, half]]) << (16 * half)
        for register, value in enumerate(decode(np.array([word], dtype=np.uint32))):
            expected = [(-1.0 if code & 8 else 1.0) * E2M1[code & 7] * 2.0**-14 for code in codes[register]]
            assert halves(value)[0].tolist() == expected
            assert np.signbit(halves(value)[0]).tolist() == [bool(code & 8) for code in codes[register]]


@given(code=st.integers(0, 15), place=st.integers(0, 7), others=st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_decode_ignores_the_neighbours(code: int, place: int, others: int) -> None:
    register, half = place >> 1, place & 1
    own = sum(1 << (bit + 16 * half) for bit in mxfp4_tiles.BIT_PLACES[register])
    word = (others & ~own) | int(mxfp4_tiles.spread_table()[register, code]) << (16 * half)
    value = halves(decode(np.array([word], dtype=np.uint32))[register])[0][half]
    assert value == (-1.0 if code & 8 else 1.0) * E2M1[code & 7] * 2.0**-14


def scale_shift(amax_bits: int) -> int:
    """The kernel's power of two for a token slice whose largest magnitude has these bf16 bits."""
    return 0 if amax_bits == 0 else min(max(142 - (amax_bits >> 7), -112), 126)


@given(bits=st.lists(st.integers(0, 0x7F7F), min_size=32, max_size=32), signs=st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_scaled_activation_is_exact_within_32_octaves(bits: list[int], signs: int) -> None:
    """bf16 to fp16 under the slice's power of two: exact down to 2^-32 of the largest, off by at most 2^-40 of it
    below."""
    shift = scale_shift(max(bits))
    values = (np.array(bits, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    values = np.where([(signs >> i) & 1 for i in range(32)], -values, values).astype(np.float32)
    scaled = (values * np.float32(2.0) ** np.float32(shift)).astype(np.float32)
    taken = scaled.astype(np.float16).astype(np.float64) * 2.0**-shift
    true, largest = values.astype(np.float64), float(np.abs(values).max())
    assert np.isfinite(taken).all()
    normal = largest >= 2.0**-111  # below, the clamp at 2^126 leaves less headroom; above 2^127 fp32 has none to lose
    exact = np.abs(true) >= largest * 2.0**-31
    if normal:
        assert (taken == true)[exact].all()
        assert (np.abs(taken - true) <= largest * 2.0**-40).all()


def emulate_tile(packed: np.ndarray, units: int, x: np.ndarray, padded: int) -> np.ndarray:
    """One tile as the kernel computes it, float64 [16, tokens]: words, fragments, MMA layouts of PTX m16n8k16, block
    columns.

    ``x`` float64 [tokens, K], already what the activation fragments hold.
    """
    tokens = x.shape[0]
    words = packed[: units * 512].view("<u4").reshape(units, 32, 4)
    scales = packed[units * 512 :].reshape(units, 8, 4)
    group = 8 // padded
    out = np.zeros((16, 8))
    for q in range(-(-2 * units // group)):
        c = np.zeros((16, 8))
        for j in range(group):
            block = q * group + j
            if block >= 2 * units:
                continue
            for step in range(2):
                a, b = np.zeros((16, 16)), np.zeros((16, 8))
                for lane in range(32):
                    g, t = lane >> 2, lane & 3
                    registers = decode(words[block // 2, lane, (block & 1) * 2 + step : (block & 1) * 2 + step + 1])
                    for register, value in enumerate(registers):
                        row, column = g + 8 * (register & 1), 2 * t + 8 * (register >> 1)
                        a[row, column : column + 2] = halves(value)[0]
                    token, column_block = g % padded, g // padded
                    if token < tokens and column_block == j:
                        base = block * 32 + t * 8 + step * 4
                        b[2 * t : 2 * t + 2, g] = x[token, base : base + 2]
                        b[2 * t + 8 : 2 * t + 10, g] = x[token, base + 2 : base + 4]
                c += a @ b
        for lane in range(32):
            g, t = lane >> 2, lane & 3
            for half in range(2):
                for i in range(2):
                    column = 2 * t + i
                    block = q * group + column // padded
                    if block < 2 * units:
                        scale = scales[block // 2, g, 2 * half + (block & 1)]
                        out[g + 8 * half, column % padded] += c[g + 8 * half, column] * 2.0 ** (int(scale) - 127)
    return out[:, :tokens] * 2.0**14


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("units", [1, 3])
def test_emulated_tile_equals_dequantised_product(tokens: int, units: int) -> None:
    blocks, scales = draw(1, 16, units * 64, 7 * tokens + units)
    scales = 110 + scales % 16
    x = np.random.default_rng(tokens).integers(-255, 256, (tokens, units * 64)).astype(np.float64)
    packed = mxfp4_tiles.pack_tiles(blocks, scales)[0, 0].numpy()
    expected = dequantise(blocks, scales)[0].numpy() @ x.T
    padded = 1 << (tokens - 1).bit_length()
    assert np.allclose(emulate_tile(packed, units, x, padded), expected, rtol=1e-13, atol=1e-9)

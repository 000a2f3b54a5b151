"""The FP8 tiles of the latent decode step: an exact re-layout, and halves of words that the kernel converts to fp16."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.kernels import fp8_tiles


def random_codes(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80  # -0, which a lossless layout keeps
    return codes.view(torch.float8_e4m3fn)


def random_scales(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.rand(-(-rows // 128), columns // 128, generator=torch.Generator().manual_seed(seed)) + 0.5


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**31))
def test_tiles_have_an_exact_inverse(tiles: int, units: int, seed: int) -> None:
    rows, columns = 16 * tiles, 128 * units
    values, scales = random_codes(rows, columns, seed), random_scales(rows, columns, seed)
    packed = fp8_tiles.pack_fp8(values, scales)
    assert tuple(packed.shape) == (tiles, units, fp8_tiles.UNIT_BYTES)
    again = fp8_tiles.unpack_fp8(packed)
    assert same(again[0], values)
    assert same(again[1], scales)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**31))
def test_gate_and_up_have_an_exact_inverse(tiles: int, units: int, seed: int) -> None:
    rows, columns = 8 * tiles, 128 * units
    parts = [part for k in (0, 1) for part in (random_codes(rows, columns, seed + k), random_scales(rows, columns, k))]
    packed = fp8_tiles.pack_gate_up(*parts)
    assert tuple(packed.shape) == (tiles, units, fp8_tiles.UNIT_BYTES)
    for part, again in zip(parts, fp8_tiles.unpack_gate_up(packed), strict=True):
        assert same(part, again)


@pytest.mark.parametrize("form", ["plain", "gate_up"])
def test_a_packed_word_is_two_conversions_of_neighbours(form: str) -> None:
    """Every word, read as the kernel reads it: a half each for rows g and g + 8, equal in fp16 and in its place."""
    rows, columns = 32, 256
    if form == "plain":
        values, scales = random_codes(rows, columns, 1), random_scales(rows, columns, 2)
        packed = fp8_tiles.pack_fp8(values, scales)
        row_of, scale_of = values.float(), scales.expand(4, -1)
    else:
        gate, up = random_codes(16, columns, 1), random_codes(16, columns, 2)
        gate_scales, up_scales = random_scales(16, columns, 3), random_scales(16, columns, 4)
        packed = fp8_tiles.pack_gate_up(gate, gate_scales, up, up_scales)
        row_of = torch.cat((gate[:8].float(), up[:8].float(), gate[8:].float(), up[8:].float()))
        scale_of = torch.cat((gate_scales, up_scales)).repeat(2, 1)
    raw = packed.numpy()
    for tile in range(rows // 16):
        for unit in range(columns // 128):
            weights, tail = np.split(np.ascontiguousarray(raw[tile, unit]), [fp8_tiles.UNIT_WEIGHT_BYTES])
            words = weights.view(np.uint16).reshape(4, 32, 4, 2)  # step, lane, word, half
            for half in (0, 1):
                codes = torch.from_numpy(np.ascontiguousarray(words[..., half]).view(np.uint8))
                register = codes.view(torch.float8_e4m3fn).to(torch.float16).float()
                # step, g, t, column of the lane -> g, step, t, column
                read = register.reshape(4, 8, 4, 8).permute(1, 0, 2, 3).reshape(8, 128)
                start = 16 * tile + 8 * half
                expected = row_of[start : start + 8, 128 * unit : 128 * unit + 128]
                assert torch.equal(read, expected)
                assert torch.equal(torch.signbit(read), torch.signbit(expected))
            factors = torch.from_numpy(tail.view(np.float32).copy())
            assert torch.equal(factors[:2], scale_of[2 * tile : 2 * tile + 2, unit])
            assert torch.equal(factors[2:], torch.zeros(2))


def test_scales_follow_their_rows_across_blocks() -> None:
    """144 rows: the last tile belongs to the second block."""
    scales = torch.tensor([[1.0], [2.0]])
    packed = fp8_tiles.pack_fp8(random_codes(144, 128, 0), scales)
    tails = packed[:, 0, fp8_tiles.UNIT_WEIGHT_BYTES :].contiguous().view(torch.float32)
    assert tails[:, :2].tolist() == [[1.0, 1.0]] * 8 + [[2.0, 2.0]]


def test_merged_parts_keep_their_own_blocks() -> None:
    """48 rows behind 144: concatenated tiles unpack part by part, together they are refused."""
    parts = [(random_codes(rows, 128, rows), random_scales(rows, 128, rows)) for rows in (144, 48)]
    merged = torch.cat([fp8_tiles.pack_fp8(*part) for part in parts])
    for (values, scales), tiles in zip(parts, (merged[:9], merged[9:]), strict=True):
        again = fp8_tiles.unpack_fp8(tiles.contiguous())
        assert same(again[0], values)
        assert same(again[1], scales)
    with pytest.raises(InputError, match="differ inside a block"):
        fp8_tiles.unpack_fp8(merged)


def test_rows_are_padded_with_zeros() -> None:
    values = random_codes(20, 128, 5)
    padded = fp8_tiles.pad_rows(values)
    assert same(padded[:20].contiguous(), values)
    assert padded.shape[0] == 32
    assert not padded[20:].view(torch.uint8).any()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_is_refused(code: int) -> None:
    values, scales = random_codes(16, 128, 0), random_scales(16, 128, 0)
    bad = values.clone()
    bad.view(torch.uint8)[3, 5] = code
    with pytest.raises(InputError, match="NaN"):
        fp8_tiles.pack_fp8(bad, scales)
    with pytest.raises(InputError, match="up: 0x7f"):
        fp8_tiles.pack_gate_up(values, scales, bad, scales)


def test_what_does_not_tile_is_refused() -> None:
    values, scales = random_codes(16, 128, 0), random_scales(16, 128, 0)
    with pytest.raises(InputError, match="does not tile"):
        fp8_tiles.pack_fp8(values[:8], scales)
    with pytest.raises(InputError, match="float8_e4m3fn"):
        fp8_tiles.pack_fp8(values.float(), scales)
    with pytest.raises(InputError, match="scales of values must be fp32"):
        fp8_tiles.pack_fp8(values, scales.double())
    with pytest.raises(InputError, match="same extents"):
        fp8_tiles.pack_gate_up(values, scales, values[:8], scales)
    with pytest.raises(InputError, match="tiles must be uint8"):
        fp8_tiles.unpack_fp8(torch.zeros(1, 1, 2048, dtype=torch.uint8))

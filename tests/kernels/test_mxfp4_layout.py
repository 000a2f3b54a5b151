"""The re-layout loses nothing: exact round trips, same size, clear refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.kernels.mxfp4_layout import RowOrder, dequantise, relayout, restore


@settings(max_examples=20, deadline=None)
@given(
    tiles=st.integers(1, 3),
    chunks=st.integers(1, 3),
    order=st.sampled_from(["plain", "interleaved", "stacked"]),
    seed=st.integers(0, 2**31),
)
def test_round_trip_is_exact_and_adds_no_bytes(tiles: int, chunks: int, order: RowOrder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, 16 * tiles, 2 * chunks, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (2, 16 * tiles, 2 * chunks), dtype=torch.uint8, generator=generator)
    words, scale_words = relayout(blocks, scales, order)
    assert words.numel() * 4 == blocks.numel()
    assert scale_words.numel() * 4 == scales.numel()
    back_blocks, back_scales = restore(words, scale_words, order)
    assert torch.equal(back_blocks, blocks)
    assert torch.equal(back_scales, scales)


def test_every_code_lands_where_the_table_says() -> None:
    """One weight at a time: exactly one half-word changes, by the documented bits."""
    zero = torch.zeros(1, 16, 2, 16, dtype=torch.uint8)
    scales = torch.full((1, 16, 2), 127, dtype=torch.uint8)
    for row, column, code in [(0, 0, 0xF), (9, 1, 0x9), (3, 33, 0x7), (15, 63, 0x8)]:
        blocks = zero.clone()
        blocks[0, row, column // 32, column % 32 // 2] = code << (4 * (column % 2))
        words = relayout(blocks, scales, "plain")[0].flatten()
        (hit,) = words.nonzero().flatten().tolist()
        b, c, h, word_half = column // 32, column % 32 // 8, column % 8 // 4, column % 4 // 2
        assert hit == (row % 8 * 4 + c) * 4 + row // 8 * 2 + word_half
        pair = 2 * b + h
        bits = (code >> 3) << (15, 12, 14, 13)[pair] | (code & 7) << (6, 3, 0, 9)[pair]
        assert int(words[hit]) & 0xFFFFFFFF == bits << (16 * (column % 2))


def test_dequantise_matches_the_format() -> None:
    blocks = torch.zeros(1, 16, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0xE1  # low nibble first: 0.5, then -4
    scales = torch.full((1, 16, 2), 128, dtype=torch.uint8)
    values = dequantise(blocks, scales)
    assert values.shape == (1, 16, 64)
    assert values[0, 0, :3].tolist() == [1.0, -8.0, 0.0]


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        ((1, 24, 2, 16), (1, 24, 2), "do not tile by 16 x 64"),
        ((1, 16, 3, 16), (1, 16, 3), "do not tile by 16 x 64"),
        ((1, 16, 2, 16), (1, 16, 4), "do not fit together"),
    ],
)
def test_refuses_shapes_that_do_not_tile(blocks: tuple[int, ...], scales: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        relayout(torch.zeros(blocks, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8), "plain")


def test_refuses_nan_scales() -> None:
    blocks = torch.zeros(1, 16, 2, 16, dtype=torch.uint8)
    with pytest.raises(InputError, match="0xFF"):
        relayout(blocks, torch.full((1, 16, 2), 255, dtype=torch.uint8), "plain")

"""The layout of down by columns: exact round trips, places of codes and scales, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.kernels import mxfp4_columns, mxfp4_tiles


def draw(experts: int, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 255, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
def test_round_trip_is_exact_and_no_byte_larger(experts: int, chunks: int, pairs: int, width: int, seed: int) -> None:
    blocks, scales = draw(experts, chunks * pairs * 32, width * 32, seed)
    packed = mxfp4_columns.pack_columns(blocks, scales, pairs)
    assert packed.numel() == blocks.numel() + scales.numel()
    again = mxfp4_columns.unpack_columns(packed, width * 32, pairs)
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 127), st.integers(0, 63), st.integers(1, 15))
def test_a_code_and_a_scale_lie_where_the_kernel_reads_them(row: int, column: int, code: int) -> None:
    pairs = 2
    blocks = torch.zeros(1, 128, 2, 16, dtype=torch.uint8)
    scales = torch.full((1, 128, 2), 127, dtype=torch.uint8)
    blocks[0, row, column // 32, column % 32 // 2] = code << (4 * (column % 2))
    scales[0, row, column // 32] = 131
    packed = mxfp4_columns.pack_columns(blocks, scales, pairs)[0, row // 64]
    pair, in_pair, group, in_group = row % 64 // 32, row % 32, column // 8, column % 8
    lane = 4 * (in_pair % 8) + in_group // 2
    register = in_pair // 16 * 2 + in_pair % 16 // 8
    at = (group * pairs + pair) * 128 + lane * 4 + 2 * (in_group % 2)
    word = int(packed[at]) | int(packed[at + 1]) << 8
    assert word == int(mxfp4_tiles.spread_table()[register, code])
    tail = packed[8 * pairs * 128 :]
    assert (
        int(tail[(column // 32 * pairs + pair) * 32 + in_pair // 16 * 16 + in_pair % 8 * 2 + in_pair % 16 // 8]) == 131
    )
    assert int((tail == 131).sum()) == 1


def test_what_it_cannot_take_is_refused() -> None:
    blocks, scales = draw(1, 64, 64, 0)
    with pytest.raises(InputError, match="multiple of 3 \\* 32"):
        mxfp4_columns.pack_columns(blocks, scales, 3)
    with pytest.raises(InputError, match="255 is NaN"):
        mxfp4_columns.pack_columns(blocks, torch.full_like(scales, 255), 2)
    with pytest.raises(InputError, match="below the kernel's range"):
        mxfp4_columns.pack_columns(blocks | 1, torch.zeros_like(scales), 2)
    with pytest.raises(InputError, match="must be uint8"):
        mxfp4_columns.pack_columns(blocks.int(), scales, 2)
    with pytest.raises(InputError, match="scales \\[experts"):
        mxfp4_columns.pack_columns(blocks, scales[:, :32], 2)
    packed = mxfp4_columns.pack_columns(blocks, scales, 2)
    with pytest.raises(InputError, match="multiple of 32"):
        mxfp4_columns.unpack_columns(packed, 40, 2)
    with pytest.raises(InputError, match="must be uint8"):
        mxfp4_columns.unpack_columns(packed, 32, 2)


@given(st.integers(1, 40), st.integers(1, 50))
def test_spread_is_a_permutation_that_puts_every_stride_side_by_side(count: int, stride: int) -> None:
    order = mxfp4_columns.spread_order(count, stride).tolist()
    assert sorted(order) == list(range(count))
    for tile in range(count):  # as the kernel computes the place
        turn = tile % stride
        assert order[turn * (count // stride) + min(turn, count % stride) + tile // stride] == tile
    tiles = torch.arange(2 * count).reshape(2, count, 1)
    assert torch.equal(mxfp4_columns.spread(tiles, stride)[:, :, 0], tiles[:, order, 0])
    assert mxfp4_columns.spread(tiles, 0) is tiles

"""Offline re-layout of MXFP4 down weights by columns for the expert pass of one token, and its exact inverse.

Source: the checkpoint's packing (openai/gpt-oss): ``blocks`` uint8 [E, N, K/32, 16], low nibble = even column, and E8M0
``scales`` uint8 [E, N, K/32]. Target: uint8 [E, N / (32 P), (K / 8) * 128 P + (K / 32) * 32 P], P = ``pairs`` of 16-row
tiles in a *chunk* of rows. The size is the source's, to the byte (4.25 bits a weight). In a chunk all weights come
first: for each *group* of 8 columns, for each pair, 32 little-endian words; then the scales: for each block of 32
columns, for each pair, 32 bytes. So any run of groups of a chunk is contiguous, and so are their blocks' scales.

Word ``4 g + t`` of a pair holds eight codes: register ``r`` (row ``16 (r >> 1) + 8 (r & 1) + g`` of the pair) and half
``i``, column ``2 t + i`` of the group; the bits of a code lie as in ``mxfp4_tiles``. Scale byte ``16 h + 2 g + j`` is
that of row ``16 h + 8 j + g``.
"""

import torch

from workbench.errors import InputError
from workbench.kernels.mxfp4_tiles import BIT_PLACES, check_packing, spread_table

GROUP_COLUMNS = 8
BLOCK_COLUMNS = 32
PAIR_ROWS = 32


def chunk_bytes(columns: int, pairs: int) -> int:
    """Bytes of a chunk of ``pairs`` pairs of row tiles over ``columns`` columns."""
    return columns // GROUP_COLUMNS * pairs * 128 + columns // BLOCK_COLUMNS * pairs * 32


def pack_columns(blocks: torch.Tensor, scales: torch.Tensor, pairs: int) -> torch.Tensor:
    """Re-lay ``blocks`` and ``scales`` out for the kernel, lossless (see ``unpack_columns``).

    Raises InputError for a shape the kernel cannot take, and as ``check_packing``.
    """
    experts, rows, columns = check_packing(blocks, scales)
    if pairs < 1 or rows % (pairs * PAIR_ROWS):
        raise InputError(f"rows must be a multiple of {pairs} * {PAIR_ROWS}, not {rows}")
    chunks = rows // (pairs * PAIR_ROWS)
    spread = spread_table().to(blocks.device)
    out = torch.empty(experts, chunks, chunk_bytes(columns, pairs), dtype=torch.uint8, device=blocks.device)
    weight_bytes = columns // GROUP_COLUMNS * pairs * 128
    for expert in range(experts):  # one at a time: the unpacked codes take 8 bytes a weight
        codes = torch.stack((blocks[expert] & 0xF, blocks[expert] >> 4), dim=-1)
        codes = codes.reshape(chunks, pairs, 2, 2, 8, columns // GROUP_COLUMNS, 4, 2)  # tile, half, g; group, t, i
        halves = torch.zeros(chunks, pairs, 8, columns // GROUP_COLUMNS, 4, 2, dtype=torch.int32, device=blocks.device)
        for register in range(4):
            halves |= spread[register][codes[:, :, register >> 1, register & 1].long()]
        words = halves.permute(0, 3, 1, 2, 4, 5)  # chunk, group, pair, g, t, i
        as_bytes = torch.stack((words & 0xFF, words >> 8), dim=-1).to(torch.uint8)
        out[expert, :, :weight_bytes] = as_bytes.reshape(chunks, -1)
        factors = scales[expert].reshape(chunks, pairs, 2, 2, 8, columns // BLOCK_COLUMNS)
        out[expert, :, weight_bytes:] = factors.permute(0, 5, 1, 2, 4, 3).reshape(chunks, -1)
    return out


def unpack_columns(packed: torch.Tensor, columns: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of ``pack_columns``: (blocks, scales) in the checkpoint's packing."""
    if columns % BLOCK_COLUMNS or pairs < 1:
        raise InputError(f"columns must be a multiple of {BLOCK_COLUMNS} and pairs positive, not {columns} and {pairs}")
    if packed.ndim != 3 or packed.dtype != torch.uint8 or packed.shape[2] != chunk_bytes(columns, pairs):
        raise InputError(
            f"packed must be uint8 [experts, chunks, {chunk_bytes(columns, pairs)}], not {tuple(packed.shape)}"
        )
    experts, chunks = packed.shape[:2]
    groups, rows = columns // GROUP_COLUMNS, chunks * pairs * PAIR_ROWS
    weight_bytes = groups * pairs * 128
    blocks = torch.empty(experts, rows, columns // BLOCK_COLUMNS, 16, dtype=torch.uint8, device=packed.device)
    scales = torch.empty(experts, rows, columns // BLOCK_COLUMNS, dtype=torch.uint8, device=packed.device)
    for expert in range(experts):
        raw = packed[expert, :, :weight_bytes].reshape(chunks, groups, pairs, 8, 4, 2, 2).to(torch.int32)
        halves = (raw[..., 0] | (raw[..., 1] << 8)).permute(0, 2, 3, 1, 4, 5)  # chunk, pair, g, group, t, i
        codes = torch.empty(chunks, pairs, 2, 2, 8, groups, 4, 2, dtype=torch.uint8, device=packed.device)
        for register, places in enumerate(BIT_PLACES):
            code = torch.zeros_like(halves)
            for bit, place in enumerate(places):
                code |= ((halves >> place) & 1) << (3 - bit)
            codes[:, :, register >> 1, register & 1] = code.to(torch.uint8)
        pair = codes.reshape(rows, columns // BLOCK_COLUMNS, 16, 2)
        blocks[expert] = pair[..., 0] | (pair[..., 1] << 4)
        factors = packed[expert, :, weight_bytes:].reshape(chunks, columns // BLOCK_COLUMNS, pairs, 2, 8, 2)
        scales[expert] = factors.permute(0, 2, 3, 5, 4, 1).reshape(rows, columns // BLOCK_COLUMNS)
    return blocks, scales


def spread(tiles: torch.Tensor, stride: int) -> torch.Tensor:
    """Row tiles [E, tiles, ...] with every ``stride``-th one side by side: 0, stride, 2 stride, ..., then 1, stride +
    1, ... CTAs that take runs of about ``stride`` tiles then read side by side what they read at the same time. 0: as
    they are."""
    if stride < 0:
        raise InputError(f"stride must be 0 for none or positive, not {stride}")
    return tiles if stride == 0 else tiles[:, spread_order(tiles.shape[1], stride).to(tiles.device)].contiguous()


def spread_order(count: int, stride: int) -> torch.Tensor:
    """Which of ``count`` tiles lies at each place, int64 [count]."""
    return torch.cat([torch.arange(first, count, stride) for first in range(min(stride, count))])

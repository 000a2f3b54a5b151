"""Offline re-layout of MXFP4 expert weights for the CUDA expert pass (fp16 MMA fragments), and its exact inverse.

Source: the checkpoint's packing (openai/gpt-oss): ``blocks`` uint8 [E, N, K/32, 16], low nibble = even column, and E8M0
``scales`` uint8 [E, N, K/32]. Target: uint8 [E, N/16, (K/64) * 544]: for each tile of 16 rows, K/64 *units* of 512
weight bytes, then K/64 times 32 scale bytes. The size is the source's, to the byte (4.25 bits a weight). A tile, and
any run of units in it, is contiguous, so that one bulk copy fetches it.

In a unit, lane ``4 g + t`` owns 16 bytes: four little-endian words, word ``2 b + j`` for MMA step ``j`` of 32-column
block ``b``. A word holds eight codes: register ``r`` (row ``g + 8 (r & 1)``, column pair ``r >> 1``) and half ``i``,
column ``32 b + 8 t + 4 j + 2 (r >> 1) + i`` of the unit. The bits of each code sit where the kernel's decode
(kernels/cuda/mxfp4.cuh) finds them with one or two masks. A scale word of a unit holds row ``g`` (blocks 0, 1), then
row ``g + 8`` (blocks 0, 1).
"""

from typing import Literal

import torch

from workbench.errors import InputError

Rows = Literal["plain", "interleaved", "halves"]

UNIT_K = 64
UNIT_WEIGHT_BYTES = 512
UNIT_SCALE_BYTES = 32
UNIT_BYTES = UNIT_WEIGHT_BYTES + UNIT_SCALE_BYTES
TILE_ROWS = 16

# Where sign, exponent (high, low) and mantissa of a code go in its 16-bit half, for each of the four fragment
# registers.
BIT_PLACES = ((15, 11, 10, 9), (7, 3, 2, 1), (14, 13, 12, 8), (6, 5, 4, 0))


def row_order(rows: int, order: Rows) -> torch.Tensor:
    """Source row of each target row, int64 [rows].

    ``plain`` keeps the order. The other two pair a gate row with its up row (target rows ``g`` and ``g + 8`` of a
    tile), from a checkpoint that alternates them (``interleaved``, gpt-oss) or stacks them (``halves``: all gates,
    then all ups).
    """
    index = torch.arange(rows)
    if order == "plain":
        return index
    tile, in_tile = index // TILE_ROWS, index % TILE_ROWS
    channel, is_up = tile * 8 + in_tile % 8, in_tile // 8
    return 2 * channel + is_up if order == "interleaved" else channel + is_up * (rows // 2)


def check_packing(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, int]:
    """Experts, rows and columns of weights in the checkpoint's packing. Raises InputError for anything else, for a NaN
    scale (255), and for scale 0 (2^-127, subnormal in fp32) over a block that is not all zeros."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise InputError(f"blocks and scales must be uint8, not {blocks.dtype} and {scales.dtype}")
    if blocks.ndim != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise InputError(
            f"blocks must be [experts, rows, groups, 16] and scales [experts, rows, groups], "
            f"not {tuple(blocks.shape)} and {tuple(scales.shape)}"
        )
    if bool((scales == 255).any()):
        raise InputError("scales: 255 is NaN in E8M0; the checkpoint block is invalid")
    if bool(((scales == 0) & ((blocks & 0x77) != 0).any(dim=3)).any()):
        raise InputError("scales: 0 (2^-127) over a non-zero block is below the kernel's range; requantise the block")
    experts, rows, groups = blocks.shape[:3]
    return experts, rows, groups * 32


def spread_table() -> torch.Tensor:
    """int32 [4 registers, 16 codes]: the 16-bit pattern of each code in each register's place."""
    table = torch.zeros(4, 16, dtype=torch.int32)
    for register, places in enumerate(BIT_PLACES):
        for code in range(16):
            table[register, code] = sum(((code >> (3 - bit)) & 1) << place for bit, place in enumerate(places))
    return table


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """int32 0..65535 [...] to little-endian bytes uint8 [..., 2]."""
    return torch.stack((values & 0xFF, values >> 8), dim=-1).to(torch.uint8)


def pack_tiles(blocks: torch.Tensor, scales: torch.Tensor, *, order: Rows = "plain") -> torch.Tensor:
    """Re-lay ``blocks`` and ``scales`` out for the kernel: uint8 [E, N/16, (K/64) * 544], lossless (see
    ``unpack_tiles``).

    Raises InputError for a shape the kernel cannot take, and as ``check_packing``.
    """
    experts, rows, columns = check_packing(blocks, scales)
    if rows % TILE_ROWS or columns % UNIT_K:
        raise InputError(f"rows must be a multiple of 16 and columns of 64, not {rows} and {columns}")
    device = blocks.device
    source = row_order(rows, order).to(device)
    units, tiles = columns // UNIT_K, rows // TILE_ROWS
    out = torch.empty(experts, tiles, units * UNIT_BYTES, dtype=torch.uint8, device=device)
    spread = spread_table().to(device)
    for expert in range(experts):  # one at a time: the unpacked codes take 8 bytes a weight
        packed = blocks[expert][source]
        # tile, row half, g, unit, block, t, step, column pair, half
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(tiles, 2, 8, units, 2, 4, 2, 2, 2)
        halves = torch.zeros(tiles, 8, units, 2, 4, 2, 2, dtype=torch.int32, device=device)
        for register in range(4):
            chosen = codes[:, register & 1, :, :, :, :, :, register >> 1, :]
            halves |= spread[register][chosen.long()]
        words = halves.permute(0, 2, 1, 4, 3, 5, 6)  # tile, unit, g, t, block, step, half
        out[expert, :, : units * UNIT_WEIGHT_BYTES] = _as_bytes(words).reshape(tiles, -1)
        factors = scales[expert][source].reshape(tiles, 2, 8, units, 2).permute(0, 3, 2, 1, 4)
        out[expert, :, units * UNIT_WEIGHT_BYTES :] = factors.reshape(tiles, -1)
    return out


def unpack_tiles(packed: torch.Tensor, columns: int, *, order: Rows = "plain") -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of ``pack_tiles``: (blocks, scales) in the checkpoint's packing."""
    if columns % UNIT_K:
        raise InputError(f"columns must be a multiple of 64, not {columns}")
    units = columns // UNIT_K
    if packed.ndim != 3 or packed.dtype != torch.uint8 or packed.shape[2] != units * UNIT_BYTES:
        raise InputError(f"packed must be uint8 [experts, tiles, {units * UNIT_BYTES}], not {tuple(packed.shape)}")
    experts, tiles = packed.shape[:2]
    rows = tiles * TILE_ROWS
    device = packed.device
    target = row_order(rows, order).to(device)
    blocks = torch.empty(experts, rows, columns // 32, 16, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, rows, columns // 32, dtype=torch.uint8, device=device)
    for expert in range(experts):
        raw = packed[expert, :, : units * UNIT_WEIGHT_BYTES].reshape(tiles, units, 8, 4, 2, 2, 2, 2).to(torch.int32)
        halves = (raw[..., 0] | (raw[..., 1] << 8)).permute(0, 2, 1, 4, 3, 5, 6)  # tile, g, unit, block, t, step, half
        codes = torch.empty(tiles, 2, 8, units, 2, 4, 2, 2, 2, dtype=torch.uint8, device=device)
        for register, places in enumerate(BIT_PLACES):
            code = torch.zeros_like(halves)
            for bit, place in enumerate(places):
                code |= ((halves >> place) & 1) << (3 - bit)
            codes[:, register & 1, :, :, :, :, :, register >> 1, :] = code.to(torch.uint8)
        pairs = codes.reshape(rows, columns // 32, 16, 2)
        blocks[expert][target] = pairs[..., 0] | (pairs[..., 1] << 4)
        factors = packed[expert, :, units * UNIT_WEIGHT_BYTES :].reshape(tiles, units, 8, 2, 2).permute(0, 3, 2, 1, 4)
        scales[expert][target] = factors.reshape(rows, columns // 32)
    return blocks, scales


def pack_bias(bias: torch.Tensor, *, order: Rows = "plain") -> torch.Tensor:
    """Bias [E, N] in the row order of ``pack_tiles``, bf16."""
    return bias[:, row_order(bias.shape[1], order).to(bias.device)].to(torch.bfloat16).contiguous()

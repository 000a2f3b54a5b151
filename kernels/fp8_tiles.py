"""Offline re-layout of block-scaled FP8 matrices for the decode-step kernel of latent attention, and its exact inverse.

Target: uint8 [rows/16, columns/128, 2064]. A unit is 16 rows x 128 columns: four steps of 16 x 32 columns, 512 bytes
each (16 bytes for each lane of a warp), then fp32 scales of rows 0-7 and of rows 8-15 and 8 zero bytes. In a step lane
``4 g + t`` holds rows ``g`` and ``g + 8`` and columns ``8 t .. 8 t + 7`` as four 32-bit words; word ``w`` has the
codes, as they are, of columns ``8 t + 2 w`` and ``8 t + 2 w + 1``: of row ``g`` in its low half, of row ``g + 8`` in
its high half.

So each half is what one ``cvt.rn.f16x2.e4m3x2`` turns into a register of two fp16 numbers that m16n8k16 takes as it is
(every e4m3 number is an fp16 one, subnormals and -0 included). NaN codes would stay NaN; they are refused here, where
the matrix has a name.

Scales are those of block FP8 checkpoints: fp32, one a 128 x 128 block (DeepSeek-V3, arXiv 2412.19437, section 3.3).
"""

import torch

from workbench.decode.fp8 import BLOCK
from workbench.errors import InputError

TILE_ROWS = 16
UNIT_COLUMNS = 128
UNIT_WEIGHT_BYTES = TILE_ROWS * UNIT_COLUMNS
UNIT_BYTES = UNIT_WEIGHT_BYTES + 16


def pack_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``values`` e4m3 [rows, columns] and ``scales`` fp32 [ceil(rows/128), columns/128] as tiles, uint8 [rows/16,
    columns/128, 2064]; lossless (see ``unpack_fp8``).

    Matrices merged by rows are packed one by one and their tiles concatenated: blocks of parts need not align. Raises
    InputError for a shape or type that does not tile and for NaN codes.
    """
    rows, _ = _check("values", values, scales, TILE_ROWS)
    return _tiles(_codes(values), _row_scales(scales, rows))


def unpack_fp8(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact inverse of ``pack_fp8``: (values, scales). Raises InputError where the scales of a block differ."""
    codes, scales = _untiled(tiles)
    return codes.view(torch.float8_e4m3fn), _block_scales(scales)


def pack_gate_up(
    gate: torch.Tensor, gate_scales: torch.Tensor, up: torch.Tensor, up_scales: torch.Tensor
) -> torch.Tensor:
    """Two projections e4m3 [channels, columns] with their scales as uint8 [channels/8, columns/128, 2064]: rows 0-7 of
    a tile are gates, rows 8-15 the ups of the same channels. Raises InputError as ``pack_fp8`` does."""
    rows, _ = _check("gate", gate, gate_scales, 8)
    if (rows, gate.shape[1]) != (_check("up", up, up_scales, 8)[0], up.shape[1]):
        raise InputError(f"gate {list(gate.shape)} and up {list(up.shape)} must have the same extents")
    merged = [
        torch.stack((first.reshape(rows // 8, 8, -1), second.reshape(rows // 8, 8, -1)), dim=1).flatten(0, 2)
        for first, second in (
            (_codes(gate), _codes(up)),
            (_row_scales(gate_scales, rows), _row_scales(up_scales, rows)),
        )
    ]
    return _tiles(merged[0], merged[1])


def unpack_gate_up(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The exact inverse of ``pack_gate_up``: (gate, gate scales, up, up scales)."""
    codes, scales = _untiled(tiles)
    halves = [part.reshape(tiles.shape[0], 2, 8, -1) for part in (codes, scales)]
    gate, up = (halves[0][:, half].flatten(0, 1).contiguous().view(torch.float8_e4m3fn) for half in (0, 1))
    return gate, _block_scales(halves[1][:, 0].flatten(0, 1)), up, _block_scales(halves[1][:, 1].flatten(0, 1))


def pad_rows(values: torch.Tensor) -> torch.Tensor:
    """``values`` [rows, columns] with zero rows up to a multiple of 16, as ``pack_fp8`` takes them."""
    missing = -values.shape[0] % TILE_ROWS
    if not missing:
        return values
    zeros = torch.zeros(missing, *values.shape[1:], dtype=torch.uint8, device=values.device)
    return torch.cat((values.view(torch.uint8), zeros)).view(torch.float8_e4m3fn)


def _check(name: str, values: torch.Tensor, scales: torch.Tensor, multiple: int) -> tuple[int, int]:
    if values.ndim != 2 or values.dtype != torch.float8_e4m3fn:
        raise InputError(f"{name} must be float8_e4m3fn [rows, columns], not {values.dtype} {list(values.shape)}")
    rows, columns = values.shape
    if rows <= 0 or columns <= 0 or rows % multiple or columns % UNIT_COLUMNS:
        raise InputError(f"{name} of {rows} x {columns} does not tile by {multiple} x {UNIT_COLUMNS}")
    wanted = (-(-rows // BLOCK), columns // BLOCK)
    if scales.dtype != torch.float32 or tuple(scales.shape) != wanted:
        raise InputError(f"scales of {name} must be fp32 {list(wanted)}, not {scales.dtype} {list(scales.shape)}")
    if bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise InputError(f"{name}: 0x7f and 0xff are NaN in e4m3; the checkpoint block is invalid")
    return rows, columns


def _codes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _row_scales(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of every row, fp32 [rows, columns/128]."""
    return scales.repeat_interleave(BLOCK, dim=0)[:rows]


def _block_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, units], all rows of a block alike, as [ceil(rows/128), units]."""
    blocks = scales[::BLOCK].contiguous()
    if not torch.equal(_row_scales(blocks, scales.shape[0]).view(torch.int32), scales.contiguous().view(torch.int32)):
        raise InputError("tiles: scales differ inside a block of 128 rows; merged parts are unpacked one by one")
    return blocks


def _tiles(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, columns] and scales fp32 [rows, units], alike in every eight rows, as tiles."""
    tiles, units = codes.shape[0] // TILE_ROWS, codes.shape[1] // UNIT_COLUMNS
    # tile, row half, g, unit, step, t, word, column of the word -> unit, step, g, t, word, row half, column
    ordered = codes.reshape(tiles, 2, 8, units, 4, 4, 4, 2).permute(0, 3, 4, 2, 5, 6, 1, 7)
    out = torch.zeros(tiles, units, UNIT_BYTES, dtype=torch.uint8, device=codes.device)
    out[..., :UNIT_WEIGHT_BYTES] = ordered.reshape(tiles, units, UNIT_WEIGHT_BYTES)
    of_eight = scales[::8].reshape(tiles, 2, units).permute(0, 2, 1).contiguous()
    out[..., UNIT_WEIGHT_BYTES : UNIT_WEIGHT_BYTES + 8] = of_eight.view(torch.uint8)
    return out


def _untiled(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [rows, columns] and scales fp32 [rows, units] of ``tiles``."""
    if tiles.ndim != 3 or tiles.dtype != torch.uint8 or tiles.shape[2] != UNIT_BYTES:
        raise InputError(f"tiles must be uint8 [tiles, units, {UNIT_BYTES}], not {tiles.dtype} {list(tiles.shape)}")
    count, units = tiles.shape[:2]
    # tile, unit, step, g, t, word, row half, column of the word
    ordered = tiles[..., :UNIT_WEIGHT_BYTES].reshape(count, units, 4, 8, 4, 4, 2, 2)
    codes = ordered.permute(0, 6, 3, 1, 2, 4, 5, 7).reshape(count * TILE_ROWS, units * UNIT_COLUMNS)
    of_eight = tiles[..., UNIT_WEIGHT_BYTES : UNIT_WEIGHT_BYTES + 8].contiguous().view(torch.float32)
    scales = of_eight.permute(0, 2, 1).reshape(count * 2, units).repeat_interleave(8, dim=0)
    return codes.contiguous(), scales

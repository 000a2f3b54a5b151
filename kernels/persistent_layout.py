"""Offline re-layout of bf16 matrices into tensor-core fragment order for the decode-step kernel, and its exact inverse.

Target: bf16 [rows/16, columns/16, 32, 8]: tiles of 16 rows, in a tile steps of 16 columns, in a step the 16 bytes of
each lane of a warp, as ``mma.m16n8k16`` takes its A operand. Lane ``4 g + t`` holds rows ``g`` and ``g + 8`` and the
four neighbouring columns ``4 t .. 4 t + 3``: register ``r`` is row ``g + 8 (r & 1)``, columns ``4 t + 2 (r >> 1)`` and
the next. (The instruction numbers its columns otherwise; a product does not mind as long as the activation follows.)
A tile, and any run of steps in it, is contiguous, so one bulk copy fetches it. Same size, nothing lost.
"""

import torch

from workbench.errors import InputError

TILE_ROWS = 16
STEP_COLUMNS = 16


def pack_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """Matrix [rows, columns] as bf16 tiles [rows/16, columns/16, 32, 8]. Raises InputError for a shape that does not
    tile."""
    if matrix.ndim != 2 or matrix.dtype != torch.bfloat16:
        raise InputError(f"matrix must be bf16 [rows, columns], not {matrix.dtype} {list(matrix.shape)}")
    rows, columns = matrix.shape
    if rows % TILE_ROWS or columns % STEP_COLUMNS:
        raise InputError(f"matrix of {rows} x {columns} does not tile by {TILE_ROWS} x {STEP_COLUMNS}")
    # tile, row half, g, step, t, column pair, element -> tile, step, g, t, column pair, row half, element
    split = matrix.reshape(rows // 16, 2, 8, columns // 16, 4, 2, 2)
    return split.permute(0, 3, 2, 4, 5, 1, 6).reshape(rows // 16, columns // 16, 32, 8).contiguous()


def unpack_matrix(tiles: torch.Tensor) -> torch.Tensor:
    """The exact inverse of ``pack_matrix``: bf16 [rows, columns]."""
    if tiles.ndim != 4 or tiles.dtype != torch.bfloat16 or tuple(tiles.shape[2:]) != (32, 8):
        raise InputError(f"tiles must be bf16 [tiles, steps, 32, 8], not {tiles.dtype} {list(tiles.shape)}")
    count, steps = tiles.shape[:2]
    split = tiles.reshape(count, steps, 8, 4, 2, 2, 2)
    return split.permute(0, 5, 2, 1, 3, 4, 6).reshape(count * 16, steps * 16).contiguous()

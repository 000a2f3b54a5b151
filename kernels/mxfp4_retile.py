"""MXFP4 experts from the Triton kernels' form (mxfp4_layout) to the CUDA kernels' tiles (mxfp4_tiles): the same bits.

Both forms have tiles of 16 rows by 64 columns, and a lane owns the same 64 codes of a tile in both; only places inside
the lane's 16 bytes differ. So words are moved by masks and shifts, two codes at once (the halves of a word), for many
experts in one operation: a model of 19,200 experts takes seconds, where unpacking each of them takes a minute.
"""

import torch

from workbench.errors import InputError
from workbench.kernels.mxfp4_layout import MAGNITUDE_BIT, SIGN_BIT
from workbench.kernels.mxfp4_tiles import BIT_PLACES, UNIT_BYTES, UNIT_WEIGHT_BYTES

EXPERTS_AT_ONCE = 64
"""Bounds the scratch memory: four words of every lane and what a shift leaves."""

_HALVES = 0x00010001


def retile(words: torch.Tensor, scale_words: torch.Tensor) -> torch.Tensor:
    """Return uint8 [E, N/16, (K/64) * 544] of ``words`` int32 [E, N/16, K/64, 128] and their scales [E, N/16, K/64, 8].

    Rows keep their order, whichever it is: gate and up rows are paired alike in both forms. Raises InputError as
    ``mxfp4_tiles.pack_tiles`` does: for a scale of 255 (NaN), and of 0 over a block that is not all zeros.
    """
    experts, tiles, chunks, _ = words.shape
    scales = scale_words.contiguous().view(torch.uint8).view(experts, tiles, chunks, 8, 2, 2)
    if bool((scales == 255).any()):
        raise InputError("scales: 255 is NaN in E8M0; the checkpoint block is invalid")
    empty = scales == 0
    if bool(empty.any()) and bool((empty & _filled(words.view(experts, tiles, chunks, 8, 4, 2, 2))).any()):
        raise InputError("scales: 0 (2^-127) over a non-zero block is below the kernel's range; requantise the block")
    out = torch.empty(experts, tiles, chunks * UNIT_BYTES, dtype=torch.uint8, device=words.device)
    weight_bytes = chunks * UNIT_WEIGHT_BYTES
    for start in range(0, experts, EXPERTS_AT_ONCE):
        part = slice(start, start + EXPERTS_AT_ONCE)
        moved = _moved(words[part].view(-1, tiles, chunks, 8, 4, 2, 2))
        out[part, :, :weight_bytes] = moved.view(torch.uint8).view(-1, tiles, weight_bytes)
        # bytes (g, block, row half) -> (g, row half, block)
        out[part, :, weight_bytes:] = scales[part].transpose(-1, -2).reshape(len(moved), tiles, -1)
    return out


def _moved(words: torch.Tensor) -> torch.Tensor:
    """Words (..., g, c, row half, word half) of pairs (b, h) as words (..., g, c, b, h) of registers."""
    out = torch.zeros(*words.shape[:5], 4, dtype=torch.int32, device=words.device)
    for pair in range(4):
        # sign, then the three magnitude bits from the highest
        bits = (SIGN_BIT[pair], *(MAGNITUDE_BIT[pair] + place for place in (2, 1, 0)))
        word = out[..., pair]
        for register, places in enumerate(BIT_PLACES):
            source = words[..., register & 1, register >> 1]
            for bit, place in zip(bits, places, strict=True):
                word |= (source >> bit & _HALVES) << place
    return out


def _filled(words: torch.Tensor) -> torch.Tensor:
    """Which blocks of words (..., g, c, row half, word half) hold anything but zeros, as (..., g, block, row half)."""
    masks = [sum(7 << MAGNITUDE_BIT[pair] for pair in (2 * block, 2 * block + 1)) * _HALVES for block in (0, 1)]
    return torch.stack([(words & mask != 0).any(-1).any(-2) for mask in masks], dim=-2)

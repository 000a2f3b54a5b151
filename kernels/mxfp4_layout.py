"""Offline re-layout of MXFP4 weights for the expert kernels: the same bits in another order, nothing added.

Checkpoint form (OCP MX v1.0, openai/gpt-oss): ``blocks`` uint8[E, N, K/32, 16], two E2M1 codes a byte, low nibble =
even index; ``scales`` uint8[E, N, K/32], E8M0 (value 2^(byte-127)).

Kernel form: 16 output rows by 64 contraction columns make one tile of 512 bytes, one 16-byte load a lane of a warp,
in the order in which ``mma.m16n8k16`` wants its A operand: lane = 4 g + c holds rows g and g + 8, and of each half
block of 32 columns the columns 8 c .. 8 c + 7. A 32-bit word holds four *pairs* of codes; the two codes of a pair
sit at the same bit positions of the low and the high half-word, so one shift and one mask turn a word into two bf16
numbers, each its value times 2^-126:

=====  ==================  =============================================
pair   bits (sign, e e m)  decode
=====  ==================  =============================================
0      15, 8 7 6           ``w & M``
1      12, 5 4 3           ``(w << 3) & M``
2      14, 2 1 0           ``(w << 1) & SIGN | (w << 6) & MAGNITUDE``
3      13, 11 10 9         ``(w << 2) & SIGN | (w >> 3) & MAGNITUDE``
=====  ==================  =============================================

With M = SIGN | MAGNITUDE = 0x81C081C0: 11 integer operations per 8 weights, 1.4 per weight, of which 4 are left
shifts that run as multiply-adds off the integer pipe. No four bit patterns of this shape tile a half-word, so 8
operations per word are out of reach.

Word (c, row half, word half), pair (b, h), half-word e holds the code of row 16 tile + 8 (row half) + g and column
64 chunk + 32 b + 8 c + 4 h + 2 (word half) + e. Scales: one 32-bit word per (tile, chunk, g); byte 2 b + (row half).
"""

from typing import Literal

import torch

from workbench.errors import InputError

ROWS = 16
COLUMNS = 64
SIGN_BIT = (15, 12, 14, 13)
MAGNITUDE_BIT = (6, 3, 0, 9)
"""Where the sign, and the lowest of the three other bits, of each pair's codes are in a half-word."""

RowOrder = Literal["plain", "interleaved", "stacked"]


def _tile_rows(rows: int, order: RowOrder, device: torch.device) -> torch.Tensor:
    """Return the checkpoint row behind each kernel row.

    Gate and up rows are paired so that one lane holds both: rows 0..7 of a tile are gate rows, 8..15 the same up rows.
    """
    index = torch.arange(rows, device=device)
    if order == "plain":
        return index
    tile, half, g = index // ROWS, index % ROWS // 8, index % 8
    unit = tile * 8 + g
    return 2 * unit + half if order == "interleaved" else unit + half * (rows // 2)


def _check(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, int]:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise InputError(f"mxfp4 layout: blocks and scales must be uint8, they are {blocks.dtype} and {scales.dtype}")
    if blocks.dim() != 4 or blocks.shape[3] != 16 or tuple(scales.shape) != tuple(blocks.shape[:3]):
        raise InputError(
            f"mxfp4 layout: blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not fit together",
            hint="blocks [experts, rows, groups, 16], scales [experts, rows, groups]",
        )
    experts, rows, groups = scales.shape
    if rows % ROWS or groups % 2:
        raise InputError(
            f"mxfp4 layout: {rows} rows x {groups * 32} columns do not tile by {ROWS} x {COLUMNS}",
            hint="rows must be a multiple of 16, columns of 64",
        )
    return experts, rows, groups


def relayout(blocks: torch.Tensor, scales: torch.Tensor, order: RowOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(words, scale_words)`` in kernel form, on the input's device.

    ``words``: int32[E, N/16, K/64, 128]; ``scale_words``: int32[E, N/16, K/64, 8]. Sizes in bytes equal the
    checkpoint's. ``order``: ``plain`` keeps rows (down projection); ``interleaved`` (gpt-oss: even rows gate, odd
    rows up) and ``stacked`` (all gate rows, then all up rows) pair gate and up rows.

    Raises InputError for shapes that do not tile, and for a scale of 0xFF (NaN), which no weight can carry.
    """
    experts, rows, groups = _check(blocks, scales)
    if bool((scales == 0xFF).any()):
        raise InputError("mxfp4 layout: scales hold 0xFF, the E8M0 NaN", hint="the checkpoint is damaged")
    source = _tile_rows(rows, order, blocks.device)
    tiles, chunks = rows // ROWS, groups // 2
    words = torch.empty(experts, tiles, chunks, 128, dtype=torch.int32, device=blocks.device)
    scale_words = torch.empty(experts, tiles, chunks, 8, dtype=torch.int32, device=blocks.device)
    for expert in range(experts):  # one at a time: the unpacked codes of all experts may not fit
        packed = blocks[expert][source].view(rows, groups * 16)
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).view(tiles, 2, 8, chunks, 2, 4, 2, 2, 2)
        # (tile, row half, g, chunk, b, c, h, word half, e) -> (tile, chunk, g, c, row half, word half, b, h, e)
        codes = codes.permute(0, 3, 2, 5, 1, 7, 4, 6, 8).to(torch.int32)
        word = torch.zeros(codes.shape[:6], dtype=torch.int32, device=blocks.device)
        for pair in range(4):
            for half in range(2):
                code = codes[..., pair // 2, pair % 2, half]
                bits = (code >> 3) << SIGN_BIT[pair] | (code & 7) << MAGNITUDE_BIT[pair]
                word |= bits << (16 * half)
        words[expert] = word.view(tiles, chunks, 128)
        grouped = scales[expert][source].view(tiles, 2, 8, chunks, 2).permute(0, 3, 2, 4, 1).to(torch.int32)
        flat = grouped.reshape(tiles, chunks, 8, 4)
        scale_words[expert] = flat[..., 0] | flat[..., 1] << 8 | flat[..., 2] << 16 | flat[..., 3] << 24
    return words, scale_words


def restore(words: torch.Tensor, scale_words: torch.Tensor, order: RowOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert ``relayout``: return ``(blocks, scales)`` in the checkpoint form, bit for bit."""
    experts, tiles, chunks, _ = words.shape
    rows, groups = tiles * ROWS, chunks * 2
    source = _tile_rows(rows, order, words.device)
    blocks = torch.empty(experts, rows, groups, 16, dtype=torch.uint8, device=words.device)
    scales = torch.empty(experts, rows, groups, dtype=torch.uint8, device=words.device)
    for expert in range(experts):
        word = words[expert].view(tiles, chunks, 8, 4, 2, 2)
        halves = []
        for pair in range(4):
            for half in range(2):
                bits = word >> (16 * half)
                halves.append((bits >> SIGN_BIT[pair] & 1) << 3 | bits >> MAGNITUDE_BIT[pair] & 7)
        codes = torch.stack(halves, dim=-1).view(tiles, chunks, 8, 4, 2, 2, 2, 2, 2)
        codes = codes.permute(0, 4, 2, 1, 6, 3, 7, 5, 8).reshape(rows, groups * 32).to(torch.uint8)
        blocks[expert, source] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(rows, groups, 16)
        shifts = torch.tensor([0, 8, 16, 24], device=words.device)
        flat = (scale_words[expert][..., None] >> shifts & 0xFF).view(tiles, chunks, 8, 2, 2)
        scales[expert, source] = flat.permute(0, 4, 2, 1, 3).reshape(rows, groups).to(torch.uint8)
    return blocks, scales


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of checkpoint-form weights, ``dtype``[E, N, K]: the reference the kernels are held to."""
    _check(blocks, scales)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=dtype, device=blocks.device)
    table = torch.cat((magnitudes, -magnitudes))
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2).long()
    exponents = (scales.to(torch.int32) - 127)[..., None]
    return torch.ldexp(table[codes], exponents).to(dtype).flatten(-2)

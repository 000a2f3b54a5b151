"""Routed experts that stay in MXFP4: the checkpoint's bits, re-laid out once for the kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from workbench.decode.experts import Experts, Half
from workbench.decode.model import Block, Target
from workbench.decode.mxfp4 import BLOCK, MxFp4
from workbench.kernels.mxfp4_layout import relayout


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One layer's experts in kernel form (workbench/kernels/mxfp4_layout.py), biases beside them in bfloat16.

    ``gate_up_bias`` [E, 2, inter], gate first; ``down_bias`` [E, hidden].
    """

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in (*self.gate_up, *self.down))

    def rows(self, half: Half, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the projections of experts ``ids`` [...], [..., N, K] in ``dtype``, gate rows first."""
        words, scale_words = getattr(self, half)
        flat = ids.flatten()
        values = expand(words[flat], scale_words[flat], half, dtype)
        return values.view(*ids.shape, *values.shape[1:])


def pack(gate_up: MxFp4, down: MxFp4, ffn: Experts) -> PackedExperts:
    """Re-lay out one layer; ``gate_up`` is [E, 2*inter, hidden] with all gate rows first. Biases are ``ffn``'s.

    Raises InputError for extents that the kernels' tiles of 16 rows by 64 columns do not cover.
    """
    return PackedExperts(
        gate_up=relayout(*_grouped(gate_up), "stacked"),
        down=relayout(*_grouped(down), "plain"),
        gate_up_bias=bias_rows(ffn.gate_up_bias, 2),
        down_bias=bias_rows(ffn.down_bias, 1),
    )


def expand(words: Tensor, scale_words: Tensor, half: Half, dtype: torch.dtype) -> Tensor:
    """Return the values [n, N, K] of n experts in kernel form; no step depends on the data, so a graph can hold it.

    The kernels' own decoding in plain torch: a masked shift of a word is two bfloat16 numbers, each its value times
    2^-126 (mxfp4_layout.py). As there, a scale byte of 0 counts as zero.
    """
    count, tiles, chunks, _ = words.shape
    pairs = (
        words & _BOTH,
        words << 3 & _BOTH,
        words << 1 & _SIGNS | words << 6 & _MAGNITUDES,
        words << 2 & _SIGNS | words >> 3 & _MAGNITUDES,
    )
    # (n, tile, chunk, g, c, row half, word half, b, h, e)
    values = torch.stack(pairs, -1).view(torch.bfloat16).view(count, tiles, chunks, 8, 4, 2, 2, 2, 2, 2)
    values = values.to(dtype) * 2.0**126
    exponents = scale_words.unsqueeze(-1) >> _byte_shifts(words.device) & 0xFF
    scales = (exponents << 23).view(torch.float32).to(dtype).view(count, tiles, chunks, 8, 2, 2)
    # to (n, [row half,] tile, [row half,] g, chunk, b, c, h, word half, e): gate and up are the halves of a tile
    rows = (0, 5, 1, 3) if half == "gate_up" else (0, 1, 5, 3)
    spread = scales.permute(*rows, 2, 4)[..., None, None, None, None]
    return (values.permute(*rows, 2, 7, 4, 8, 6, 9) * spread).reshape(count, tiles * 16, chunks * 64)


@cache
def _byte_shifts(device: torch.device) -> Tensor:
    """Return the shifts to the four bytes of a word: made once, since a graph must not copy from the host."""
    return torch.tensor((0, 8, 16, 24), dtype=torch.int32, device=device)


_BOTH, _SIGNS, _MAGNITUDES = -0x7E3F7E40, -0x7FFF8000, 0x01C001C0
"""Sign and magnitude bits of the two bfloat16 numbers that one masked word is; the signs', the magnitudes'."""


def _grouped(q: MxFp4) -> tuple[Tensor, Tensor]:
    return q.blocks.view(*q.scales.shape, BLOCK // 2), q.scales


def bias_rows(bias: Tensor | None, parts: int) -> Tensor | None:
    """Return ``bias`` [E, parts * n] as the kernels take it: bfloat16, [E, parts, n] or, of one part, [E, n]."""
    if bias is None:
        return None
    values = bias.detach().to(torch.bfloat16)
    return values.view(len(values), parts, -1).contiguous() if parts > 1 else values.contiguous()


def expert_layers(target: Target) -> Iterator[tuple[int, Experts]]:
    """Yield the layers with routed experts, in order."""
    for index, block in enumerate(target.blocks):
        if isinstance(block, Block) and isinstance(block.ffn, Experts):
            yield index, block.ffn


def drop_experts(ffn: Experts) -> None:
    """Leave ``ffn``'s expert matrices without storage: a packed copy stands in for them."""
    for name in ("gate_up", "down"):
        shape = getattr(ffn, name).shape
        setattr(ffn, name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))

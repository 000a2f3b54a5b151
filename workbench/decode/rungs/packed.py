"""Routed experts that stay in MXFP4: the checkpoint's bits, re-laid out once for the kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.decode.experts import Experts
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

"""The straight-through estimator (Bengio et al., arXiv 1308.3432): a rounding forward, the identity backward."""

from typing import Any

import torch
from torch import Tensor


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded`` bit for bit; its gradient goes unchanged to ``x`` (same shape and dtype).

    ``x + (rounded - x).detach()`` would round twice and turn infinities into NaN.
    """
    return _StraightThrough.apply(x, rounded.detach())  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Nothing to save: the gradient depends on neither tensor."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

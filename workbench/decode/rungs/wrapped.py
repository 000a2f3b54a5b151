"""A forward around another one: all is passed on; who wraps changes what it is there for."""

import torch
from torch import Tensor

from workbench.decode.model import Scores
from workbench.decode.rungs.forward import Forward


class WrappedForward:
    """Passes everything on to the forward it is around."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._forward.length

    @length.setter
    def length(self, value: int) -> None:
        self._forward.length = value

    @property
    def device(self) -> torch.device:
        """The forward's device."""
        return self._forward.device

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """The forward's caches."""
        return self._forward.caches()

    def prefill(self, tokens: Tensor) -> Scores:
        """Run the prompt."""
        return self._forward.prefill(tokens)

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Join them as the forward does."""
        return self._forward.assemble(last, drafts)

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward."""
        return self._forward.score(tokens)

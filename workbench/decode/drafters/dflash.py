"""Draft a whole block in one pass with the DFlash model."""

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.dflash import DFlashModel, KeyValue
from workbench.decode.drafters.protocol import Proposal, TargetFeatures
from workbench.decode.model import Target
from workbench.decode.sampling import draw, probabilities
from workbench.errors import InputError


class DFlashDrafter:
    """Keeps each draft layer's keys and values of the last ``window`` committed positions; fills one block a step.

    Positions of a block are drawn independently of each other, from the distributions that ``probs`` states, so
    rejection sampling stays lossless.
    """

    name = "dflash"

    def __init__(
        self, target: Target, model: DFlashModel, *, depth: int | None = None, stuck_positions: bool = False
    ) -> None:
        """``depth``: drafted tokens used per step, at most and by default the block without its anchor.

        ``stuck_positions`` is the ``block-positions`` fault: all masks are told the first one's position, so all guess
        the same token.
        """
        limit = model.shape.block - 1
        if depth is not None and not 1 <= depth <= limit:
            raise InputError(
                f"dflash: depth={depth} must be 1 to {limit}; the drafter was trained on blocks of {limit + 1}"
            )
        self.max_draft = depth or limit
        self._target, self._model, self._stuck = target, model, stuck_positions
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._length = 0
        self._context: list[KeyValue] = []
        self._anchor: Tensor | None = None

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Turn the new positions' features into keys and values, and keep the window's worth."""
        if features is None:
            raise InputError("dflash: the engine must pass target features")
        rope = self._target.rope[:, self._length : self._length + len(features.taps)]
        fresh = self._model.context(features.taps[None], rope)
        if self._context:
            pairs = zip(self._context, fresh, strict=True)
            fresh = [(torch.cat((old[0], new[0]), 2), torch.cat((old[1], new[1]), 2)) for old, new in pairs]
        window = self._model.shape.window
        self._context = [(keys[:, :, -window:], values[:, :, -window:]) for keys, values in fresh]
        self._length += len(features.taps)
        self._anchor = tokens[-1:]

    @torch.no_grad()
    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Fill one block behind the last committed token; nothing where it would reach past the model's positions."""
        if self._anchor is None:
            raise InputError("dflash: propose was called before observe")
        block = self._model.shape.block
        rope = self._target.rope[:, self._length : self._length + block]
        if rope.shape[1] < block:
            return Proposal(torch.empty(0, dtype=torch.int64, device=self._anchor.device))
        if self._stuck:
            rope = rope[:, [0, *[1] * (block - 1)]]
        visible = self._context[0][0].shape[2] + block
        allowed = torch.ones(1, 1, 1, block, visible, dtype=torch.bool, device=self._anchor.device)
        states = self._model.fill(self._target.embed(self._anchor)[None], rope, self._context, allowed)
        logits = F.linear(states[0, 0, : self.max_draft], self._target.head_weight).float()
        if temperature > 0:
            probs = probabilities(logits, temperature)
            return Proposal(draw(probs, generator), probs)
        return Proposal(logits.argmax(-1))

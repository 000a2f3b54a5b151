"""Draft a chain of tokens with the model's own MTP head, iterated on its own output."""

import torch
from torch import Tensor

from workbench.decode.cache import LayerCache
from workbench.decode.drafters.protocol import Proposal, TargetFeatures
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.sampling import draw, probabilities
from workbench.errors import InputError


class MtpDrafter:
    """One pass of the head per drafted token; its cache row i holds (target state i, token i+1).

    Rows made from the target's states are kept; rows of a draft chain, made from the head's own states, are
    overwritten by the next ``observe``.
    """

    name = "mtp"

    def __init__(self, target: Target, head: MtpHead, *, depth: int, capacity: int) -> None:
        """``depth``: drafted tokens per step. ``capacity``: positions of the longest sequence."""
        if depth < 1:
            raise InputError(f"mtp: depth={depth} must be positive")
        self.max_draft = depth
        self._target, self._head = target, head
        shape = (1, head.attention.shape.kv_heads, capacity + depth)
        self._cache = LayerCache(
            torch.zeros(*shape, head.attention.shape.qk_dim, device=target.device, dtype=target.dtype),
            torch.zeros(*shape, head.attention.shape.v_dim, device=target.device, dtype=target.dtype),
        )
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._rows = 0
        self._state: Tensor | None = None

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Run the head over the newly committed rows; the last state predicts the first draft."""
        if features is None:
            raise InputError("mtp: the engine must pass target features")
        count = len(features.hidden)
        follow = self._target.embed(tokens[len(tokens) - count :])
        self._state = self._run(features.hidden, follow, self._rows)[-1:]
        self._rows += count

    @torch.no_grad()
    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Draft ``max_draft`` tokens, each conditioned on the ones before it."""
        if self._state is None:
            raise InputError("mtp: propose was called before observe")
        state, tokens, probs = self._state, [], []
        for step in range(self.max_draft):
            logits = self._target.logits(state)
            if temperature > 0:
                probs.append(probabilities(logits, temperature))
                token = draw(probs[-1], generator)
            else:
                token = logits.argmax(-1)
            tokens.append(token)
            if step + 1 < self.max_draft:
                state = self._run(state, self._target.embed(token), self._rows + step)
        return Proposal(torch.cat(tokens), torch.cat(probs) if probs else None)

    def _run(self, state: Tensor, token: Tensor, start: int) -> Tensor:
        rope = self._target.rope[:, start : start + len(state)]
        return self._head.cached(state[None], token[None], rope, self._cache, start)[0]

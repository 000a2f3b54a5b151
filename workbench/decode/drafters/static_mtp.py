"""The MTP drafter in fixed shapes: buffers that stay where they are, positions on the device, CUDA graphs."""

from typing import Protocol

import torch
from torch import Tensor

from workbench.decode.cache import LayerCache
from workbench.decode.drafters.protocol import Proposal, TargetFeatures
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.replay import Work, captured
from workbench.decode.sampling import first_arrival, probabilities
from workbench.errors import InputError


class MtpForm(Protocol):
    """How a pass of the head is computed, and the model's head behind it. It owns the cache."""

    def run(self, state: Tensor, tokens: Tensor, rows: Tensor, ahead: int) -> Tensor:
        """Return the states [T, hidden] of ``state`` [T, hidden] and ``tokens`` [T], rows ``rows`` + ``ahead`` onwards.

        ``rows`` int32 [1] is on the device.
        """

    def logits(self, state: Tensor) -> Tensor:
        """Return float32 [1, V] of ``state`` [1, hidden]."""

    def choose(self, state: Tensor) -> Tensor:
        """Return the most likely token, an integer [1]."""


class PlainMtp:
    """The head in plain torch; attention reads the whole cache of ``slots`` rows under a mask."""

    def __init__(self, target: Target, head: MtpHead, slots: int) -> None:
        shape, device, dtype = head.attention.shape, target.device, target.dtype
        self._target, self._head = target, head
        self._cache = LayerCache(
            torch.zeros(1, shape.kv_heads, slots, shape.qk_dim, device=device, dtype=dtype),
            torch.zeros(1, shape.kv_heads, slots, shape.v_dim, device=device, dtype=dtype),
        )
        self._rope = target.rope[:, :slots]
        self._columns = torch.arange(slots, device=device)

    def run(self, state: Tensor, tokens: Tensor, rows: Tensor, ahead: int) -> Tensor:
        """Run the head."""
        positions = self._columns[ahead : ahead + len(tokens)] + rows
        seen = self._columns <= positions[:, None]
        if (window := self._head.attention.window) is not None:
            seen &= self._columns > positions[:, None] - window
        rope, token = self._rope.index_select(1, positions), self._target.embed(tokens)
        return self._head.fixed(state[None], token[None], rope, self._cache, positions, seen)[0]

    def logits(self, state: Tensor) -> Tensor:
        """Run norm and head."""
        return self._target.logits(state)

    def choose(self, state: Tensor) -> Tensor:
        """Run norm, head and argmax."""
        return self._target.logits(state).argmax(-1)


class StaticMtpDrafter:
    """Drafts what ``MtpDrafter`` drafts: one graph for each number of newly committed rows, one for the chain.

    A proposal's tensors are overwritten by the next one.
    """

    name = "mtp"

    @torch.no_grad()
    def __init__(self, target: Target, form: MtpForm, *, depth: int, temperature: float = 0.0, capture: bool) -> None:
        """``depth``: as of ``MtpDrafter``. ``temperature``: what the chain is drawn at. ``capture``: replay graphs."""
        if depth < 1:
            raise InputError(f"mtp: depth={depth} must be positive")
        self.max_draft = depth
        self._form, self._temperature = form, temperature
        device, dtype, widest = target.device, target.dtype, depth + 1
        self._rows = torch.zeros(1, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(widest, target.spec.hidden, device=device, dtype=dtype)
        self._tokens = torch.zeros(widest, dtype=torch.int64, device=device)
        self._state = torch.zeros(1, target.spec.hidden, device=device, dtype=dtype)
        drafts = torch.zeros(depth, dtype=torch.int64, device=device)
        drawn = (depth, target.spec.vocab)
        self._race = torch.ones(drawn, device=device) if temperature > 0 else None
        self._proposal = Proposal(drafts, torch.zeros(drawn, device=device) if temperature > 0 else None)
        works: list[list[Work]] = [[self._observing(count)] for count in range(1, widest + 1)]
        works.append([self._chain])
        if capture:
            works = captured(works, device, reset=self.reset)
        *self._observers, (self._draft,) = works
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the sequence."""
        self._rows.zero_()
        self._ready = False

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Run the head over the newly committed rows; the last state predicts the first draft."""
        if features is None:
            raise InputError("mtp: the engine must pass target features")
        widest, count = len(self._tokens), len(features.hidden)
        follow = tokens[len(tokens) - count :]
        for start in range(0, count, widest):
            end = min(start + widest, count)
            self._hidden[: end - start].copy_(features.hidden[start:end])
            self._tokens[: end - start].copy_(follow[start:end])
            for work in self._observers[end - start - 1]:
                work()
        self._ready = True

    @torch.no_grad()
    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Draft ``max_draft`` tokens, each conditioned on the ones before it."""
        if not self._ready:
            raise InputError("mtp: propose was called before observe")
        if temperature != self._temperature:
            raise InputError(f"mtp: built to draft at temperature {self._temperature}, not at {temperature}")
        if self._race is not None:
            for step in range(self.max_draft):  # one at a time, as the drafter of free shapes draws
                self._race[step : step + 1].exponential_(generator=generator)
        self._draft()
        return self._proposal

    def _observing(self, count: int) -> Work:
        def observe() -> None:
            states = self._form.run(self._hidden[:count], self._tokens[:count], self._rows, 0)
            self._state.copy_(states[-1:])
            self._rows.add_(count)

        return observe

    def _chain(self) -> None:
        state, drafts, probs = self._state, self._proposal.tokens, self._proposal.probs
        for step in range(self.max_draft):
            if probs is None or self._race is None:
                token = self._form.choose(state)
            else:
                row = probabilities(self._form.logits(state), self._temperature)
                probs[step : step + 1].copy_(row)
                token = first_arrival(row, self._race[step : step + 1])
            drafts[step : step + 1].copy_(token)
            if step + 1 < self.max_draft:
                state = self._form.run(state, token, self._rows, step)

"""The DFlash drafter in fixed shapes: a ring of context keys and values, positions on the device, CUDA graphs."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.dflash import DFlashModel, KeyValue
from workbench.decode.drafters.protocol import Proposal, TargetFeatures
from workbench.decode.model import Target
from workbench.decode.replay import Work, captured
from workbench.decode.sampling import first_arrival, probabilities
from workbench.errors import InputError


class DFlashForm(Protocol):
    """How context and block are computed, and the model's head behind them. It owns the context's keys and values.

    ``length`` int32 [1], on the device, counts the positions that are context.
    """

    def context(self, taps: Tensor, length: Tensor) -> None:
        """Take in the features ``taps`` [T, n_taps, hidden] of the positions from ``length`` on."""

    def fill(self, anchor: Tensor, length: Tensor) -> Tensor:
        """Return the normed states [block - 1, hidden] of the masks behind ``anchor`` [1], at position ``length``."""

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 [n, V] of ``states`` [n, hidden]."""

    def choose(self, states: Tensor) -> Tensor:
        """Return the most likely token of each, integers [n]."""


def block_offsets(block: int, device: torch.device, *, stuck: bool) -> Tensor:
    """Return where a block's tokens stand behind its anchor, int32 [block]; all masks at 1 where ``stuck``."""
    offsets = [0, *[1] * (block - 1)] if stuck else list(range(block))
    return torch.tensor(offsets, dtype=torch.int32, device=device)


class PlainDFlash:
    """The drafter's model in plain torch. A position's keys and values lie at its remainder by the window: attention
    does not mind their order."""

    def __init__(self, target: Target, model: DFlashModel, *, stuck_positions: bool = False) -> None:
        """``stuck_positions``: as of ``DFlashDrafter``."""
        device, window = target.device, model.shape.window
        self._target, self._model, self._rope = target, model, target.rope
        # An empty context tells the shape of a layer's keys and values.
        nothing = torch.zeros(1, 0, len(model.shape.taps), target.spec.hidden, device=device, dtype=target.dtype)
        self._context: list[KeyValue] = [
            (
                keys.new_zeros(1, keys.shape[1], window, keys.shape[3]),
                values.new_zeros(1, values.shape[1], window, values.shape[3]),
            )
            for keys, values in model.context(nothing, self._rope[:, :0])
        ]
        self._places = torch.arange(window, device=device)
        self._offsets = block_offsets(model.shape.block, device, stuck=stuck_positions)
        self._own = torch.ones(model.shape.block, dtype=torch.bool, device=device)

    def context(self, taps: Tensor, length: Tensor) -> None:
        """Turn features into keys and values."""
        positions = self._places[: len(taps)] + length
        fresh = self._model.context(taps[None], self._rope.index_select(1, positions))
        places = positions.remainder(len(self._places))
        for (keys, values), (new_keys, new_values) in zip(self._context, fresh, strict=True):
            keys.index_copy_(2, places, new_keys)
            values.index_copy_(2, places, new_values)

    def fill(self, anchor: Tensor, length: Tensor) -> Tensor:
        """Fill the block."""
        rope = self._rope.index_select(1, self._offsets + length)
        allowed = torch.cat((self._places < length, self._own)).expand(1, 1, 1, len(self._offsets), -1)
        return self._model.fill(self._target.embed(anchor)[None], rope, self._context, allowed)[0, 0]

    def logits(self, states: Tensor) -> Tensor:
        """Run the head."""
        return F.linear(states, self._target.head_weight).float()

    def choose(self, states: Tensor) -> Tensor:
        """Run head and argmax."""
        return self.logits(states).argmax(-1)


class StaticDFlashDrafter:
    """Drafts what ``DFlashDrafter`` drafts: one graph for each number of newly committed rows, one for the block.

    A proposal's tensors are overwritten by the next one.
    """

    name = "dflash"

    @torch.no_grad()
    def __init__(
        self,
        target: Target,
        model: DFlashModel,
        form: DFlashForm,
        *,
        depth: int | None = None,
        temperature: float = 0.0,
        capture: bool,
    ) -> None:
        """``depth``: as of ``DFlashDrafter``. ``temperature``: what blocks are drawn at. ``capture``: replay graphs."""
        block, window = model.shape.block, model.shape.window
        if depth is not None and not 1 <= depth <= block - 1:
            raise InputError(
                f"dflash: depth={depth} must be 1 to {block - 1}; the drafter was trained on blocks of {block}"
            )
        self.max_draft = depth or block - 1
        self._form, self._temperature, self._window, self._block = form, temperature, window, block
        self._positions = target.rope.shape[1]
        device, hidden, taps = target.device, target.spec.hidden, len(model.shape.taps)
        self._length = torch.zeros(1, dtype=torch.int32, device=device)
        self._taps = torch.zeros(min(self.max_draft + 1, window), taps, hidden, device=device, dtype=target.dtype)
        self._anchor = torch.zeros(1, dtype=torch.int64, device=device)
        drafts = torch.zeros(self.max_draft, dtype=torch.int64, device=device)
        drawn = (self.max_draft, target.spec.vocab)
        self._race = torch.ones(drawn, device=device) if temperature > 0 else None
        self._proposal = Proposal(drafts, torch.zeros(drawn, device=device) if temperature > 0 else None)
        self._nothing = Proposal(drafts[:0])
        works: list[list[Work]] = [[self._observing(count)] for count in range(1, len(self._taps) + 1)]
        works.append([self._fill])
        if capture:
            works = captured(works, device, reset=self.reset)
        *self._observers, (self._draft,) = works
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget the sequence."""
        self._length.zero_()
        self._seen, self._ready = 0, False

    @torch.no_grad()
    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Turn the new positions' features into keys and values, as far as the window will reach."""
        if features is None:
            raise InputError("dflash: the engine must pass target features")
        count, widest = len(features.taps), len(self._taps)
        first = max(0, count - self._window)
        if first:
            self._length.add_(first)
        for start in range(first, count, widest):
            end = min(start + widest, count)
            self._taps[: end - start].copy_(features.taps[start:end])
            for work in self._observers[end - start - 1]:
                work()
        self._seen += count
        self._anchor.copy_(tokens[-1:])
        self._ready = True

    @torch.no_grad()
    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Fill one block behind the last committed token; nothing where it would reach past the model's positions."""
        if not self._ready:
            raise InputError("dflash: propose was called before observe")
        if temperature != self._temperature:
            raise InputError(f"dflash: built to draft at temperature {self._temperature}, not at {temperature}")
        if self._seen + self._block > self._positions:
            return self._nothing
        if self._race is not None:
            self._race.exponential_(generator=generator)
        self._draft()
        return self._proposal

    def _observing(self, count: int) -> Work:
        def observe() -> None:
            self._form.context(self._taps[:count], self._length)
            self._length.add_(count)

        return observe

    def _fill(self) -> None:
        states = self._form.fill(self._anchor, self._length)[: self.max_draft]
        if self._proposal.probs is None or self._race is None:
            self._proposal.tokens.copy_(self._form.choose(states))
            return
        probs = probabilities(self._form.logits(states), self._temperature)
        self._proposal.probs.copy_(probs)
        self._proposal.tokens.copy_(first_arrival(probs, self._race))

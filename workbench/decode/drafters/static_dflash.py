"""The DFlash drafter in fixed shapes: a ring of context keys and values, positions on the device, CUDA graphs."""

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.dflash import DFlashModel, KeyValue
from workbench.decode.drafters.protocol import Proposal, TargetFeatures
from workbench.decode.model import Target
from workbench.decode.replay import Work, captured
from workbench.decode.sampling import first_arrival, probabilities
from workbench.errors import InputError


class StaticDFlashDrafter:
    """Drafts what ``DFlashDrafter`` drafts: one graph for each number of newly committed rows, one for the block.

    A position's keys and values lie at its remainder by the window: attention does not mind their order. A proposal's
    tensors are overwritten by the next one.
    """

    name = "dflash"

    @torch.no_grad()
    def __init__(
        self,
        target: Target,
        model: DFlashModel,
        *,
        depth: int | None = None,
        stuck_positions: bool = False,
        temperature: float = 0.0,
        capture: bool,
    ) -> None:
        """``depth``, ``stuck_positions``: as of ``DFlashDrafter``. ``temperature``: what the block is drawn at."""
        block, window = model.shape.block, model.shape.window
        if depth is not None and not 1 <= depth <= block - 1:
            raise InputError(
                f"dflash: depth={depth} must be 1 to {block - 1}; the drafter was trained on blocks of {block}"
            )
        self.max_draft = depth or block - 1
        self._target, self._model, self._temperature = target, model, temperature
        device, dtype, hidden, taps = target.device, target.dtype, target.spec.hidden, len(model.shape.taps)
        self._rope = target.rope
        # An empty context tells the shape of a layer's keys and values.
        shapes = model.context(torch.zeros(1, 0, taps, hidden, device=device, dtype=dtype), self._rope[:, :0])
        self._context: list[KeyValue] = [
            (
                keys.new_zeros(1, keys.shape[1], window, keys.shape[3]),
                values.new_zeros(1, values.shape[1], window, values.shape[3]),
            )
            for keys, values in shapes
        ]
        self._window = torch.arange(window, device=device)
        self._offsets = torch.tensor(
            [0, *[1] * (block - 1)] if stuck_positions else list(range(block)), dtype=torch.int64, device=device
        )
        self._own = torch.ones(block, dtype=torch.bool, device=device)
        self._length = torch.zeros(1, dtype=torch.int64, device=device)
        self._taps = torch.zeros(min(self.max_draft + 1, window), taps, hidden, device=device, dtype=dtype)
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
        first = max(0, count - len(self._window))
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
        if self._seen + self._model.shape.block > self._rope.shape[1]:
            return self._nothing
        if self._race is not None:
            self._race.exponential_(generator=generator)
        self._draft()
        return self._proposal

    def _observing(self, count: int) -> Work:
        steps = torch.arange(count, device=self._length.device)

        def observe() -> None:
            positions = self._length + steps
            fresh = self._model.context(self._taps[:count][None], self._rope.index_select(1, positions))
            places = positions.remainder(len(self._window))
            for (keys, values), (new_keys, new_values) in zip(self._context, fresh, strict=True):
                keys.index_copy_(2, places, new_keys)
                values.index_copy_(2, places, new_values)
            self._length.add_(count)

        return observe

    def _fill(self) -> None:
        rope = self._rope.index_select(1, self._length + self._offsets)
        block = len(self._offsets)
        allowed = torch.cat((self._window < self._length, self._own)).expand(1, 1, 1, block, -1)
        states = self._model.fill(self._target.embed(self._anchor)[None], rope, self._context, allowed)
        logits = F.linear(states[0, 0, : self.max_draft], self._target.head_weight).float()
        if self._proposal.probs is None or self._race is None:
            self._proposal.tokens.copy_(logits.argmax(-1))
            return
        probs = probabilities(logits, self._temperature)
        self._proposal.probs.copy_(probs)
        self._proposal.tokens.copy_(first_arrival(probs, self._race))

"""What the engine asks of a rung: scores of tokens at the end of one sequence's cache."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from workbench.decode.model import Scores, Target


class Forward(Protocol):
    """One sequence's cache and a way to score tokens at its end; every rung of the ladder is one of these.

    ``length`` is the number of committed positions. Scoring commits nothing: the caller sets ``length`` to what it
    keeps, and the next call overwrites the rest. The tensors of the scores are valid until the next call.
    """

    length: int

    @property
    def device(self) -> torch.device:
        """Where tokens come from and scores are."""

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Return every layer's keys and values, [kv_heads, positions, head size] each, as they are held: not copies."""

    def prefill(self, tokens: Tensor) -> Scores:
        """Run ``tokens`` int64 [1, n] as positions ``length`` onwards.

        ``hidden`` and ``taps`` cover all n positions, ``logits`` at least the last one. Raises InputError where they
        do not fit the cache.
        """

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Return the tokens [1, 1 + n] of a step: ``last`` [1], the last committed one, and ``drafts`` int64 [n].

        They are for the next ``score``, and may lie where the step reads them.
        """

    def score(self, tokens: Tensor) -> Scores:
        """Run ``tokens`` int64 [1, T] as positions ``length`` onwards; raises InputError where they do not fit."""


@runtime_checkable
class AheadForward(Forward, Protocol):
    """A rung whose steps decide what they commit and set up the next one, so that the host need not have seen it.

    After ``stand``, steps are enqueued by ``follow``; up to two may be under way. ``length`` stays the number of
    positions that the caller has committed. ``leave`` goes back to ``score``.
    """

    def stand(self, last: Tensor) -> None:
        """Set the device up to go on behind ``length`` positions with token ``last`` int64 or int32 [1]."""

    def follow(self, drafts: Tensor, *, latest: int, keep: int | None = None) -> Scores:
        """Enqueue the step behind the last one, with ``drafts`` int64 [n]: those of a step of full width, or none.

        ``latest``: the position that it begins at where all before it is accepted. ``keep``: how many drafts it keeps,
        whatever they are; None: those that stand. Raises InputError where it may not fit the cache. What the scores
        report is readable until two more steps were enqueued.
        """

    def leave(self) -> None:
        """Wait for what is under way; nothing of it counts that ``length`` does not.

        Raises UnfitError where a step that nobody has read went wrong.
        """


class EagerForward:
    """The eager rung: the target's own forward, operator by operator, shapes decided on the host.

    ``over_read`` copies every layer's whole cache slab first, as engines that convert their KV pool in every step do
    (sglang#35291): bytes go with the pool's size instead of the sequence's.
    """

    def __init__(self, target: Target, capacity: int, *, over_read: bool = False) -> None:
        self._target = target
        self._cache = target.new_cache(capacity)
        self._over_read = over_read

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._cache.length

    @length.setter
    def length(self, value: int) -> None:
        self._cache.length = value

    @property
    def device(self) -> torch.device:
        """The target's device."""
        return self._target.device

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """The slabs of the target's cache."""
        return [(layer.keys[0], layer.values[0]) for layer in self._cache.layers]

    def prefill(self, tokens: Tensor) -> Scores:
        """Run the prompt in one forward."""
        return self._target.score(tokens, self._cache)

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Join them."""
        return torch.cat((last, drafts))[None]

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward."""
        if self._over_read:
            for layer in self._cache.layers:
                layer.keys.clone()
                layer.values.clone()
        return self._target.score(tokens, self._cache)

"""What a drafter is to the engine: it watches tokens being committed and proposes the next few."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workbench.errors import InputError


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What the target's forward leaves for the drafter, one row for each position it ran and kept.

    ``hidden``: [m, hidden], the state that the head reads. ``taps``: [m, n_taps, hidden], the outputs of the layers
    the drafter asked for; n_taps may be 0. Row i belongs to the position just before the token it predicted.
    """

    hidden: Tensor
    taps: Tensor

    def __post_init__(self) -> None:
        """Raise InputError if the two disagree about positions or width."""
        hidden, taps = tuple(self.hidden.shape), tuple(self.taps.shape)
        if len(hidden) != 2 or len(taps) != 3 or hidden != (taps[0], taps[2]):
            raise InputError(f"features: hidden {hidden}, taps {taps}; expected [m, hidden] and [m, n_taps, hidden]")


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, int64 [n] on the model's device, n may be 0, and the distributions they were drawn from.

    ``probs``: [n, V], exactly what each token was drawn from; None if it was chosen without chance. Verification is
    lossless only if this is true, so a drafter that samples must say so.
    """

    tokens: Tensor
    probs: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise InputError if the shapes or the dtype are wrong."""
        tokens = tuple(self.tokens.shape)
        if len(tokens) != 1 or self.tokens.dtype != torch.int64:
            raise InputError(f"proposal: tokens {tokens} {self.tokens.dtype} must be one-dimensional int64")
        if self.probs is not None and (self.probs.ndim != 2 or len(self.probs) != tokens[0]):
            raise InputError(f"proposal: probs {tuple(self.probs.shape)} must be [{tokens[0]}, V], one row a token")


class Drafter(Protocol):
    """The order of calls is ``reset``, ``observe`` after prefill, then ``propose`` and ``observe`` for every step."""

    @property
    def name(self) -> str:
        """The name that scenarios and reports use."""

    @property
    def max_draft(self) -> int:
        """The most tokens one proposal holds; the verify width is at most one more."""

    def reset(self) -> None:
        """Forget the sequence; the next ``observe`` starts a new one."""

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Take note of newly committed ``tokens``, int64 [m] on the model's device.

        After prefill these are the prompt and the first token after it; after a step, what the step committed.
        ``features`` has r <= m rows, and row i is the target's state at the position just before
        ``tokens[m - r + i]``: the last row is the one that predicted the last token. So r is m - 1 after prefill (no
        state precedes the first token) and m after a step. It is None where the engine was not asked for features.
        """

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Guess the tokens that follow the last one observed. ``temperature`` 0 asks for the most likely ones.

        The caller may verify only a prefix of the proposal; what became of it shows in the next ``observe``.
        """

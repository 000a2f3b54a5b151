"""Stand-in drafting for weights that mean nothing: arbitrary tokens and a chosen accept length.

Times are real, acceptance is not: everything that rests on it must be tagged modelled. The idea is SGLang's
``SGLANG_SIMULATE_ACC_LEN``; here, as there, the accept length counts the bonus token.
"""

import random
from typing import Literal

import torch
from torch import Tensor

from workbench.decode.drafters.protocol import Proposal, TargetFeatures

Pattern = Literal["fixed", "multinomial"]


PROPOSALS = 1024
"""Different proposals; the stream repeats after them."""


class SimulatedDrafter:
    """Proposes ``depth`` arbitrary tokens below ``vocab`` at no cost: they wait on the device before the first step."""

    name = "simulated"

    def __init__(self, depth: int, vocab: int, *, seed: int = 0) -> None:
        self.max_draft = depth
        stream = random.Random(seed)  # noqa: S311 - not for security
        self._tokens = torch.tensor([[stream.randrange(vocab) for _ in range(depth)] for _ in range(PROPOSALS)])
        self.reset()

    def reset(self) -> None:
        """Start the token stream again."""
        self._next = 0

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Move to where the model lives, once."""
        self._tokens = self._tokens.to(tokens.device)

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Return arbitrary tokens."""
        row = self._next % PROPOSALS
        self._next += 1
        return Proposal(self._tokens[row])


class SimulatedAcceptance:
    """Keeps a number of drafts with mean ``accept_length`` - 1, whatever they are.

    ``fixed`` alternates between the two integers around the mean; ``multinomial`` keeps each draft with one
    probability, chosen so that the mean of the accepted prefix is right, and stops at the first that falls. Both hold
    for steps that draft the full ``depth``; a step that is cut short by the end of its sequence keeps what it can.
    """

    def __init__(self, accept_length: float, depth: int, pattern: Pattern, *, seed: int = 0) -> None:
        self._mean, self._pattern = accept_length - 1, pattern
        self._random = random.Random(seed)  # noqa: S311 - not for security
        self._chance = acceptance_rate(accept_length, depth)
        self._owed = 0.0

    def __call__(self, drafted: int) -> int:
        """Return how many of ``drafted`` tokens are kept, 0 to ``drafted``."""
        if self._pattern == "fixed":
            self._owed += self._mean
            kept = int(self._owed + 1e-9)
            # What a short step could not keep is not made up for: only the fraction is carried on.
            self._owed -= kept
            return min(drafted, kept)
        for kept in range(drafted):
            if self._random.random() >= self._chance:
                return kept
        return drafted


def acceptance_rate(accept_length: float, depth: int) -> float:
    """Return a in [0, 1] with 1 + a + a^2 + … + a^depth = ``accept_length``, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(depth + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2

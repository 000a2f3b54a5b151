"""No drafting: plain decoding, as the one drafter whose proposals are always empty."""

import torch
from torch import Tensor

from workbench.decode.drafters.protocol import Proposal, TargetFeatures


class NoDrafter:
    """Proposes nothing, so that plain decoding takes the same path as speculation."""

    name = "none"
    max_draft = 0

    def __init__(self) -> None:
        self._nothing = Proposal(torch.empty(0, dtype=torch.int64))

    def reset(self) -> None:
        """Nothing to forget."""

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Note only where the model lives."""
        if self._nothing.tokens.device != tokens.device:
            self._nothing = Proposal(torch.empty(0, dtype=torch.int64, device=tokens.device))

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Return the empty proposal."""
        return self._nothing

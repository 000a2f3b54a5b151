"""Host-side faults around any forward: what an engine does before it launches a step and should not."""

import torch
from torch import Tensor

from workbench.decode.model import Scores
from workbench.decode.rungs.forward import Forward


class FaultyForward:
    """Passes everything on to ``forward``, after the planted waits. ``items`` and ``uploads`` count them.

    ``item``: read one token back, so that the host waits until the drafts exist (sglang#28491 and kin).
    ``upload``: build the step's positions on the host, in pageable memory, and copy them over: the driver stages the
    copy and the host waits for it. The forward has its own positions; nothing reads these.
    """

    def __init__(self, forward: Forward, *, item: bool, upload: bool) -> None:
        self._forward, self._item, self._upload = forward, item, upload
        self.items = self.uploads = 0
        self.positions: Tensor | None = None

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
        """Run the prompt; faults are planted in steps only."""
        return self._forward.prefill(tokens)

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward, late."""
        if self._item:
            tokens[0, -1].item()
            self.items += 1
        if self._upload:
            start = self._forward.length
            self.positions = torch.arange(start, start + tokens.shape[1]).to(self.device)
            self.uploads += 1
        return self._forward.score(tokens)

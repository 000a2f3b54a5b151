"""Host-side faults around any forward: what an engine does before it launches a step and should not."""

import time

import torch
from torch import Tensor

from workbench.decode.model import Scores
from workbench.decode.rungs.forward import Forward

BUSY_NS = 4_000_000
"""How long ``busy`` computes before a step, and ``sleep`` sleeps: schedulers of real engines take 1 to 14 ms
(vllm#6854, sglang-omni#1608)."""


class FaultyForward:
    """Passes everything on to ``forward``, after the planted waits. ``items`` and ``uploads`` count them.

    ``item``: read one token back, so that the host waits until the drafts exist (sglang#28491 and kin).
    ``upload``: build the step's positions on the host, in pageable memory, and copy them over: the driver stages the
    copy and the host waits for it. The forward has its own positions; nothing reads these.
    ``busy``: compute in Python, as a scheduler does that rebuilds its tables every step. ``sleep``: give up the
    processor, as an engine does that polls a queue or waits for a lock.
    """

    def __init__(
        self, forward: Forward, *, item: bool = False, upload: bool = False, busy: bool = False, sleep: bool = False
    ) -> None:
        self._forward, self._item, self._upload, self._busy, self._sleep = forward, item, upload, busy, sleep
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

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Join them as the forward does."""
        return self._forward.assemble(last, drafts)

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward, late."""
        if self._item:
            tokens[0, -1].item()
            self.items += 1
        if self._upload:
            start = self._forward.length
            self.positions = torch.arange(start, start + tokens.shape[1]).to(self.device)
            self.uploads += 1
        if self._busy:
            _compute(BUSY_NS)
        if self._sleep:
            time.sleep(BUSY_NS / 1e9)
        return self._forward.score(tokens)


class RecomputingForward:
    """Runs the whole sequence again in every step, as an engine does whose prefix cache never hits.

    The text is the same; what a step reads and computes grows with the context.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._run: list[int] = []

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
        """Run the prompt and remember it."""
        self._remember(tokens)
        return self._forward.prefill(tokens)

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Join them as the forward does."""
        return self._forward.assemble(last, drafts)

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward from position 0."""
        start, width = self.length, tokens.shape[1]
        self._remember(tokens)
        self._forward.length = 0
        scores = self._forward.prefill(torch.tensor([self._run], device=self.device))
        self._forward.length = start
        return Scores(
            logits=scores.logits[:, -width:],
            hidden=scores.hidden[:, -width:],
            taps=scores.taps[:, -width:],
            experts=scores.experts[:, -width:],
        )

    def _remember(self, tokens: Tensor) -> None:
        # What lies behind the committed positions was drafted and refused.
        self._run = [*self._run[: self.length], *tokens[0].tolist()]


def _compute(ns: int) -> None:
    """Keep this thread busy for ``ns``."""
    end = time.perf_counter_ns() + ns
    rows: dict[int, int] = {}
    while time.perf_counter_ns() < end:
        rows[len(rows) % 64] = len(rows)

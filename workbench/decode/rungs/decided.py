"""Scores of a step that decided on the device what it commits, and how the host learns of it: one copy, one wait."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.decode.model import Scores, distinct_experts

Words = npt.NDArray[np.int32]


class Report(Protocol):
    """What a step leaves in the host's memory; readable until the step after the next (without run-ahead: the next)."""

    def outcome(self) -> list[int]:
        """Wait for the step and return its ``outcome`` (``DecidedScores``)."""

    def experts(self) -> Words:
        """Wait for the step and return the chosen experts, [layers with experts, positions, top_k]: not a copy."""


@dataclass(frozen=True, slots=True)
class DecidedScores(Scores):
    """Scores with what the device already decided.

    ``outcome`` int32 [3 T]: the tokens a greedy verification commits [T] (-1 behind them), their count [1], the
    target's own choice at every position [T], the drafts [T - 1]. For padded steps it covers the padding too. Where a
    step is one token wide, the token alone will do. ``words``: outcome and experts in one piece, where they lie so.
    ``report``: the same on the host, where the step itself copies it there.
    """

    outcome: Tensor
    words: Tensor | None = None
    report: Report | None = None

    def distinct(self) -> tuple[int, ...]:
        """Count the experts on the host, without a copy of their own where there is a report."""
        layers, count, top_k = self.experts.shape
        if self.report is None:
            return distinct_experts(self.experts.flatten(1).numpy(force=True))
        return distinct_experts(self.report.experts()[:, :count].reshape(layers, count * top_k))


class HostWords:
    """int32 words that a step copies into the host's memory, pinned where the step runs on a GPU.

    ``send`` is part of the step (and of its graph), ``renew`` follows every enqueueing of it, ``read`` waits once, and
    for nothing that was enqueued later.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        event: Any = torch.cuda.Event  # untyped in torch
        self._event = event() if cuda else None
        self._host = torch.empty(count, dtype=torch.int32, pin_memory=cuda)
        self._values: Words = self._host.numpy()
        self.arrived = False

    def send(self, words: Tensor) -> None:
        """Enqueue the copy."""
        self._host.copy_(words, non_blocking=True)

    def renew(self) -> None:
        """Note that another step is under way."""
        self.arrived = False
        if self._event is not None:
            self._event.record()

    def read(self) -> Words:
        """Return the words once they are there: not a copy."""
        if not self.arrived:
            if self._event is not None:
                self._event.synchronize()
            self.arrived = True
        return self._values


class StepReport:
    """The report of a step of ``width`` positions, of ``count`` words: first the outcome, last the experts of all
    layers, ``top_k`` a position.

    ``check`` is called once the step is done, and raises where it went wrong. After ``outcome`` it also says where the
    device stands: ``committed`` tokens further, the last at ``next_address``.
    """

    def __init__(
        self, count: int, width: int, layers: int, top_k: int, device: torch.device, check: Callable[[], None]
    ) -> None:
        self._width, self._shape, self._check = width, (layers, width, top_k), check
        self._experts = count - layers * width * top_k
        self.words = HostWords(count, device)
        self._outcome = 0

    def send(self, words: Tensor) -> None:
        """Enqueue the copy of ``words``, outcome and experts in one piece."""
        self._outcome = words.data_ptr()
        self.words.send(words)

    def outcome(self) -> list[int]:
        """Wait and return the outcome."""
        found: list[int] = self.words.read()[: 3 * self._width].tolist()
        self._check()
        return found

    def experts(self) -> Words:
        """Wait and return the experts."""
        return self.words.read()[self._experts :].reshape(self._shape)

    @property
    def committed(self) -> int | None:
        """Tokens that the device committed; None before the host has read the report."""
        return int(self.words.read()[self._width]) if self.words.arrived else None

    @property
    def next_address(self) -> int | None:
        """Where the last committed token lies on the device; None before the host has read the report."""
        count = self.committed
        return None if count is None else self._outcome + 4 * (count - 1)

"""Scores of a step that decided on the device what it commits, and how the host learns of it: one copy, one wait."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workbench.decode.model import Scores


class Report(Protocol):
    """What a step leaves in the host's memory; readable until the next step of the same forward."""

    def outcome(self) -> list[int]:
        """Wait for the step and return its ``outcome`` (``DecidedScores``)."""

    def experts(self) -> list[list[list[int]]]:
        """Wait for the step and return the chosen experts, [layers with experts][positions][top_k]."""


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

    def routed(self) -> list[list[list[int]]]:
        """Return the experts on the host, without a copy of their own where there is a report."""
        if self.report is None:
            found: list[list[list[int]]] = self.experts.tolist()
            return found
        return [layer[: self.experts.shape[1]] for layer in self.report.experts()]


class HostWords:
    """int32 words that a step copies into the host's memory, pinned where the step runs on a GPU.

    ``send`` is part of the step (and of its graph), ``renew`` follows every enqueueing of it, ``read`` waits once.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._values = self._host.numpy()
        self.arrived = False

    def send(self, words: Tensor) -> None:
        """Enqueue the copy."""
        self._host.copy_(words, non_blocking=True)

    def renew(self) -> None:
        """Note that another step is under way."""
        self.arrived = False

    def read(self, start: int, end: int) -> list[int]:
        """Return the words from ``start`` to ``end`` once they are there."""
        if not self.arrived:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self.arrived = True
        values: list[int] = self._values[start:end].tolist()
        return values


class StepReport:
    """The report of a step of ``width`` positions, of ``count`` words: first the outcome, last the experts of all
    layers, ``top_k`` a position.

    After ``outcome`` it also says where the device stands: ``committed`` tokens further, the last at ``next_address``.
    """

    def __init__(self, count: int, width: int, layers: int, top_k: int, device: torch.device) -> None:
        self._width, self._top_k = width, top_k
        self._experts, self._end = count - layers * width * top_k, count
        self.words = HostWords(count, device)
        self._outcome = 0

    def send(self, words: Tensor) -> None:
        """Enqueue the copy of ``words``, outcome and experts in one piece."""
        self._outcome = words.data_ptr()
        self.words.send(words)

    def outcome(self) -> list[int]:
        """Wait and return the outcome."""
        return self.words.read(0, 3 * self._width)

    def experts(self) -> list[list[list[int]]]:
        """Wait and return the experts."""
        flat, width, top_k = self.words.read(self._experts, self._end), self._width, self._top_k
        rows = [flat[at : at + top_k] for at in range(0, len(flat), top_k)] if flat else []
        return [rows[at : at + width] for at in range(0, len(rows), width)]

    @property
    def committed(self) -> int | None:
        """Tokens that the device committed; None before the host has read the report."""
        return self.words.read(self._width, self._width + 1)[0] if self.words.arrived else None

    @property
    def next_address(self) -> int | None:
        """Where the last committed token lies on the device; None before the host has read the report."""
        count = self.committed
        return None if count is None else self._outcome + 4 * (count - 1)

"""A forward of fixed shapes: no size depends on the host, nothing waits for it, so a CUDA graph can replay it.

The tokens of a step and its position live in device memory. A step of width T has buffers and, on CUDA, a graph of its
own; a narrower one is padded to the next width that was asked for, and what the padding writes into the cache lies
behind the sequence's end, where nothing reads it before the next step overwrites it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from workbench.decode.model import Scores
from workbench.errors import InputError

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step reads: ``tokens`` int64 [T], and ``kv_len`` int32 [1], the cached positions with these T counted."""

    tokens: Tensor
    kv_len: Tensor


class Step(Protocol[State]):
    """One model as three parts, so that it can be captured whole or piece by piece.

    No part may wait for the device or look at its data. ``begin`` allocates the state of one width; ``layer`` and
    ``end`` work on it.
    """

    layers: int

    def begin(self, inputs: StepInputs) -> State:
        """Embed the tokens."""

    def layer(self, index: int, state: State) -> None:
        """Run layer ``index``, counted from 0."""

    def end(self, state: State) -> Scores:
        """Norm, head, and whatever the rung decides on the device."""

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Return every layer's keys and values, [kv_heads, positions, head size] each."""


@dataclass(slots=True)
class _Slot:
    """One width: its inputs, the parts to run in order, and where they leave the scores."""

    inputs: StepInputs
    parts: list[Callable[[], None]] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)

    def run(self) -> None:
        """Enqueue the step."""
        for part in self.parts:
            part()


class StaticForward(Generic[State]):
    """Runs a :class:`Step` at a few fixed widths; the prompt goes through the widest, piece by piece."""

    def __init__(
        self,
        step: Step[State],
        *,
        device: torch.device,
        capacity: int,
        widths: Sequence[int],
        capture: bool,
        piecewise: bool = False,
    ) -> None:
        """``capacity``: positions of the longest sequence; the step's cache holds ``slack`` more for padding.

        ``capture``: replay CUDA graphs. ``piecewise``: one graph a layer instead of one a step.
        """
        self.length = 0
        self.piecewise = piecewise
        self._step, self._device, self._capacity = step, device, capacity
        self._widths = tuple(sorted(set(widths)))
        with torch.inference_mode():
            self._slots = {width: self._slot(width) for width in self._widths}
            if capture:
                self._capture()

    @staticmethod
    def slack(widths: Sequence[int]) -> int:
        """Positions that padding may touch behind the last one of a sequence."""
        return max(widths)

    @property
    def device(self) -> torch.device:
        """The step's device."""
        return self._device

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """The step's caches; padding may write behind the positions of a sequence."""
        return self._step.caches()

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Scores:
        """Run the prompt in pieces of the widest step; logits are those of the last token."""
        width, count = self._widths[-1], tokens.shape[1]
        self._reserve(count)
        pieces: list[Scores] = []
        for start in range(0, count, width):
            piece = self._run(tokens[0, start : start + width], self.length + start)
            pieces.append(
                Scores(
                    logits=piece.logits[:, -1:].clone(),
                    hidden=piece.hidden.clone(),
                    taps=piece.taps.clone(),
                    experts=piece.experts.clone(),
                )
            )
        return Scores(
            logits=pieces[-1].logits,
            hidden=torch.cat([piece.hidden for piece in pieces], 1),
            taps=torch.cat([piece.taps for piece in pieces], 1),
            experts=torch.cat([piece.experts for piece in pieces], 1),
        )

    @torch.inference_mode()
    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward."""
        self._reserve(tokens.shape[1])
        return self._run(tokens[0], self.length)

    def _reserve(self, count: int) -> None:
        if self.length + count > self._capacity:
            raise InputError(
                f"KV cache: {self.length} + {count} positions exceed its capacity {self._capacity}; "
                "lower prompts.new_tokens or drafter.depth"
            )

    def _run(self, tokens: Tensor, start: int) -> Scores:
        count = len(tokens)
        width = next((width for width in self._widths if width >= count), None)
        if width is None:
            raise InputError(f"step: {count} tokens exceed the widest step of {self._widths[-1]}")
        slot = self._slots[width]
        slot.inputs.tokens[:count].copy_(tokens)
        slot.inputs.kv_len.fill_(start + width)
        slot.run()
        return _rows(slot.scores[-1], count)

    def _slot(self, width: int) -> _Slot:
        slot = _Slot(
            StepInputs(
                torch.zeros(width, dtype=torch.int64, device=self._device),
                torch.full((1,), width, dtype=torch.int32, device=self._device),
            )
        )
        state: list[State] = []

        def begin() -> None:
            state[:] = [self._step.begin(slot.inputs)]

        def layer(index: int) -> Callable[[], None]:
            return lambda: self._step.layer(index, state[0])

        def end() -> None:
            slot.scores[:] = [self._step.end(state[0])]

        parts = [begin, *(layer(index) for index in range(self._step.layers)), end]

        def whole() -> None:
            for part in parts:
                part()

        slot.parts = parts if self.piecewise else [whole]
        return slot

    def _capture(self) -> None:
        """Run every width twice, so that kernels are compiled and scratch memory has its size, then capture each."""
        stream: Any = torch.cuda.Stream  # untyped in torch
        side = stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for slot in (*self._slots.values(), *self._slots.values()):
                slot.run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        for slot in self._slots.values():
            # Pieces share a pool and are replayed in the order of their capture: what one hands on stays untouched.
            graphs: list[torch.cuda.CUDAGraph] = []
            for part in slot.parts:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
                    part()
                graphs.append(graph)
            slot.parts = [graph.replay for graph in graphs]


def _rows(scores: Scores, count: int) -> Scores:
    """Cut padding off; fields that a rung adds are left to the rung."""
    if scores.logits.shape[1] == count:
        return scores
    return replace(
        scores,
        logits=scores.logits[:, :count],
        hidden=scores.hidden[:, :count],
        taps=scores.taps[:, :count],
        experts=scores.experts[:, :count],
    )

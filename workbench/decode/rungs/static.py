"""A forward of fixed shapes: no size depends on the host, nothing waits for it, so a CUDA graph can replay it.

The tokens of a step and its position live in device memory. A step of width T has buffers and, on CUDA, a graph of its
own; a narrower one is padded to the next width that was asked for, and what the padding writes into the cache lies
behind the sequence's end, where nothing reads it before the next step overwrites it.

A step that decides also ends with all that the next one needs: its first token, the positions, and the copy of what was
decided to the host. As long as the loop does what the device decided, a step is one launch and one wait. Built for a
loop that runs ahead, every width has two sets of buffers and graphs, used in turns, so that a step can be enqueued
before the host has read what the last one reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from workbench.decode.model import Scores
from workbench.decode.replay import captured
from workbench.decode.rungs.decided import DecidedScores, StepReport
from workbench.errors import InputError

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step reads: ``tokens`` int64 [T], and ``kv_len`` int32 [1], the cached positions with these T counted.

    ``lengths`` int32 [n]: the ``kv_len`` of all widths among them. A step that decides lets all of them grow by what it
    commits, and puts the last committed token into ``tokens``[0]. ``keep`` int32 [1]: from 0 on, it keeps so many
    drafts whatever they are.
    """

    tokens: Tensor
    kv_len: Tensor
    lengths: Tensor
    keep: Tensor


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
        """Norm and head; a step that returns ``DecidedScores`` has set up its inputs for the next one."""

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Return every layer's keys and values, [kv_heads, positions, head size] each."""


@dataclass(slots=True)
class _Slot:
    """One width: its inputs, the parts to run in order, and where they leave the scores."""

    inputs: StepInputs
    parts: list[Callable[[], None]] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    report: StepReport | None = None

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
        decide: bool = True,
        ahead: bool = False,
    ) -> None:
        """``capacity``: positions of the longest sequence; the step's cache holds ``slack`` more for padding.

        ``capture``: replay CUDA graphs. ``piecewise``: one graph a layer instead of one a step. ``decide``: verify
        greedily at the end of a step that does not do so by itself. ``ahead``: two sets of buffers.
        """
        self.length = 0
        self.piecewise, self._decide = piecewise, decide
        self._step, self._device, self._capacity = step, device, capacity
        self._widths = tuple(sorted(set(widths)))
        # Where the device stands: the last step's first position and its report; none where that is not known.
        self._last: tuple[int, StepReport] | None = None
        self._turn, self._sets, self._kept = 0, 2 if ahead else 1, -1
        self._unread: list[StepReport] = []
        with torch.inference_mode():
            self._tokens = torch.zeros(self._widths[-1], dtype=torch.int64, device=device)
            self._places = [self._tokens[:width] for width in range(self._widths[-1] + 1)]
            # One length in 16 bytes: kernels are compiled for pointers that are multiples of it.
            self._sizes = torch.tensor(self._widths, dtype=torch.int32, device=device).repeat_interleave(4)
            self._lengths = self._sizes.clone()
            self._keeps = torch.arange(-1, self._widths[-1], dtype=torch.int32, device=device)
            self._keep = self._keeps[:1].clone()
            self._turns = [{width: self._slot(width) for width in self._widths} for _ in range(self._sets)]
            self._slots = self._turns[0]
            if capture:
                slots = [slot for turn in self._turns for slot in turn.values()]
                works = [slot.parts for slot in slots]
                for slot, replays in zip(slots, captured(works, device, reset=self._start), strict=True):
                    slot.parts = replays

    def _start(self) -> None:
        """Stand at the first position."""
        self._lengths.copy_(self._sizes)

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

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Put a step's tokens where its graph reads them; the last one committed is there where the device knows it."""
        count = 1 + drafts.shape[0]
        if count > self._widths[-1]:
            raise InputError(f"step: {count} tokens exceed the widest step of {self._widths[-1]}")
        known = None if self._last is None else self._last[1].next_address
        if known is None or known != last.data_ptr():
            with torch.inference_mode():
                self._places[1].copy_(last)
        if count > 1:
            with torch.inference_mode():
                self._tokens[1:count].copy_(drafts)
        return self._places[count][None]

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward."""
        self._reserve(tokens.shape[1])
        return self._run(tokens[0], self.length)

    def check(self) -> None:
        """Raise UnfitError where a step that the host has waited for went wrong; these steps have no way to say so."""

    def stand(self, last: Tensor) -> None:
        """Put the token and the position where the next step reads them."""
        with torch.inference_mode():
            self._places[1].copy_(last)
            torch.add(self._sizes, self.length, out=self._lengths)
        self._last = None

    def follow(self, drafts: Tensor, *, latest: int, keep: int | None = None) -> Scores:
        """Enqueue one step; its first token and its position are what the last one left."""
        count, told = 1 + drafts.shape[0], -1 if keep is None else keep
        slot = self._turns[self._turn].get(count)
        if slot is None or self._sets < 2:
            raise InputError(f"step: {count} tokens cannot follow a step under way; widths are {self._widths}")
        self._reserve(count, latest)
        with torch.inference_mode():
            if count > 1:
                self._places[count][1:].copy_(drafts)
            if told != self._kept:
                self._tell(told)
            slot.run()
        self._turn = 1 - self._turn
        self._last = None
        if slot.report is None:
            raise InputError("step: only a step that decides on the device can be followed")
        slot.report.words.renew()
        self._unread = [*self._unread[-1:], slot.report]
        return slot.scores[-1]

    def leave(self) -> None:
        """Wait, and let a step verify its drafts again."""
        unread, self._unread = self._unread, []
        with torch.inference_mode():
            if self._kept >= 0:
                self._tell(-1)
        for report in unread:
            report.outcome()

    def _tell(self, keep: int) -> None:
        self._keep.copy_(self._keeps[keep + 1 : keep + 2])
        self._kept = keep

    def _reserve(self, count: int, start: int | None = None) -> None:
        start = self.length if start is None else start
        if start + count > self._capacity:
            raise InputError(
                f"KV cache: {start} + {count} positions exceed its capacity {self._capacity}; "
                "lower prompts.new_tokens or drafter.depth"
            )

    def _run(self, tokens: Tensor, start: int) -> Scores:
        count = tokens.shape[0]
        width = next((width for width in self._widths if width >= count), None)
        if width is None:
            raise InputError(f"step: {count} tokens exceed the widest step of {self._widths[-1]}")
        slot = self._turns[self._turn][width]
        with torch.inference_mode():
            if tokens.data_ptr() != self._tokens.data_ptr():
                self._places[count].copy_(tokens)
            if self._position() != start:
                torch.add(self._sizes, start, out=self._lengths)
            if self._kept >= 0:
                self._tell(-1)
            slot.run()
        self._turn = (self._turn + 1) % self._sets
        self._last = None
        if slot.report is not None:
            slot.report.words.renew()
            self._last = start, slot.report
        return _rows(slot.scores[-1], count)

    def _position(self) -> int | None:
        """Return where the device's next step begins by itself; None where the host has not read how the last ended."""
        if self._last is None:
            return None
        start, report = self._last
        return None if report.committed is None else start + report.committed

    def _slot(self, width: int) -> _Slot:
        index = 4 * self._widths.index(width)
        slot = _Slot(StepInputs(self._places[width], self._lengths[index : index + 1], self._lengths, self._keep))
        state: list[State] = []

        def begin() -> None:
            state[:] = [self._step.begin(slot.inputs)]

        def layer(index: int) -> Callable[[], None]:
            return lambda: self._step.layer(index, state[0])

        def end() -> None:
            scores = self._step.end(state[0])
            if self._decide and not isinstance(scores, DecidedScores):
                scores = decided(scores, slot.inputs)
            slot.scores[:] = [_reported(scores, slot, self.check) if isinstance(scores, DecidedScores) else scores]

        parts = [begin, *(layer(index) for index in range(self._step.layers)), end]

        def whole() -> None:
            for part in parts:
                part()

        slot.parts = parts if self.piecewise else [whole]
        return slot


def decided(scores: Scores, inputs: StepInputs, chosen: Tensor | None = None) -> DecidedScores:
    """Verify a step greedily in plain torch, on the device, and set up its inputs for the next one.

    ``chosen`` int64 [T]: the most likely token at each position, where the step has found it already.
    """
    width = len(inputs.tokens)
    chosen = scores.logits[0].argmax(-1) if chosen is None else chosen
    drafts = inputs.tokens[1:]
    kept = (chosen[:-1] == drafts).int().cumprod(0, dtype=torch.int32).sum(0, keepdim=True, dtype=torch.int32)
    kept = torch.where(inputs.keep < 0, kept, inputs.keep.clamp(max=width - 1))
    place = torch.arange(width, device=chosen.device)
    drafted = torch.cat((drafts, chosen[-1:]))  # the last is never asked for: nothing is drafted there
    committed = torch.where(place < kept, drafted, torch.where(place == kept, chosen, -1))
    count = kept + 1
    outcome = torch.cat((committed.int(), count, chosen.int(), drafts.int()))
    inputs.tokens[:1].copy_(chosen.index_select(0, kept))
    inputs.lengths.add_(count)
    return DecidedScores(scores.logits, scores.hidden, scores.taps, scores.experts, outcome)


def _reported(scores: DecidedScores, slot: _Slot, check: Callable[[], None]) -> DecidedScores:
    """Add the copy of the outcome and the experts to the host, in one piece."""
    outcome, words = scores.outcome, scores.words
    if words is None:
        words = torch.cat((outcome, scores.experts.flatten().int()))
        outcome = words[: len(outcome)]
    if slot.report is None:  # pinned memory is there before the first capture
        layers, _, top_k = scores.experts.shape
        slot.report = StepReport(len(words), len(outcome) // 3, layers, top_k, words.device, check)
    slot.report.send(words)
    return replace(scores, outcome=outcome, words=words, report=slot.report)


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

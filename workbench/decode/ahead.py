"""The decode loop one step ahead: a step is enqueued before the host has read what the one before it decided.

What real engines call an overlap scheduler (SGLang) or asynchronous scheduling (vLLM). It needs steps that decide on
the device and set up the next one, and drafts that do not hang on what was accepted: no drafter, or a simulated one.

A step runs from the end of the one before it on the device to its own end, so steps abut, and time in which the device
waited for the host is in the step that came late. Drafting is [start, draft_end): the wait, and whatever was drafted;
the forward is all the rest, acceptance included, so that its end is the step's.

A text ends where a stepwise loop would end it. Where an end token was committed with another step under way, that step
is waited for and dropped: nothing of it is recorded, and the positions it wrote lie behind the sequence's end.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workbench.decode.clock import PhaseClock
from workbench.decode.drafters.protocol import Drafter, Proposal
from workbench.decode.host_use import HostMeter
from workbench.decode.model import Scores
from workbench.decode.record import Annotate, SamplingRule, SequenceRecord, StepRecord
from workbench.decode.rungs.forward import AheadForward
from workbench.decode.verify import Verdict
from workbench.errors import UnfitError

DEPTH = 2
"""Steps under way at most."""


class Loop(Protocol):
    """What the steps take of the engine whose they are."""

    drafter: Drafter
    rule: SamplingRule
    clock: PhaseClock
    end_token: int | None

    def read_ahead(self, proposal: Proposal, scores: Scores, generator: torch.Generator) -> Verdict:
        """Wait for the step and return what the device decided."""

    def until_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``tokens`` up to the first end token."""

    def draw(self, drafted: int) -> int | None:
        """Return how many of ``drafted`` tokens are to be kept by simulated acceptance; None without it."""

    def put_back(self, drawn: list[int]) -> None:
        """Return draws of steps that do not count, to be drawn again."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way. ``kept``: how many drafts it was told to keep; None: those that stand."""

    proposal: Proposal
    scores: Scores
    kept: int | None


class AheadLoop:
    """Runs the steps of one text ahead over ``loop``'s forward, as long as a step of full width surely fits.

    ``last`` int64 [1]: the last committed token, where the device is.
    """

    def __init__(
        self, loop: Loop, forward: AheadForward, last: Tensor, new_tokens: int, record: SequenceRecord
    ) -> None:
        self._loop, self._forward, self._last = loop, forward, last
        self._new_tokens, self._record = new_tokens, record
        self._widest = loop.drafter.max_draft + 1
        self._flights: deque[Flight] = deque()

    def run(self, generator: torch.Generator, annotate: Annotate, meter: HostMeter) -> Iterator[StepRecord]:
        """Yield the steps. Behind them fewer tokens are left than a full step may commit, or none."""
        loop, clock = self._loop, self._loop.clock
        try:
            self._forward.stand(self._last)
            read = meter.read()
            clock.mark()
            (start,) = clock.times()
            while True:
                while len(self._flights) < DEPTH and self._left() >= self._widest:
                    self._flights.append(self._launch(generator, annotate))
                if not self._flights:
                    break
                flight = self._flights.popleft()
                with annotate("verify"):
                    verdict = loop.read_ahead(flight.proposal, flight.scores, generator)
                    committed = loop.until_end(verdict.tokens)
                    context = self._forward.length
                    self._forward.length += len(committed)
                    self._record.tokens.extend(committed)
                    experts = flight.scores.distinct()
                draft_end, end = clock.times(2)
                before, read = read, meter.read()
                drafted = flight.proposal.tokens.shape[0]
                yield StepRecord(
                    start,
                    draft_end,
                    end,
                    end,
                    context=context,
                    width=drafted + 1,
                    drafted=drafted,
                    accepted=min(verdict.accepted, len(committed)),
                    tokens=committed,
                    experts=experts,
                    host=read.since(before, end - start),
                )
                start = end
                if committed[-1] == loop.end_token:
                    break
        except Exception:
            with suppress(UnfitError):  # the first error is the one to tell
                self._leave()
            raise
        except BaseException:  # closed or interrupted
            self._leave()
            raise
        self._leave()

    def _left(self) -> int:
        """Tokens still to come once all that is under way has committed as much as it can."""
        return self._new_tokens - len(self._record.tokens) - self._widest * len(self._flights)

    def _launch(self, generator: torch.Generator, annotate: Annotate) -> Flight:
        loop, forward = self._loop, self._forward
        with annotate("draft"):
            proposal = loop.drafter.propose(loop.rule.temperature, generator)
            kept = loop.draw(self._widest - 1)
        loop.clock.mark()
        latest = forward.length + self._widest * len(self._flights)
        with annotate("forward"):
            scores = forward.follow(proposal.tokens, latest=latest, keep=kept)
        loop.clock.mark()
        return Flight(proposal, scores, kept)

    def _leave(self) -> None:
        """Wait for what nobody will read; its marks are forgotten, and what was drawn for it is drawn again."""
        dropped, self._flights = self._flights, deque()
        self._loop.put_back([flight.kept for flight in dropped if flight.kept is not None])
        try:
            self._forward.leave()
        finally:
            self._loop.clock.times()

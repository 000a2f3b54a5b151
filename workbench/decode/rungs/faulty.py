"""Host-side faults around any forward: what an engine does before it launches a step and should not."""

import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from workbench.decode.cache import LayerCache
from workbench.decode.drafters.protocol import Drafter, Proposal, TargetFeatures
from workbench.decode.engine import Annotate, Engine, SequenceRecord, StepRecord, Verify
from workbench.decode.model import Block, Scores, Target
from workbench.decode.rungs.decided import DecidedScores
from workbench.decode.rungs.forward import AheadForward, Forward
from workbench.decode.rungs.twin import twin
from workbench.decode.rungs.wrapped import WrappedForward
from workbench.decode.verify import Verdict

BUSY_NS = 4_000_000
"""How long ``busy`` computes before a step, and ``sleep`` sleeps: schedulers of real engines take 1 to 14 ms
(vllm#6854, sglang-omni#1608)."""


COLLECT_EVERY = 16
COLLECT_NS = 40_000_000
"""A collection of a heap of a million objects, and how often steps meet one."""

LAYER_NS = 500_000

OFFSET_EVERY = 3


class FaultyForward(WrappedForward):
    """Passes everything on to ``forward``, after the planted waits. ``items`` and ``uploads`` count them.

    ``item``: read one token back, so that the host waits until the drafts exist (sglang#28491 and kin).
    ``upload``: build the step's positions on the host, in pageable memory, and copy them over: the driver stages the
    copy and the host waits for it. The forward has its own positions; nothing reads these.
    ``busy``: compute in Python, as a scheduler does that rebuilds its tables every step. ``sleep``: give up the
    processor, as an engine does that polls a queue or waits for a lock. ``collect``: pause every COLLECT_EVERY steps,
    as a collector of garbage does that walks a large heap.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        item: bool = False,
        upload: bool = False,
        busy: bool = False,
        sleep: bool = False,
        collect: bool = False,
    ) -> None:
        super().__init__(forward)
        self._item, self._upload, self._busy, self._sleep = item, upload, busy, sleep
        self._collect, self._steps = collect, 0
        self.items = self.uploads = 0
        self.positions: Tensor | None = None

    def score(self, tokens: Tensor) -> Scores:
        """Run one verify forward, late."""
        self._delay(tokens[0], self._forward.length, tokens.shape[1])
        return self._forward.score(tokens)

    def _delay(self, tokens: Tensor, start: int, width: int) -> None:
        if self._item:
            tokens[-1].item()
            self.items += 1
        if self._upload:
            self.positions = torch.arange(start, start + width).to(self.device)
            self.uploads += 1
        if self._busy:
            _compute(BUSY_NS)
        if self._sleep:
            time.sleep(BUSY_NS / 1e9)
        self._steps += 1
        if self._collect and self._steps % COLLECT_EVERY == 0:
            _compute(COLLECT_NS)


class FaultyAheadForward(FaultyForward):
    """The same around a forward whose steps are enqueued ahead.

    What makes the host wait for the device (``item``, ``upload``) makes it wait for the step under way, so that nothing
    is left of running ahead; the other faults cost what the step under way does not hide.
    """

    def __init__(self, forward: AheadForward, **faults: bool) -> None:
        super().__init__(forward, **faults)
        self._ahead = forward
        self._chosen: Tensor | None = None

    def stand(self, last: Tensor) -> None:
        """Pass on; the first step reads this token back."""
        self._chosen = last
        self._ahead.stand(last)

    def follow(self, drafts: Tensor, *, latest: int, keep: int | None = None) -> Scores:
        """Enqueue one step, late."""
        assert self._chosen is not None  # noqa: S101 - stand comes first
        self._delay(self._chosen, latest, 1 + drafts.shape[0])
        scores = self._ahead.follow(drafts, latest=latest, keep=keep)
        assert isinstance(scores, DecidedScores)  # noqa: S101 - what can be followed has decided
        self._chosen = scores.outcome
        return scores

    def leave(self) -> None:
        """Pass on."""
        self._ahead.leave()


def waiting_layers(target: Target) -> Target:
    """Return a twin of ``target`` whose layers each begin late: a lock, a log line or a transfer deep in the model."""
    other = twin(target)
    for block in other.blocks:
        block.__class__ = _LateBlock
    return other


class _LateBlock(Block):
    """One layer of the decoder, after a sleep."""

    def cached(self, x: Tensor, rope: Tensor, cache: LayerCache, start: int) -> tuple[Tensor, Tensor | None]:
        """Run the layer of one step, late."""
        time.sleep(LAYER_NS / 1e9)
        return super().cached(x, rope, cache, start)


class PausingEngine(Engine):
    """Computes after every step is handed over and before the next begins, as a loop does that detokenises and logs."""

    def decode(
        self, prompt: list[int], new_tokens: int, record: SequenceRecord, annotate: Annotate = lambda _: nullcontext()
    ) -> Iterator[StepRecord]:
        """Continue ``prompt``, pausing between steps."""
        for step in super().decode(prompt, new_tokens, record, annotate):
            yield step
            _compute(BUSY_NS)


def cap_acceptance(verify: Verify) -> Verify:
    """Return ``verify`` with at most one draft token accepted: the second position's scores are never looked at."""

    def capped(proposal: Proposal, scores: Scores, generator: torch.Generator) -> Verdict:
        found = verify(proposal, scores, generator)
        if found.accepted <= 1:
            return found
        tokens = None if found.device_tokens is None else found.device_tokens[:2]
        return Verdict(1, found.tokens[:2], found.matches[:2], tokens)

    return capped


class OffsetDrafter:
    """Passes everything on to ``drafter``, and in every third sequence shifts its token ids by one: a map between the
    drafter's and the target's vocabulary that is wrong for some requests."""

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self._drafter, self._vocab, self._sequences = drafter, vocab, 0

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self._drafter.name

    @property
    def max_draft(self) -> int:
        """The most tokens of one proposal."""
        return self._drafter.max_draft

    def reset(self) -> None:
        """Begin another sequence."""
        self._sequences += 1
        self._drafter.reset()

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Take note of committed tokens."""
        self._drafter.observe(tokens, features)

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Draft, with other ids in some sequences."""
        found = self._drafter.propose(temperature, generator)
        if self._sequences % OFFSET_EVERY:
            return found
        return Proposal((found.tokens + 1) % self._vocab, found.probs)


class RecomputingForward(WrappedForward):
    """Runs the whole sequence again in every step, as an engine does whose prefix cache never hits.

    The text is the same; what a step reads and computes grows with the context.
    """

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self._run: list[int] = []

    def prefill(self, tokens: Tensor) -> Scores:
        """Run the prompt and remember it."""
        self._remember(tokens)
        return self._forward.prefill(tokens)

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

"""The decode loop: draft, verify, commit, one step after another, over whatever rung runs the target."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from workbench.decode.ahead import AheadLoop
from workbench.decode.clock import PhaseClock, phase_clock
from workbench.decode.drafters.protocol import Drafter, Proposal, TargetFeatures
from workbench.decode.host_use import HostMeter
from workbench.decode.model import Scores, Target
from workbench.decode.record import Annotate, SamplingRule, SequenceRecord, StepRecord
from workbench.decode.rungs.forward import AheadForward, EagerForward, Forward
from workbench.decode.sampling import draw, probabilities
from workbench.decode.verify import Verdict, verify_greedy, verify_sampled
from workbench.errors import InputError

Acceptance = Callable[[int], int]
"""Simulated acceptance: how many of n drafted tokens are kept, whatever they are."""

Verify = Callable[[Proposal, Scores, torch.Generator], Verdict]
"""Decides which drafts stand and what follows them; the default is lossless verification in plain torch."""

__all__ = [
    "Acceptance",
    "Annotate",
    "EagerEngine",
    "Engine",
    "SamplingRule",
    "SequenceRecord",
    "StepRecord",
    "Verify",
]


class Engine:
    """Runs one sequence at a time over ``forward``.

    ``acceptance`` overrides verification and makes the output meaningless. ``verify`` replaces the verification in
    plain torch, ``acceptance`` included; what is used is ``judge``.
    """

    def __init__(
        self,
        forward: Forward,
        drafter: Drafter,
        rule: SamplingRule,
        *,
        end_token: int | None = None,
        acceptance: Acceptance | None = None,
        verify: Verify | None = None,
        ahead: Verify | None = None,
    ) -> None:
        self.forward, self.drafter, self.rule = forward, drafter, rule
        self.end_token, self.acceptance = end_token, acceptance
        self.judge: Verify = verify or self._verify
        self.clock: PhaseClock = phase_clock(forward.device)
        self.run_ahead = ahead is not None
        self._read_ahead = ahead
        self._put_back: list[int] = []

    @torch.inference_mode()
    def decode(
        self, prompt: list[int], new_tokens: int, record: SequenceRecord, annotate: Annotate = lambda _: nullcontext()
    ) -> Iterator[StepRecord]:
        """Continue ``prompt`` by at most ``new_tokens``, filling ``record``; yield every step when it is committed.

        The first new token comes out of the prefill, so steps commit ``new_tokens - 1`` at most.
        """
        device, rule = self.forward.device, self.rule
        generator = torch.Generator(device=device).manual_seed(rule.seed)
        self.forward.length = 0
        self.drafter.reset()

        self.clock.anchor()
        self.clock.mark()
        tokens = torch.tensor([prompt], device=device)
        scores = self.forward.prefill(tokens)
        first = self._sample(scores.logits[0, -1:], generator)
        self.clock.mark()
        record.prefill_start_ns, record.prefill_end_ns = self.clock.times()
        self.forward.length = len(prompt)
        record.tokens.append(first)
        news = torch.tensor([*prompt, first], device=device)
        features = _features(scores, len(prompt))

        with HostMeter() as meter:
            if self.run_ahead and first != self.end_token:
                self.drafter.observe(news, features)
                if not isinstance(self.forward, AheadForward):
                    raise InputError("engine: this forward cannot run ahead", hint="engine.run_ahead = false")
                ahead = AheadLoop(self, self.forward, news[-1:], new_tokens, record)
                yield from ahead.run(generator, annotate, meter)
                news = torch.tensor(record.tokens[-1:], device=device)
            while len(record.tokens) < new_tokens and record.tokens[-1] != self.end_token:
                context = self.forward.length
                before = meter.read()
                self.clock.mark()
                with annotate("draft"):
                    self.drafter.observe(news, features)
                    proposal = self.drafter.propose(rule.temperature, generator)
                    proposal = _trim(proposal, new_tokens - len(record.tokens))
                    drafted = proposal.tokens.shape[0]
                self.clock.mark()
                with annotate("forward"):
                    scores = self.forward.score(self.forward.assemble(news[-1:], proposal.tokens))
                self.clock.mark()
                with annotate("verify"):
                    verdict = self.judge(proposal, scores, generator)
                    committed = self.until_end(verdict.tokens)
                    self.forward.length += len(committed)
                    on_device = verdict.device_tokens
                    news = torch.tensor(committed, device=device) if on_device is None else on_device[: len(committed)]
                    if self.drafter.max_draft:  # who drafts nothing looks at nothing
                        features = _features(scores, len(committed))
                    record.tokens.extend(committed)
                self.clock.mark()
                start, draft_end, forward_end, end = self.clock.times()
                used = meter.read().since(before, end - start)
                yield StepRecord(
                    start,
                    draft_end,
                    forward_end,
                    end,
                    context=context,
                    width=drafted + 1,
                    drafted=drafted,
                    accepted=min(verdict.accepted, len(committed)),
                    tokens=committed,
                    experts=scores.distinct(),
                    host=used,
                )
        record.finish = "eos" if record.tokens[-1] == self.end_token else "length"

    def _verify(self, proposal: Proposal, scores: Scores, generator: torch.Generator) -> Verdict:
        draft, logits = proposal.tokens, scores.logits[0]
        if self.acceptance is not None:
            kept = self.acceptance(len(draft))
            tokens = torch.cat((draft[:kept], logits[kept].argmax()[None]))
            return Verdict(kept, tuple(tokens.tolist()), (True,) * kept + (False,) * (kept < len(draft)), tokens)
        if self.rule.temperature == 0:
            return verify_greedy(draft, logits)
        return verify_sampled(draft, proposal.probs, self._distribution(logits), generator)

    def _distribution(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.rule.temperature, self.rule.top_p)

    def _sample(self, logits: Tensor, generator: torch.Generator) -> int:
        if self.rule.temperature == 0:
            return int(logits.argmax())
        return int(draw(self._distribution(logits), generator))

    def read_ahead(self, proposal: Proposal, scores: Scores, generator: torch.Generator) -> Verdict:
        """Wait for a step of a loop that runs ahead and return what the device decided."""
        assert self._read_ahead is not None  # noqa: S101 - nobody runs ahead without
        return self._read_ahead(proposal, scores, generator)

    def draw(self, drafted: int) -> int | None:
        """Return how many of ``drafted`` tokens simulated acceptance keeps; None without it."""
        if self.acceptance is None:
            return None
        return self._put_back.pop(0) if self._put_back else self.acceptance(drafted)

    def put_back(self, drawn: list[int]) -> None:
        """Return draws of steps that were dropped."""
        self._put_back += drawn

    def until_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``tokens`` up to the first end token, that included."""
        if self.end_token is None or self.end_token not in tokens:
            return tokens
        return tokens[: tokens.index(self.end_token) + 1]


class EagerEngine(Engine):
    """The engine of the eager rung: ``target``'s own forward over a cache of ``capacity`` positions."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: SamplingRule,
        *,
        capacity: int,
        end_token: int | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        forward = EagerForward(target, capacity)
        super().__init__(forward, drafter, rule, end_token=end_token, acceptance=acceptance)


def _trim(proposal: Proposal, remaining: int) -> Proposal:
    """Keep what can still be committed beside the bonus token, with ``remaining`` >= 1 tokens to go."""
    keep = remaining - 1
    if proposal.tokens.shape[0] <= keep:
        return proposal
    return Proposal(proposal.tokens[:keep], None if proposal.probs is None else proposal.probs[:keep])


def _features(scores: Scores, count: int) -> TargetFeatures:
    return TargetFeatures(scores.hidden[0, :count], scores.taps[0, :count])

"""The decode loop: draft, verify, commit, one step after another, over whatever rung runs the target."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.decode.clock import PhaseClock, phase_clock
from workbench.decode.drafters.protocol import Drafter, Proposal, TargetFeatures
from workbench.decode.host_use import HostMeter, HostUse
from workbench.decode.model import Scores, Target
from workbench.decode.rungs.forward import EagerForward, Forward
from workbench.decode.sampling import draw, probabilities
from workbench.decode.verify import Verdict, verify_greedy, verify_sampled

Acceptance = Callable[[int], int]
"""Simulated acceptance: how many of n drafted tokens are kept, whatever they are."""

Verify = Callable[[Proposal, Scores, torch.Generator], Verdict]
"""Decides which drafts stand and what follows them; the default is lossless verification in plain torch."""

Annotate = Callable[[str], AbstractContextManager[object]]
"""Opens a named span for an instrument; the default opens nothing."""


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How tokens are chosen: ``temperature`` 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decode step. Times are monotonic nanoseconds; counts are tokens.

    Drafting is [start, draft_end), the verify forward [draft_end, forward_end), acceptance and commit
    [forward_end, end). ``context``: cached tokens before the step. ``width``: tokens scored. ``experts``: distinct
    routed experts per MoE layer. ``host``: what the decoding thread used, read just before and just after the step.
    """

    start_ns: int
    draft_end_ns: int
    forward_end_ns: int
    end_ns: int
    context: int
    width: int
    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    host: HostUse | None = None


@dataclass(slots=True)
class SequenceRecord:
    """One generated sequence: prefill times, new tokens, why it ended."""

    prompt_tokens: int
    prefill_start_ns: int = 0
    prefill_end_ns: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: str = "aborted"


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
    ) -> None:
        self.forward, self.drafter, self.rule = forward, drafter, rule
        self.end_token, self.acceptance = end_token, acceptance
        self.judge: Verify = verify or self._verify
        self.clock: PhaseClock = phase_clock(forward.device)

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
            while len(record.tokens) < new_tokens and record.tokens[-1] != self.end_token:
                context = self.forward.length
                before = meter.read()
                self.clock.mark()
                with annotate("draft"):
                    self.drafter.observe(news, features)
                    proposal = self.drafter.propose(rule.temperature, generator)
                    proposal = _trim(proposal, new_tokens - len(record.tokens))
                self.clock.mark()
                with annotate("forward"):
                    scores = self.forward.score(self.forward.assemble(news[-1:], proposal.tokens))
                self.clock.mark()
                with annotate("verify"):
                    verdict = self.judge(proposal, scores, generator)
                    committed = self._until_end(verdict.tokens)
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
                    width=len(proposal.tokens) + 1,
                    drafted=len(proposal.tokens),
                    accepted=min(verdict.accepted, len(committed)),
                    tokens=committed,
                    experts=_distinct(scores),
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

    def _until_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
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
    if len(proposal.tokens) <= keep:
        return proposal
    return Proposal(proposal.tokens[:keep], None if proposal.probs is None else proposal.probs[:keep])


def _distinct(scores: Scores) -> tuple[int, ...]:
    """Count the distinct experts of each MoE layer; a copy to the host where the step has not made it."""
    return tuple(len({expert for row in layer for expert in row}) for layer in scores.routed())


def _features(scores: Scores, count: int) -> TargetFeatures:
    return TargetFeatures(scores.hidden[0, :count], scores.taps[0, :count])

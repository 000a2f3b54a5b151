from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.decode.dflash import DFlashModel
from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.ngram import NGramDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter, Proposal, TargetFeatures
from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.engine import EagerEngine, SamplingRule, SequenceRecord, StepRecord
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead

CAPACITY = 80
PROMPT = [1, 5, 2, 7, 1, 5]
MakeDrafter = Callable[[str, Target], Drafter]
KINDS = ["none", "ngram", "simulated", "mtp", "dflash"]


@pytest.fixture(scope="module")
def make_drafter(tiny_mtp: Callable[..., MtpHead], tiny_dflash: Callable[..., DFlashModel]) -> MakeDrafter:
    def build(kind: str, target: Target) -> Drafter:
        match kind:
            case "ngram":
                return NGramDrafter(depth=3, order=2)
            case "simulated":  # arbitrary tokens, verified in earnest
                return SimulatedDrafter(4, target.spec.vocab)
            case "mtp":
                return MtpDrafter(target, tiny_mtp(target), depth=3, capacity=CAPACITY)
            case "dflash":
                return DFlashDrafter(target, tiny_dflash(target))
            case _:
                return NoDrafter()

    return build


def decode(engine: EagerEngine, new_tokens: int, prompt: list[int] = PROMPT) -> tuple[SequenceRecord, list[StepRecord]]:
    record = SequenceRecord(len(prompt))
    return record, list(engine.decode(prompt, new_tokens, record))


def by_hand(target: Target, prompt: list[int], new_tokens: int) -> list[int]:
    """Plain greedy decoding without a cache: the whole sequence is run for every token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new_tokens):
            tokens.append(int(target.logits(target(torch.tensor([tokens]))[0][0, -1]).argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def cases(tiny_target: Callable[..., Target]) -> list[tuple[Target, list[int], list[int]]]:
    """Targets, prompts, and what plain decoding makes of them."""
    return [
        (target, prompt, by_hand(target, prompt, 20))
        for seed, target in ((seed, tiny_target(seed, vocab=8)) for seed in (0, 2, 4, 5))
        for prompt in (PROMPT, [seed], [7, 3, seed, 6, 0, 3, 3, 1, 2, seed])
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_plain_decoding_s_token_for_token(
    cases: list[tuple[Target, list[int], list[int]]], make_drafter: MakeDrafter, kind: str
) -> None:
    steps: list[StepRecord] = []
    for target, prompt, truth in cases:
        engine = EagerEngine(target, make_drafter(kind, target), SamplingRule(), capacity=CAPACITY)
        record, taken = decode(engine, 20, prompt)
        assert record.tokens == truth
        steps += taken
    if kind != "none":  # else nothing was put to the test
        assert any(step.accepted for step in steps)
        assert any(step.accepted < step.drafted for step in steps)


class Scripted:
    """Drafts the true continuation up to the number of tokens that the script asks for, then wrong ones."""

    name, max_draft = "scripted", 6

    def __init__(self, truth: list[int], script: list[tuple[int, int]], vocab: int) -> None:
        self._truth, self._script, self._vocab = truth, script, vocab
        self.observed: list[int] = []
        self.rows: list[tuple[int, int]] = []
        self.states: list[Tensor] = []

    def reset(self) -> None:
        self.observed, self.rows, self.states = [], [], []

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        assert features is not None
        self.observed += tokens.tolist()
        self.rows.append((len(tokens), len(features.hidden)))
        self.states.append(features.hidden)

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        right, wrong = self._script[(len(self.rows) - 1) % len(self._script)]
        start = len(self.observed) - len(PROMPT)
        tokens = self._truth[start : start + right]
        tokens += [(token + 1) % self._vocab for token in self._truth[start + right : start + right + wrong]]
        return Proposal(torch.tensor(tokens, dtype=torch.int64))


@given(script=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
def test_any_pattern_of_acceptance_keeps_the_output_and_the_books(
    tiny_target: Callable[..., Target], script: list[tuple[int, int]]
) -> None:
    new = 18
    target = tiny_target(0, vocab=16)
    truth = by_hand(target, PROMPT, new)
    drafter = Scripted(truth + [0] * 8, script, 16)
    record, steps = decode(EagerEngine(target, drafter, SamplingRule(), capacity=CAPACITY), new)

    assert record.tokens == truth
    assert record.finish == "length"
    assert record.tokens == [record.tokens[0], *(token for step in steps for token in step.tokens)]
    context = len(PROMPT)
    for number, step in enumerate(steps):
        right, wrong = script[number % len(script)]
        left = new - 1 - (context - len(PROMPT))
        assert step.context == context
        assert step.drafted == min(right + wrong, left - 1)
        assert step.width == step.drafted + 1
        assert step.accepted == min(right, left - 1)
        assert len(step.tokens) == step.accepted + 1
        assert all(2 <= count <= min(4, 2 * step.width) for count in step.experts)
        assert len(step.experts) == 2
        context += len(step.tokens)

    # The drafter was told everything but the last step, one state for each token but the first.
    committed = len(record.tokens) - len(steps[-1].tokens)
    assert drafter.observed == PROMPT + truth[:committed]
    assert drafter.rows[0] == (len(PROMPT) + 1, len(PROMPT))
    assert all(tokens == rows for tokens, rows in drafter.rows[1:])
    with torch.no_grad():
        hidden, _, _ = target(torch.tensor([drafter.observed[:-1]]))
    torch.testing.assert_close(torch.cat(drafter.states), hidden[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_stops_behind_the_first_end_token(
    tiny_target: Callable[..., Target], make_drafter: MakeDrafter, kind: str
) -> None:
    target = tiny_target(0, vocab=8)
    plain = by_hand(target, PROMPT, 12)
    for end in sorted(set(plain)):
        engine = EagerEngine(target, make_drafter(kind, target), SamplingRule(), capacity=CAPACITY, end_token=end)
        record, steps = decode(engine, 12)
        assert record.tokens == plain[: plain.index(end) + 1]
        assert record.finish == "eos"
        assert 1 + sum(len(step.tokens) for step in steps) == len(record.tokens)
        assert all(step.accepted <= len(step.tokens) for step in steps)


def test_drafts_accepted_behind_the_end_token_do_not_count(tiny_target: Callable[..., Target]) -> None:
    target = tiny_target(0, vocab=16)
    truth = by_hand(target, PROMPT, 8)
    assert truth[3] not in truth[:3]
    engine = EagerEngine(target, Scripted(truth, [(6, 0)], 16), SamplingRule(), capacity=CAPACITY, end_token=truth[3])
    record, (step,) = decode(engine, 8)
    assert record.tokens == truth[:4]
    assert (step.drafted, step.accepted, step.tokens) == (6, 3, tuple(truth[1:4]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_no_more_tokens_than_asked_for(
    tiny_target: Callable[..., Target], make_drafter: MakeDrafter, kind: str, new: int
) -> None:
    target = tiny_target(2, vocab=8)
    # Exactly the positions that are needed: a draft must not reach past the last token.
    engine = EagerEngine(target, make_drafter(kind, target), SamplingRule(), capacity=len(PROMPT) + new - 1)
    record, steps = decode(engine, new)
    assert len(record.tokens) == new
    assert record.finish == "length"
    assert sum(len(step.tokens) for step in steps) == new - 1


def test_a_sequence_that_is_not_run_to_its_end_is_aborted(tiny_target: Callable[..., Target]) -> None:
    record = SequenceRecord(len(PROMPT))
    steps = EagerEngine(tiny_target(0), NoDrafter(), SamplingRule(), capacity=CAPACITY).decode(PROMPT, 9, record)
    next(steps)
    assert record.finish == "aborted"
    assert len(record.tokens) == 2


def test_sequences_do_not_see_each_other(tiny_target: Callable[..., Target], make_drafter: MakeDrafter) -> None:
    target = tiny_target(0, vocab=8)
    for kind in KINDS:
        engine = EagerEngine(target, make_drafter(kind, target), SamplingRule(1.0, seed=3), capacity=CAPACITY)
        fresh, _ = decode(engine, 12)
        decode(engine, 16, prompt=[3, 3, 6])
        again, _ = decode(engine, 12)
        assert again.tokens == fresh.tokens


def test_times_are_in_order_and_phases_are_annotated(
    tiny_target: Callable[..., Target], make_drafter: MakeDrafter
) -> None:
    spans: list[str] = []

    @contextmanager
    def annotate(name: str) -> Iterator[None]:
        spans.append(name)
        yield

    target = tiny_target(0)
    engine = EagerEngine(target, make_drafter("mtp", target), SamplingRule(), capacity=CAPACITY)
    record = SequenceRecord(len(PROMPT))
    steps = list(engine.decode(PROMPT, 10, record, annotate))
    assert spans == ["draft", "forward", "verify"] * len(steps)
    last = record.prefill_end_ns
    assert record.prefill_start_ns < last
    for step in steps:
        assert last <= step.start_ns < step.draft_end_ns < step.forward_end_ns < step.end_ns
        last = step.end_ns


@pytest.mark.parametrize("pattern", ["fixed", "multinomial"])
def test_simulated_acceptance_commits_the_length_asked_for(tiny_target: Callable[..., Target], pattern: str) -> None:
    target = tiny_target(0)
    acceptance = SimulatedAcceptance(2.6, 4, pattern, seed=1)  # type: ignore[arg-type]
    engine = EagerEngine(target, SimulatedDrafter(4, 64), SamplingRule(), capacity=CAPACITY, acceptance=acceptance)
    lengths: list[int] = []
    for _ in range(12):
        record, steps = decode(engine, 70)
        assert len(record.tokens) == 70
        lengths += [len(step.tokens) for step in steps if step.drafted == 4]
        assert all(len(step.tokens) == step.accepted + 1 for step in steps)
    assert sum(lengths) / len(lengths) == pytest.approx(2.6, abs=0.01 if pattern == "fixed" else 0.25)

"""A loop that runs one step ahead records what a stepwise loop records, whatever ends it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter
from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.engine import Engine, SamplingRule, SequenceRecord, StepRecord
from workbench.decode.model import Target
from workbench.decode.pipeline import build_pipeline
from workbench.decode.rungs.decided import StepReport
from workbench.decode.rungs.faulty import FaultyAheadForward, FaultyForward
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.plain import PlainStep
from workbench.decode.rungs.static import StaticForward
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.errors import InputError
from workbench.scenario import parse_scenario

DEPTH = 3
PROMPT = [3, 9, 27, 1, 4]
KINDS = ["none", "fixed", "multinomial"]
Facts = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]


def static(target: Target, capacity: int = 64, *, capture: bool = False, piecewise: bool = False) -> StaticForward[Any]:
    widths = [1, DEPTH + 1]
    step = PlainStep(target, capacity + StaticForward.slack(widths))
    return StaticForward(
        step, device=target.device, capacity=capacity, widths=widths, capture=capture, piecewise=piecewise, ahead=True
    )


def engine(forward: Any, kind: str, vocab: int, *, ahead: bool, end: int | None = None) -> Engine:
    drafter: Drafter = NoDrafter()
    accept = None
    if kind in ("fixed", "multinomial"):
        drafter = SimulatedDrafter(DEPTH, vocab, seed=1)
        accept = SimulatedAcceptance(2.4, DEPTH, kind, seed=5)  # type: ignore[arg-type]
    width, device = DEPTH + 1, forward.device
    return Engine(
        forward,
        drafter,
        SamplingRule(),
        end_token=end,
        acceptance=accept,
        verify=DeviceVerifier(width, device, accept),
        ahead=DeviceVerifier(width, device) if ahead else None,
    )


def facts(step: StepRecord) -> Facts:
    return step.context, step.width, step.drafted, step.accepted, step.tokens, step.experts


def decode(one: Engine, new_tokens: int) -> tuple[list[int], str, list[Facts]]:
    record = SequenceRecord(len(PROMPT))
    steps = [facts(step) for step in one.decode(PROMPT, new_tokens, record)]
    assert one.forward.length == len(PROMPT) + len(record.tokens) - 1
    return record.tokens, record.finish, steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piecewise", [False, True])
def test_steps_are_those_of_the_stepwise_loop(models: Callable[..., Any], kind: str, piecewise: bool) -> None:
    target = models("gpt-oss").reference
    stepwise = engine(static(target), kind, target.spec.vocab, ahead=False)
    ahead = engine(static(target, piecewise=piecewise), kind, target.spec.vocab, ahead=True)
    for new_tokens in (24, 1, 2, 3, 5, 8, 24):
        assert decode(ahead, new_tokens) == decode(stepwise, new_tokens)


def test_tokens_are_the_eager_rung_s(models: Callable[..., Any]) -> None:
    target = models("qwen").reference
    eager = Engine(EagerForward(target, 64), NoDrafter(), SamplingRule())
    assert decode(engine(static(target), "none", 0, ahead=True), 20) == decode(eager, 20)


def test_a_text_ends_at_its_end_token_with_a_step_under_way(models: Callable[..., Any]) -> None:
    target = models("gpt-oss").reference
    stepwise, ahead = static(target), static(target)
    text = decode(engine(stepwise, "none", 0, ahead=False), 16)[0]
    for end in sorted(set(text)):
        wanted = decode(engine(stepwise, "none", 0, ahead=False, end=end), 16)
        assert decode(engine(ahead, "none", 0, ahead=True, end=end), 16) == wanted
        assert wanted[1] == "eos"
    assert decode(engine(ahead, "none", 0, ahead=True), 16)[0] == text  # nothing is left behind


def test_no_step_goes_past_the_last_token(models: Callable[..., Any]) -> None:
    """The cache has exactly the positions that the text needs."""
    target = models("gpt-oss").reference
    one = engine(static(target, len(PROMPT) + 9), "none", 0, ahead=True)
    assert len(decode(one, 10)[0]) == 10
    wide = engine(static(target, len(PROMPT) + 9), "fixed", target.spec.vocab, ahead=True)
    assert len(decode(wide, 10)[0]) == 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_generator_leaves_no_trace(models: Callable[..., Any], kind: str) -> None:
    target = models("gpt-oss").reference
    one, other = (engine(static(target), kind, target.spec.vocab, ahead=ahead) for ahead in (True, False))
    for taken in (1, 2, 3):
        for each in (one, other):
            record = SequenceRecord(len(PROMPT))
            steps = each.decode(PROMPT, 24, record)
            seen = [facts(next(steps)) for _ in range(taken)]
            steps.close()  # type: ignore[attr-defined]  # a generator
            assert record.finish == "aborted"
            assert record.tokens[1:] == [token for step in seen for token in step[4]]
            assert each.forward.length == len(PROMPT) + len(record.tokens) - 1
        assert one.clock.times() == []
        assert decode(one, 24) == decode(other, 24)


def test_a_step_is_enqueued_before_the_last_one_is_read(
    models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = models("gpt-oss").reference
    forward, log = static(target), list[str]()
    follow, outcome = forward.follow, StepReport.outcome

    def following(drafts: Tensor, **named: Any) -> Any:
        log.append("enqueue")
        return follow(drafts, **named)

    def reading(self: StepReport) -> list[int]:
        log.append("read")
        return outcome(self)

    monkeypatch.setattr(forward, "follow", following)
    monkeypatch.setattr(StepReport, "outcome", reading)
    spans: list[str] = []

    @contextmanager
    def annotate(name: str) -> Iterator[None]:
        spans.append(name)
        yield

    record = SequenceRecord(len(PROMPT))
    steps = list(engine(forward, "none", 0, ahead=True).decode(PROMPT, 6, record, annotate))
    assert log[:9] == ["enqueue", *["enqueue", "read"] * 4]
    assert log[9] == "read"  # the fifth; what follows is leaving
    assert spans == ["draft", "forward", *["draft", "forward", "verify"] * 4, "verify"]
    for one, after in pairwise(steps):
        assert one.start_ns <= one.draft_end_ns <= one.forward_end_ns == one.end_ns == after.start_ns


def test_planted_waits_are_kept_and_cost_what_they_cost(models: Callable[..., Any]) -> None:
    target = models("gpt-oss").reference
    faulty = FaultyAheadForward(static(target), item=True, upload=True, busy=True)
    one = engine(faulty, "none", 0, ahead=True)
    record = SequenceRecord(len(PROMPT))
    steps = list(one.decode(PROMPT, 8, record))
    assert record.tokens == decode(engine(static(target), "none", 0, ahead=False), 8)[0]
    assert faulty.items == faulty.uploads == len(steps) == 7
    assert all(step.end_ns - step.start_ns > 4_000_000 for step in steps)


def test_what_cannot_run_ahead_is_refused(models: Callable[..., Any]) -> None:
    target = models("gpt-oss").reference
    for forward in (EagerForward(target, 64), FaultyForward(EagerForward(target, 64), busy=True)):
        with pytest.raises(InputError, match="this forward cannot run ahead"):
            decode(engine(forward, "none", 0, ahead=True), 4)
    forward = static(target)
    forward.prefill(torch.tensor([PROMPT]))
    with pytest.raises(InputError, match="2 tokens cannot follow a step under way; widths are"):
        forward.follow(torch.zeros(1, dtype=torch.int64), latest=5)
    with pytest.raises(InputError, match="KV cache: 61 \\+ 4 positions exceed its capacity 64"):
        forward.follow(torch.zeros(3, dtype=torch.int64), latest=61)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piecewise", [False, True])
def test_graphs_run_ahead(models: Callable[..., Any], kind: str, piecewise: bool) -> None:
    target = models("gpt-oss").reference
    forward = static(target, capture=True, piecewise=piecewise)
    stepwise, ahead = (engine(forward, kind, target.spec.vocab, ahead=value) for value in (False, True))
    for new_tokens in (40, 3, 40):
        assert decode(ahead, new_tokens) == decode(stepwise, new_tokens)
    for each in (ahead, stepwise):  # both: simulated acceptance draws on from sequence to sequence
        steps = each.decode(PROMPT, 40, SequenceRecord(len(PROMPT)))
        next(steps)
        steps.close()  # type: ignore[attr-defined]  # a generator
    assert decode(ahead, 40) == decode(stepwise, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["graph", "splitk"])
@pytest.mark.parametrize("fault", ["", "item-per-step", "pageable-copy", "graph-break"])
def test_a_scenario_runs_ahead(rung: str, fault: str) -> None:
    """The shipped model; a planted fault changes no token."""
    texts = []
    for ahead in ("false", "true"):
        faults = f', faults = ["{fault}"]' if fault and ahead == "true" else ""
        engine = f'device = "cuda", rung = "{rung}", run_ahead = {ahead}{faults}'
        text = (
            f'name = "x"\nengine = {{ {engine} }}\nprompts = {{ count = 1, max_prompt_tokens = 32, new_tokens = 48 }}'
        )
        (variant,) = parse_scenario(text, source="x", folder=Path()).variants()
        pipeline = build_pipeline(variant)
        assert isinstance(pipeline.engine, Engine)
        prompt = pipeline.prompts[0].tokens
        record = SequenceRecord(len(prompt))
        steps = list(pipeline.engine.decode(prompt, 48, record))
        texts.append((record.tokens, record.finish, [facts(step) for step in steps]))
        if ahead == "true":
            assert all(one.end_ns == after.start_ns for one, after in pairwise(steps))
    assert texts[0] == texts[1]

"""The static-shape forward in plain torch: the eager rung's numbers, whatever is padded or cut into pieces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.ngram import NGramDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter
from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.engine import EagerEngine, Engine, SamplingRule, SequenceRecord
from workbench.decode.model import Scores, Target
from workbench.decode.rungs import static as static_module
from workbench.decode.rungs.forward import EagerForward, Forward
from workbench.decode.rungs.plain import PlainStep
from workbench.decode.rungs.static import StaticForward
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.errors import InputError

CAPACITY = 40


def static(target: Target, widths: list[int], *, capture: bool = False, piecewise: bool = False) -> StaticForward[Any]:
    step = PlainStep(target, CAPACITY + StaticForward.slack(widths))
    return StaticForward(
        step, device=target.device, capacity=CAPACITY, widths=widths, capture=capture, piecewise=piecewise
    )


def tokens(target: Target, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(target.spec.vocab, (1, count), generator=generator).to(target.device)


def same(got: Scores, want: Scores) -> None:
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.hidden, want.hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.taps, want.taps, rtol=1e-4, atol=1e-4)
    assert torch.equal(got.experts.sort(-1).values, want.experts.sort(-1).values)


def walk(forward: Forward, text: Tensor, prompt: int, widths: list[int]) -> list[Scores]:
    """Prefill ``prompt`` tokens, then score the rest in steps of ``widths``, committing all of each."""
    forward.length = 0
    first = forward.prefill(text[:, :prompt])
    seen = [Scores(first.logits[:, -1:].clone(), first.hidden.clone(), first.taps.clone(), first.experts.clone())]
    forward.length = prompt
    for width in widths:
        scores = forward.score(text[:, forward.length : forward.length + width])
        seen.append(Scores(scores.logits.clone(), scores.hidden.clone(), scores.taps.clone(), scores.experts.clone()))
        forward.length += width
    return seen


@pytest.mark.parametrize("family", ["gpt-oss", "qwen"])
@pytest.mark.parametrize(
    ("prompt", "widths", "steps"),
    [
        (1, [1], [1] * 8),
        (9, [1, 4], [4, 1, 2, 3, 4]),  # 2 and 3 are padded to 4; the prompt's last piece is padded too
        (4, [4], [4, 4, 4]),
        (7, [16], [16, 1]),
    ],
)
@pytest.mark.parametrize("piecewise", [False, True])
def test_numbers_are_the_eager_rung_s(
    models: Callable[..., Any], family: str, prompt: int, widths: list[int], steps: list[int], piecewise: bool
) -> None:
    target = models(family).reference
    text = tokens(target, prompt + sum(steps))
    wanted = walk(EagerForward(target, CAPACITY), text, prompt, steps)
    for got, want in zip(walk(static(target, widths, piecewise=piecewise), text, prompt, steps), wanted, strict=True):
        same(got, want)


def test_rejected_tokens_leave_nothing_behind(models: Callable[..., Any]) -> None:
    target = models("gpt-oss").reference
    forward, text = static(target, [1, 4]), tokens(target, 12)
    forward.length = 0
    forward.prefill(text[:, :6])
    forward.length = 6
    forward.score(torch.flip(text[:, 6:10], [1]))  # none of it is committed
    got = forward.score(text[:, 6:8])
    eager = EagerForward(target, CAPACITY)
    eager.prefill(text[:, :6])
    eager.length = 6
    same(got, eager.score(text[:, 6:8]))


def test_what_does_not_fit_is_refused(models: Callable[..., Any]) -> None:
    target = models("gpt-oss").reference
    forward = static(target, [1, 4])
    with pytest.raises(InputError, match="5 tokens exceed the widest step of 4"):
        forward.score(tokens(target, 5))
    forward.length = CAPACITY - 1
    forward.score(tokens(target, 1))
    with pytest.raises(InputError, match=f"KV cache: {CAPACITY - 1} \\+ 2 positions exceed its capacity {CAPACITY}"):
        forward.score(tokens(target, 2))


def drafter(kind: str, target: Target, parts: dict[str, Any]) -> Drafter:
    match kind:
        case "ngram":
            return NGramDrafter(depth=3, order=2)
        case "simulated":  # arbitrary tokens, verified in earnest
            return SimulatedDrafter(3, target.spec.vocab)
        case "mtp":
            return MtpDrafter(target, parts["mtp"](target).to(target.device), depth=3, capacity=CAPACITY)
        case "dflash":
            return DFlashDrafter(target, parts["dflash"](target).to(target.device))
        case _:
            return NoDrafter()


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("kind", ["none", "ngram", "simulated", "mtp", "dflash"])
def test_every_drafter_decodes_as_on_the_eager_rung(
    models: Callable[..., Any], tiny_mtp: Callable[..., Any], tiny_dflash: Callable[..., Any], kind: str, decided: bool
) -> None:
    target = models("gpt-oss").reference
    parts = {"mtp": tiny_mtp, "dflash": tiny_dflash}
    prompt = tokens(target, 9)[0].tolist()
    outputs, steps = [], []
    for engine in (
        EagerEngine(target, drafter(kind, target, parts), SamplingRule(), capacity=CAPACITY),
        Engine(
            static(target, [1, 4]),
            drafter(kind, target, parts),
            SamplingRule(),
            verify=DeviceVerifier(4, target.device) if decided else None,
        ),
    ):
        record = SequenceRecord(len(prompt))
        steps.append([(step.width, step.accepted, step.experts) for step in engine.decode(prompt, 24, record)])
        outputs.append(record.tokens)
    assert outputs[0] == outputs[1]
    assert steps[0] == steps[1]


def test_a_loop_that_follows_the_device_sets_nothing_up(
    models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = models("gpt-oss").reference
    forward = static(target, [1, 4])
    prompt, written = tokens(target, 5)[0].tolist(), []
    copy_, add = Tensor.copy_, torch.add

    def copying(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if self.data_ptr() == forward._tokens.data_ptr():
            written.append("token")
        return copy_(self, *arguments, **named)

    def adding(*arguments: Any, **named: Any) -> Tensor:
        if named.get("out") is forward._lengths:
            written.append("lengths")
        return add(*arguments, **named)

    # The step's own end, which a graph replays, sets up the next one; it is not the host's doing.
    monkeypatch.setattr(static_module, "decided", quietly(static_module.decided, written))
    monkeypatch.setattr(Tensor, "copy_", copying)
    monkeypatch.setattr(torch, "add", adding)
    engine = Engine(forward, NoDrafter(), SamplingRule(), verify=DeviceVerifier(4, target.device))
    seen = []
    for _ in engine.decode(prompt, 6, SequenceRecord(len(prompt))):
        seen.append(list(written))
        written.clear()
    assert "lengths" in seen[0]  # the prompt's last piece was padded
    assert seen[1:] == [[], [], [], []]


def quietly(work: Callable[..., Any], log: list[str]) -> Callable[..., Any]:
    """``work``, whatever it does to ``log`` undone."""

    def run(*arguments: Any) -> Any:
        before = list(log)
        result = work(*arguments)
        log[:] = before
        return result

    return run


@pytest.mark.parametrize("kind", ["none", "simulated", "mtp"])
def test_an_overruled_device_is_set_right(models: Callable[..., Any], tiny_mtp: Callable[..., Any], kind: str) -> None:
    """Simulated acceptance: what the loop commits is not what the device decided."""
    target = models("gpt-oss").reference
    prompt, outputs = tokens(target, 5)[0].tolist(), []
    for decided in (False, True):
        keep = SimulatedAcceptance(2.5, 3, "fixed")
        engine = Engine(
            static(target, [1, 4]),
            drafter(kind, target, {"mtp": tiny_mtp}),
            SamplingRule(),
            acceptance=keep,
            verify=DeviceVerifier(4, target.device, keep) if decided else None,
        )
        record = SequenceRecord(len(prompt))
        steps = [step.tokens for step in engine.decode(prompt, 20, record)]
        outputs.append((record.tokens, steps))
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("piecewise", [False, True])
def test_a_replayed_graph_is_the_uncaptured_step(models: Callable[..., Any], piecewise: bool) -> None:
    target = models("gpt-oss").expanded.target
    text = tokens(target, 26)
    plain = walk(static(target, [1, 4]), text, 9, [4, 1, 2, 4, 3, 3])
    captured = walk(static(target, [1, 4], capture=True, piecewise=piecewise), text, 9, [4, 1, 2, 4, 3, 3])
    for got, want in zip(captured, plain, strict=True):
        assert torch.equal(got.logits, want.logits)
        assert torch.equal(got.experts, want.experts)


@pytest.mark.gpu
def test_a_loop_over_graphs_is_the_eager_loop(models: Callable[..., Any], tiny_mtp: Callable[..., Any]) -> None:
    target = models("gpt-oss").reference
    prompt, outputs = tokens(target, 9)[0].tolist(), []
    for capture, verify in ((False, None), (True, DeviceVerifier(4, target.device))):
        engine = Engine(
            static(target, [1, 4], capture=capture),
            drafter("mtp", target, {"mtp": tiny_mtp}),
            SamplingRule(),
            verify=verify,
        )
        record = SequenceRecord(len(prompt))
        steps = [(step.width, step.accepted, step.experts) for step in engine.decode(prompt, 24, record)]
        outputs.append((record.tokens, steps))
    assert outputs[0] == outputs[1]

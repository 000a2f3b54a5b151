"""The persistent rung of several tokens on the CPU, the kernel's own source beneath it, against the eager rung."""

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Proposal, TargetFeatures
from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.engine import EagerEngine, Engine, SamplingRule, SequenceRecord
from workbench.decode.model import Target
from workbench.decode.precision import load_policy
from workbench.decode.rungs import persistent_wide as rung
from workbench.decode.rungs.agreement import agreement, fill_context
from workbench.decode.rungs.decided import DecidedScores
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.static import StepInputs, decided
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError, UnfitError
from workbench.kernels import nvrtc, persistent_wide
from workbench.run.passes import lane_source

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]
CPU = torch.device("cpu")
CAPACITY = 40
SPEC: dict[str, Any] = {
    "name": "tiny-64",
    "hidden": 128,
    "vocab": 96,
    "mixers": ("sliding", "full"),
    "window": 6,
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "qk_dim": 64, "v_dim": 64, "bias": True, "sinks": True},
    "moe": {"experts": 8, "top_k": 2, "inter": 64, "bias": True, "activation": "clamped-swiglu"},
    "norm_eps": 1e-5,
    "max_positions": 64,
}


@pytest.fixture
def on_the_cpu(build_kernel: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rung's engine with launches that run the kernel's source on the CPU."""
    seeds = itertools.count()

    class CpuEngine(persistent_wide.WideEngine):
        def __init__(self, shape: Any, weights: Any, shared: Any, plan: Any, taps: Sequence[int] = ()) -> None:
            self.shape, self.weights, self.shared, self.plan, self.device = shape, weights, shared, plan, CPU
            self.capacity = persistent_wide.check_shared(shape, shared, CPU)
            self.buffers = persistent_wide.make_wide_buffers(shape, plan, CPU, taps)
            macros = persistent_wide.macros(shape, plan)
            self.kernel = SimpleNamespace(
                cubin=SimpleNamespace(kernel="k", smem_bytes=0), registers=1, local_bytes=0, smem_bytes=0
            )
            self._library = build_kernel("persistent_wide.cu", "decode_step_wide.cpp", macros)
            arguments = persistent_wide.wide_arguments(weights, shared, self.buffers, self.capacity)
            self._words = (ctypes.c_uint64 * len(arguments))(*(argument.value or 0 for argument in arguments))

        def step(self) -> None:
            assert self._library.run_step(self._words, next(seeds)) == 0, "the step deadlocked"

    def plan(shape: Any, tokens: int, grid: int) -> persistent_wide.WidePlan:
        made = persistent_wide.make_wide_plan(shape, tokens, 3, warps=4, stages=4)
        return dataclasses.replace(made, split_positions=16)

    monkeypatch.setattr(rung, "WideEngine", CpuEngine)
    monkeypatch.setattr(rung, "make_wide_plan", plan)
    monkeypatch.setattr(rung, "compile_wide", lambda shape, plan: None)


def build() -> tuple[Target, tuple[PackedExperts, ...], Target]:
    """The packed model in bfloat16, and the same one expanded in float32; both with a tapped layer."""
    spec, policy = ModelSpec.model_validate(SPEC), load_policy("mxfp4-experts")
    target, packed = random_model(spec, policy, seed=2, device=CPU, dtype=torch.bfloat16, packed=True)
    expanded, _ = random_model(spec, policy, seed=2, device=CPU, dtype=torch.bfloat16, packed=False)
    expanded = expanded.float()
    target.taps = expanded.taps = (0,)
    return target, packed, expanded


@pytest.mark.parametrize("width", [3])
def test_a_wide_step_scores_as_the_eager_rung(on_the_cpu: None, width: int) -> None:
    target, packed, expanded = build()
    forward = rung.wide_forward(target, packed, CAPACITY, width, decide=False)
    eager = EagerForward(expanded, CAPACITY)
    for context, count in ((0, 3), (5, 3), (20, 2)):
        fill_context(forward, context)
        fill_context(eager, context)
        tokens = torch.tensor([[17, 90, 3][:count]])
        got, want = forward.score(tokens), eager.score(tokens)
        result = agreement(got, want)
        assert result.same == result.rows == count
        assert result.error < 1e-2
        assert result.hidden_error < 1e-2
        assert (got.taps - want.taps).norm() / want.taps.norm() < 1e-2


class Oracle:
    """Drafts what the text will be, but for a token now and then."""

    name = "oracle"

    def __init__(self, text: Sequence[int], prompt: int, max_draft: int) -> None:
        self._text, self._prompt, self.max_draft = text, prompt, max_draft

    def reset(self) -> None:
        """Start again."""
        self._seen = -self._prompt

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Count the committed tokens; hidden states and taps must be there."""
        assert features is not None
        assert torch.isfinite(features.hidden).all()
        assert torch.isfinite(features.taps).all()
        self._seen += len(tokens)

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Return the next tokens, right or wrong."""
        following = (*self._text, 0, 0)[self._seen : self._seen + self.max_draft]
        return Proposal(
            torch.tensor(
                [token if (self._seen + i) % (self.max_draft + 2) else 95 - token for i, token in enumerate(following)]
            )
        )


@pytest.mark.parametrize("width", [2, 3])
def test_a_step_decides_as_plain_torch_does_and_sets_up_the_next(on_the_cpu: None, width: int) -> None:
    """A width of the kernel's own, whose words are one piece, and one that it pads."""
    target, packed, _ = build()
    step = rung.WideStep(target, packed, CAPACITY, [width])
    chosen: list[int] = []
    keep = torch.tensor([-1], dtype=torch.int32)
    for right in range(width):  # so many drafts stand
        tokens = torch.tensor([17, *[token ^ (index >= right) for index, token in enumerate(chosen[: width - 1])]])
        tokens = torch.cat((tokens, tokens.new_zeros(width - len(tokens))))
        lengths = torch.full((4,), width, dtype=torch.int32)
        found = step.end(step.begin(StepInputs(tokens, lengths[:1], lengths, keep)))
        assert isinstance(found, DecidedScores)
        assert (found.words is not None) == (width == 2)
        again, grown = torch.tensor([17, *tokens.tolist()[1:]]), torch.full((4,), width, dtype=torch.int32)
        plain = decided(found, StepInputs(again, grown[:1], grown, keep))
        assert torch.equal(found.outcome, plain.outcome)
        assert torch.equal(tokens, again)
        assert torch.equal(lengths, grown)
        if found.words is not None:
            assert torch.equal(found.words[-found.experts.numel() :], found.experts.flatten())
        chosen = found.outcome[width + 1 : 2 * width + 1].tolist()


@pytest.mark.parametrize("width", [2, 3])
def test_the_loop_writes_the_eager_text(on_the_cpu: None, width: int) -> None:
    target, packed, expanded = build()
    prompt, count = [3, 90, 7, 11], 10
    plain = SequenceRecord(len(prompt))
    list(EagerEngine(expanded, NoDrafter(), SamplingRule(), capacity=CAPACITY).decode(prompt, count, plain))
    forward = rung.wide_forward(target, packed, CAPACITY, width)
    drafter = Oracle(plain.tokens, len(prompt), width - 1)
    engine = Engine(forward, drafter, SamplingRule(), verify=DeviceVerifier(width, CPU))
    for _ in range(2):  # the second text stands at the first position again
        record = SequenceRecord(len(prompt))
        steps = list(engine.decode(prompt, count, record))
        assert record.tokens == plain.tokens
        assert len(steps) < count - 1
        assert any(step.accepted for step in steps)
        assert any(step.accepted < step.drafted for step in steps)


def test_the_loop_runs_ahead(on_the_cpu: None) -> None:
    """Simulated acceptance, carried out by the step itself."""
    target, packed, _ = build()
    forward, found = rung.wide_forward(target, packed, CAPACITY, 2, ahead=True), []
    for ahead in (None, DeviceVerifier(2, CPU)):
        keep = SimulatedAcceptance(1.5, 1, "fixed")
        engine = Engine(
            forward,
            SimulatedDrafter(1, 96),
            SamplingRule(),
            acceptance=keep,
            verify=DeviceVerifier(2, CPU, keep),
            ahead=ahead,
        )
        record = SequenceRecord(2)
        steps = [(step.context, step.accepted, step.tokens, step.experts) for step in engine.decode([3, 90], 6, record)]
        found.append((record.tokens, steps))
    assert found[0] == found[1]


def test_a_laned_forward_stamps_every_phase(on_the_cpu: None) -> None:
    target, packed, _ = build()
    forward = rung.wide_forward(target, packed, CAPACITY, 2).laned()
    forward.prefill(torch.tensor([[5, 7]]))
    source = lane_source(forward)
    stamps = source.read()
    assert stamps.shape == (3, len(source.tasks), 3)
    assert (stamps[:, :, 2] > stamps[:, :, 0]).all()
    assert source.sms(stamps).tolist() == [0, 1, 2]


def test_a_step_that_went_wrong_is_refused(on_the_cpu: None) -> None:
    target, packed, _ = build()
    forward = rung.wide_forward(target, packed, CAPACITY, 2)
    with pytest.raises(UnfitError, match="the token is outside the vocabulary"):
        forward.prefill(torch.tensor([[5, 500]]))
    with pytest.raises(UnfitError, match="the token is outside the vocabulary"):
        forward.score(torch.tensor([[5]]))


def test_a_width_beyond_the_kernel_is_refused() -> None:
    with pytest.raises(InputError, match="scores up to 8 tokens a step, not 9"):
        rung.check_width(ModelSpec.model_validate(SPEC), 9)

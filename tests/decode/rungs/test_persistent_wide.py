"""The persistent rung of several tokens on a GPU; tests/kernels/simt/test_wide_rung.py runs the same on the CPU."""

from typing import Any

import pytest
import torch

from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.engine import Engine, SamplingRule, SequenceRecord
from workbench.decode.model import Target
from workbench.decode.precision import load_policy
from workbench.decode.rungs.agreement import agreement, fill_context
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.persistent_wide import wide_forward
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.decode.spec import ModelSpec

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


def build(device: torch.device) -> tuple[Target, tuple[PackedExperts, ...], Target]:
    """The packed model in bfloat16, and the same one expanded in float32; both with a tapped layer."""
    spec, policy = ModelSpec.model_validate(SPEC), load_policy("mxfp4-experts")
    target, packed = random_model(spec, policy, seed=2, device=device, dtype=torch.bfloat16, packed=True)
    expanded, _ = random_model(spec, policy, seed=2, device=device, dtype=torch.bfloat16, packed=False)
    target.taps = expanded.taps = (0,)
    return target, packed, expanded.float()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 3, 8])
def test_one_launch_of_several_tokens_scores_as_the_eager_rung(width: int) -> None:
    device = torch.device("cuda")
    target, packed, expanded = build(device)
    forward = wide_forward(target, packed, CAPACITY, width)
    eager = EagerForward(expanded, CAPACITY)
    generator = torch.Generator().manual_seed(width)
    for context in (0, 5, 20):
        fill_context(forward, context)
        fill_context(eager, context)
        tokens = torch.randint(SPEC["vocab"], (1, width), generator=generator).to(device)
        got, want = forward.score(tokens), eager.score(tokens)
        result = agreement(got, want)
        assert result.same == width
        assert result.error < 1e-2
        assert result.hidden_error < 1e-2
        assert (got.taps - want.taps).norm() / want.taps.norm() < 1e-2


@pytest.mark.gpu
def test_the_loop_runs_over_the_captured_launch_and_over_the_laned_one() -> None:
    device = torch.device("cuda")
    target, packed, _ = build(device)
    forward = wide_forward(target, packed, CAPACITY, 4)
    texts = []
    for one in (forward, forward.laned()):
        drafter, acceptance = SimulatedDrafter(3, SPEC["vocab"]), SimulatedAcceptance(2.5, 3, "fixed")
        engine = Engine(one, drafter, SamplingRule(), verify=DeviceVerifier(4, device, acceptance))
        record = SequenceRecord(4)
        steps = list(engine.decode([3, 90, 7, 11], 24, record))
        assert len(record.tokens) == 24
        assert len(steps) < 14
        texts.append(record.tokens)
    assert texts[0] == texts[1]
    assert int((one.engine.buffers.lanes[:, -1, 2] > 0).sum()) == one.engine.plan.grid


@pytest.mark.gpu
@pytest.mark.parametrize("accept", [False, True])
def test_the_loop_runs_ahead_of_the_captured_launch(accept: bool) -> None:
    device = torch.device("cuda")
    target, packed, _ = build(device)
    forward, found = wide_forward(target, packed, CAPACITY, 4, ahead=True), []
    for ahead in (False, True, False, True):
        keep = SimulatedAcceptance(2.4, 3, "multinomial", seed=3) if accept else None
        engine = Engine(
            forward,
            SimulatedDrafter(3, SPEC["vocab"]),
            SamplingRule(),
            acceptance=keep,
            verify=DeviceVerifier(4, device, keep),
            ahead=DeviceVerifier(4, device) if ahead else None,
        )
        record = SequenceRecord(4)
        steps = [
            (step.context, step.width, step.accepted, step.tokens, step.experts)
            for step in engine.decode([3, 90, 7, 11], 30, record)
        ]
        found.append((record.tokens, steps))
    assert found == [found[0]] * 4

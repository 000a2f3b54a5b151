"""The decode loop over the kernel step: speculation keeps what plain decoding of the same rung gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.decode.dflash import DFlashModel
from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter, Proposal, TargetFeatures
from workbench.decode.drafters.simulated import SimulatedAcceptance, SimulatedDrafter
from workbench.decode.engine import Engine, SamplingRule, SequenceRecord, StepRecord
from workbench.decode.mtp import MtpHead
from workbench.decode.precision import load_policy
from workbench.decode.rungs.fused import FusedStep
from workbench.decode.rungs.plan import PLANS
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.static import StaticForward
from workbench.decode.rungs.store import Held
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.decode.spec import ModelSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAPACITY, NEW = 16, 4
PROMPT = [3, 1, 2]
SPEC = ModelSpec.model_validate(
    {
        "name": "one-layer",
        "hidden": 64,
        "vocab": 32,
        "mixers": ("full",),
        "attention": {"kind": "gqa", "heads": 4, "kv_heads": 1, "qk_dim": 16, "v_dim": 16},
        "moe": {"experts": 4, "top_k": 1, "inter": 64},
        "window": 6,
        "max_positions": 64,
        "mtp": {"modules": 1, "dense_inter": 32},
        "dflash": {"layers": 1, "block": 3, "window": 6, "inter": 32, "taps": (0,)},
    }
)


@pytest.fixture(scope="module")
def held() -> Held:
    target, packed = random_model(
        SPEC, load_policy("mxfp4-experts"), seed=4, device=DEVICE, dtype=torch.bfloat16, packed=True
    )
    return Held(target, None, packed)


@pytest.fixture(scope="module")
def forward(held: Held) -> StaticForward[Any]:
    step = FusedStep(held.target, held.packed, PLANS["fp4"], CAPACITY + 3)
    return StaticForward(step, device=DEVICE, capacity=CAPACITY, widths=[1, 3], capture=DEVICE.type == "cuda")


def decode(forward: StaticForward[Any], drafter: Drafter, **named: Any) -> tuple[list[int], list[StepRecord]]:
    record = SequenceRecord(len(PROMPT))
    return record.tokens, list(Engine(forward, drafter, SamplingRule(), **named).decode(PROMPT, NEW, record))


@pytest.fixture(scope="module")
def plain(forward: StaticForward[Any]) -> list[int]:
    return decode(forward, NoDrafter(), verify=DeviceVerifier(3, DEVICE))[0]


class Truthful:
    """Drafts the true continuation, and a wrong token behind it in every other step."""

    name, max_draft = "truthful", 2

    def __init__(self, truth: list[int]) -> None:
        self._truth = truth
        self.reset()

    def reset(self) -> None:
        self._seen, self._steps = 0, 0

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        self._seen += len(tokens)
        self._steps += 1

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        start = self._seen - len(PROMPT)
        draft = self._truth[start : start + 2]
        if self._steps % 2 == 0 and draft:
            draft[-1] = (draft[-1] + 1) % SPEC.vocab
        return Proposal(torch.tensor(draft, dtype=torch.int64, device=DEVICE))


def test_drafts_that_are_right_are_kept(forward: StaticForward[Any], plain: list[int]) -> None:
    tokens, steps = decode(forward, Truthful(plain), verify=DeviceVerifier(3, DEVICE))
    assert tokens == plain
    assert sum(step.accepted for step in steps) > 0
    by_torch, again = decode(forward, Truthful(plain))
    assert by_torch == plain
    assert [step.accepted for step in again] == [step.accepted for step in steps]


@pytest.mark.parametrize("kind", ["simulated", "mtp", "dflash"])
def test_every_drafter_keeps_the_output(
    forward: StaticForward[Any],
    held: Held,
    plain: list[int],
    tiny_mtp: Callable[..., MtpHead],
    tiny_dflash: Callable[..., DFlashModel],
    kind: str,
) -> None:
    target, drafter = held.target, None
    match kind:
        case "simulated":
            drafter = SimulatedDrafter(2, SPEC.vocab)
        case "mtp":
            head = tiny_mtp(target).to(DEVICE, torch.bfloat16)
            drafter = MtpDrafter(target, head, depth=2, capacity=CAPACITY)
        case "dflash":
            drafter = DFlashDrafter(target, tiny_dflash(target).to(DEVICE, torch.bfloat16))
    assert drafter is not None
    tokens, steps = decode(forward, drafter, verify=DeviceVerifier(3, DEVICE))
    assert tokens == plain
    assert steps[0].width == 3


def test_simulated_acceptance_commits_what_it_says(forward: StaticForward[Any]) -> None:
    acceptance = SimulatedAcceptance(3, 2, "fixed")
    tokens, steps = decode(forward, SimulatedDrafter(2, SPEC.vocab), verify=DeviceVerifier(3, DEVICE, acceptance))
    assert [len(step.tokens) for step in steps] == [3]
    assert len(tokens) == NEW

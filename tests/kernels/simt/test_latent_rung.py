"""The persistent rung of an MLA slice on the CPU, the kernel's own source beneath it, against the eager rung."""

import ctypes
import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Proposal
from workbench.decode.engine import Engine, SamplingRule, SequenceRecord
from workbench.decode.model import Target
from workbench.decode.precision import load_policy
from workbench.decode.rungs import persistent, persistent_latent
from workbench.decode.rungs.agreement import agreement, fill_context
from workbench.decode.rungs.collectives import with_collectives
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.persistent import PersistentForward
from workbench.decode.rungs.persistent_latent import latent_forward, step_shape
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.routing import drawn_choices, with_choices
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.decode.spec import ModelSpec
from workbench.errors import UnfitError
from workbench.kernels import nvrtc
from workbench.kernels import persistent_latent as kernel
from workbench.run.passes import lane_source

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]
CPU = torch.device("cpu")
CAPACITY, GRID = 40, 5
SPEC: dict[str, Any] = {
    "name": "tiny-latent",
    "hidden": 512,
    "vocab": 48,
    "mixers": ("full",) * 3,
    "attention": {
        "kind": "mla",
        "heads": 2,
        "q_lora": 128,
        "kv_lora": 512,
        "nope_dim": 16,
        "rope_dim": 64,
        "v_dim": 64,
        "indexer": {"heads": 4, "dim": 64, "top_k": 64, "layers": 2, "first": 1, "every": 2},
    },
    "dense_first": 1,
    "dense_inter": 128,
    "moe": {
        "experts": 8, "top_k": 2, "inter": 64, "shared": 1, "shared_inter": 128, "score": "sigmoid", "factor": 2.5,
    },
    "norm_eps": 1e-5,
    "max_positions": 64,
}  # fmt: skip
SCORES, CACHED = 2e-2, 1e-2  # the rung rounds what it caches to bf16, the eager one computes in fp32


@pytest.fixture
def on_the_cpu(build_kernel: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rung's engine with launches that run the kernel's source on the CPU."""
    seeds = itertools.count()

    class CpuEngine(kernel.LatentEngine):
        def __init__(
            self, shape: Any, weights: Any, *, capacity: int, rope: Tensor, plan: Any, forced: Any, device: Any
        ) -> None:
            self.shape, self.weights, self.capacity, self.plan, self.device = shape, weights, capacity, plan, CPU
            kernel.check_weights(shape, weights, CPU)
            if forced is not None:
                kernel.check_forced(shape, forced)
            self.forced = forced
            self.buffers = kernel.make_buffers(shape, plan, weights, capacity, rope, CPU)
            self.kernel = SimpleNamespace(
                cubin=SimpleNamespace(kernel="k", smem_bytes=0), registers=1, local_bytes=0, smem_bytes=0
            )
            self._library = build_kernel("persistent_latent.cu", "latent_step.cpp", kernel.macros(shape, plan))
            arguments = kernel.step_arguments(weights, self.buffers, capacity, forced)
            self._words = (ctypes.c_uint64 * len(arguments))(*(argument.value or 0 for argument in arguments))

        def step(self) -> None:
            assert self._library.run_step(self._words, next(seeds)) == 0, "the step deadlocked"

    monkeypatch.setattr(persistent_latent, "LatentEngine", CpuEngine)
    monkeypatch.setattr(persistent, "captured", lambda works, device, reset: works)


def build() -> tuple[Target, tuple[PackedExperts, ...], Target]:
    """The packed model in bfloat16, and the same one expanded in float32; norms and corrections that matter."""
    spec, policy = ModelSpec.model_validate(SPEC), load_policy("mxfp4-experts-fp8")
    packed_target, packed = random_model(spec, policy, seed=2, device=CPU, dtype=torch.bfloat16, packed=True)
    expanded, _ = random_model(spec, policy, seed=2, device=CPU, dtype=torch.bfloat16, packed=False)
    for target in (packed_target, expanded):
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in target.named_parameters():
                if name.endswith(("norm.weight", "norm.bias", "correction")):
                    parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return packed_target, cast("tuple[PackedExperts, ...]", packed), expanded.float()


def rung(target: Target, packed: tuple[PackedExperts, ...]) -> PersistentForward[Any]:
    plan = kernel.make_plan(step_shape(target.spec), GRID, warps=8, stages=4, in_flight=2)
    return latent_forward(target, packed, CAPACITY, plan)


@pytest.mark.parametrize("asked", [False, True])
def test_one_launch_scores_as_the_eager_rung(on_the_cpu: None, asked: bool) -> None:
    """By itself, and with the choices and the collectives that a variant asks for."""
    target, packed, expanded = build()
    if asked:
        choices = drawn_choices(target.spec, exponent=None, seed=4)
        target, expanded = with_collectives(with_choices(target, choices), 0.05), with_choices(expanded, choices)
    forward, eager = rung(target, packed), EagerForward(expanded, CAPACITY)
    for context, token in ((0, 17), (5, 3), (20, 40)):
        fill_context(forward, context)
        fill_context(eager, context)
        tokens = torch.tensor([[token]])
        result = agreement(forward.score(tokens), eager.score(tokens))
        assert result.same == 1
        assert result.error < SCORES
        for got_slabs, wanted_slabs in zip(forward.caches(), eager.caches(), strict=True):
            for got, wanted in zip(got_slabs, wanted_slabs, strict=True):
                if wanted.shape[2]:
                    difference = got[:, context].float() - wanted[:, context].float()
                    assert float(difference.norm() / wanted[:, context].norm()) < CACHED


def test_the_loop_steps_and_runs_ahead(on_the_cpu: None) -> None:
    target, packed, _ = build()
    forward, verify, texts = rung(target, packed), DeviceVerifier(1, CPU), []
    for ahead in (None, verify):
        engine, record = Engine(forward, NoDrafter(), SamplingRule(), verify=verify, ahead=ahead), SequenceRecord(2)
        steps = [(step.context, step.tokens, step.experts) for step in engine.decode([3, 40], 3, record)]
        texts.append((record.tokens, steps))
    assert texts[0] == texts[1]
    assert all(step[2] == (2, 2) for step in texts[0][1])


def test_a_laned_forward_stamps_every_phase(on_the_cpu: None) -> None:
    target, packed, _ = build()
    forward = rung(target, packed).laned()
    forward.score(torch.tensor([[5]]))
    source = lane_source(forward)
    stamps = source.read()
    assert stamps.shape == (GRID, len(source.tasks), 3)
    assert list(source.tasks[:8]) == [*kernel.PHASES, "low"]
    assert (stamps[:, :, 2] > stamps[:, :, 0]).all()
    assert source.sms(stamps).tolist() == list(range(GRID))


def test_a_step_that_went_wrong_is_refused_and_the_next_one_runs(on_the_cpu: None) -> None:
    target, packed, _ = build()
    forward, none = rung(target, packed), torch.Generator()
    want = forward.score(torch.tensor([[5]])).logits.clone()
    empty = Proposal(torch.empty(0, dtype=torch.int64))
    scores = forward.score(torch.tensor([[500]]))
    with pytest.raises(UnfitError, match="the token is outside the vocabulary"):
        DeviceVerifier(1, CPU)(empty, scores, none)
    assert torch.equal(forward.score(torch.tensor([[5]])).logits, want)

"""The persistent rung of MLA slices: its weights against the target's, its bookkeeping; the kernel itself needs a
GPU."""

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from workbench.decode.drafters.none import NoDrafter
from workbench.decode.engine import Engine, SamplingRule, SequenceRecord
from workbench.decode.experts import Experts
from workbench.decode.fp8 import Fp8, dequantize_blocks
from workbench.decode.mla import LatentAttention
from workbench.decode.model import Block, Target
from workbench.decode.precision import TensorClass, load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rank import first_layers, rank_slice
from workbench.decode.rungs import persistent, persistent_latent
from workbench.decode.rungs.agreement import agreement, fill_context
from workbench.decode.rungs.build import build_rung
from workbench.decode.rungs.collectives import collective_ns, with_collectives
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.persistent import PersistentForward
from workbench.decode.rungs.persistent_latent import check_latent, latent_forward, step_shape, step_weights
from workbench.decode.rungs.plan import PLANS, plan_of
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.routing import drawn_choices, with_choices
from workbench.decode.rungs.smoke import COLLECTIVE_US, TOLERANCE, passed
from workbench.decode.rungs.store import Held
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError
from workbench.kernels import fp8_tiles, mxfp4_tiles, persistent_layout
from workbench.kernels import persistent_latent as kernel
from workbench.kernels.latent_shape import LatentLayer, check_weights
from workbench.kernels.mxfp4_layout import restore
from workbench.scenario import parse_scenario

CPU = torch.device("cpu")
CAPACITY = 32
SHAPE: dict[str, Any] = {
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
POLICY = "mxfp4-experts-fp8"


@cache
def build(device: torch.device = CPU, policy: str = POLICY) -> tuple[Target, tuple[PackedExperts, ...]]:
    """The packed model in bfloat16; norms and corrections have values that matter."""
    spec = ModelSpec.model_validate(SHAPE)
    target, packed = random_model(spec, load_policy(policy), seed=2, device=device, dtype=torch.bfloat16, packed=True)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("norm.weight", "norm.bias", "correction")):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return target, cast("tuple[PackedExperts, ...]", packed)


def unpacked(tiles: Tensor) -> Tensor:
    """FP8 tiles of one part as bfloat16 [rows, columns]."""
    return dequantize_blocks(Fp8(*fp8_tiles.unpack_fp8(tiles)), torch.bfloat16)


def parts_of(tiles: Tensor, *rows: int) -> list[Tensor]:
    """Merged parts of so many rows each, padding cut off."""
    pieces = torch.split(tiles, [-(-count // 16) for count in rows])
    whole = [unpacked(piece) for piece in pieces]
    assert all(not bool(part[count:].any()) for part, count in zip(whole, rows, strict=True))
    return [part[:count] for part, count in zip(whole, rows, strict=True)]


def feed_of(layer: LatentLayer) -> tuple[Tensor, Tensor]:
    gate, gate_scales, up, up_scales = fp8_tiles.unpack_gate_up(layer.feed_up)
    halves = [dequantize_blocks(Fp8(*half), torch.bfloat16) for half in ((gate, gate_scales), (up, up_scales))]
    return torch.cat(halves), unpacked(layer.feed_down)


@pytest.mark.parametrize("index", range(3))
def test_every_tile_unpacks_to_the_target_s_tensors(index: int) -> None:
    target, packed = build()
    shape = step_shape(target.spec)
    assert (shape.owners, shape.dense_layers, shape.moe_layers) == ((0, 2), 1, 2)
    weights = step_weights(target, packed, shape)
    check_weights(shape, weights, CPU)
    layer, block = weights.layers[index], target.blocks[index]
    assert isinstance(block, Block)
    attention, owned = cast("LatentAttention", block.attention), cast("LatentAttention", block.attention).indexer
    assert (owned is not None) == (index != 1)
    low, queries = [attention.q_a, attention.kv_a], [attention.q_b]
    if owned is not None:
        low, queries = [*low, owned.wk, owned.weights], [*queries, owned.wq_b]
        assert layer.index_norm is not None
        assert torch.equal(layer.index_norm, torch.stack((owned.k_norm.weight, owned.k_norm.bias)).float())
    for tiles, parts in ((layer.a, low), (layer.q_b, queries), (layer.out, [attention.o])):
        got = parts_of(tiles, *(len(part.weight) for part in parts))
        assert all(torch.equal(one, part.weight) for one, part in zip(got, parts, strict=True))
    for tiles, matrix in ((layer.uk, attention.uk), (layer.uv, attention.uv)):
        assert torch.equal(persistent_layout.unpack_matrix(tiles), matrix.flatten(0, 1))
    ffn = block.ffn
    feed = ffn.shared if isinstance(ffn, Experts) else ffn
    assert feed is not None
    assert all(map(torch.equal, feed_of(layer), (feed.gate_up.weight, feed.down.weight)))
    assert torch.equal(layer.ffn_norm, block.ffn_norm.weight)
    if not isinstance(ffn, Experts):
        assert (layer.router, layer.gate_up) == (None, None)
        return
    assert layer.router is not None
    assert layer.gate_up is not None
    assert layer.down is not None
    assert layer.correction is not None
    assert torch.equal(layer.router, ffn.router.weight)
    assert torch.equal(layer.correction, cast("Tensor", ffn.correction).float())
    experts = packed[index - 1]
    got_up = mxfp4_tiles.unpack_tiles(layer.gate_up, 512, order="halves")
    assert all(map(torch.equal, got_up, restore(*experts.gate_up, "stacked")))
    assert all(map(torch.equal, mxfp4_tiles.unpack_tiles(layer.down, 64), restore(*experts.down, "plain")))


def test_the_ends_of_the_model_are_the_target_s() -> None:
    target, packed = build()
    weights = step_weights(target, packed, step_shape(target.spec))
    assert torch.equal(persistent_layout.unpack_matrix(weights.head), target.head_weight)
    assert weights.embedding.data_ptr() == target.embed.weight.data_ptr()
    assert torch.equal(weights.final_norm, target.norm.weight)


def test_weights_that_fp8_does_not_hold_are_refused_by_name() -> None:
    target, packed = build(policy="mxfp4-experts")
    with pytest.raises(InputError, match=r"blocks\.0\.ffn\.gate_up: block FP8 does not hold it exactly"):
        step_weights(target, packed, step_shape(target.spec))


def changed(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(SHAPE | changes)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (load_preset("gpt-oss-20b"), "gpt-oss-20b: attention: the persistent step of latent attention takes MLA"),
        (changed(moe={**SHAPE["moe"], "score": "softmax"}), "tiny-latent: moe: the persistent step takes sigmoid"),
        (changed(moe={**SHAPE["moe"], "shared": 0}), "moe.shared: the persistent step takes one shared expert, not 0"),
        (changed(attention={**SHAPE["attention"], "kv_lora": 256}), "persistent step: kv_lora and rope must be 512"),
        (load_preset("glm-5.2"), "glm-5.2: persistent step: inter must be at most 256 with top_k 8, not 2048"),
    ],
)
def test_models_that_the_kernel_was_not_written_for_are_refused(spec: ModelSpec, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        step_shape(spec)


def test_one_rank_of_glm_runs_one_token_a_step_on_a_whole_card() -> None:
    spec = rank_slice(load_preset("glm-5.2"), 8)
    shape = step_shape(spec)
    assert (shape.layers, shape.moe_layers, shape.heads, len(shape.owners)) == (78, 75, 8, 21)
    check_latent(spec, 1)
    with pytest.raises(InputError, match=r"drafter\.depth: rung 'persistent' scores one token a step of an MLA model"):
        check_latent(spec, 4)
    with pytest.raises(InputError, match="tiny-latent: persistent step: grid must be at most"):
        check_latent(ModelSpec.model_validate(SHAPE), 1)


def test_dense_weights_are_held_and_read_as_fp8_but_multiplied_by_16_bit_activations() -> None:
    stored, spec = load_policy(POLICY), rank_slice(load_preset("glm-5.2"), 8)
    plan = plan_of("persistent", spec)
    held = plan.held(stored, "bf16")
    classes = (TensorClass.QKV_A, TensorClass.O_PROJ, TensorClass.INDEXER_KEY, TensorClass.SHARED_EXPERTS)
    assert {held.of(cls).name for cls in (*classes, TensorClass.DENSE_FFN, TensorClass.Q_B)} == {"fp8"}
    assert [held.of(cls).name for cls in (TensorClass.KV_B, TensorClass.HEAD, TensorClass.ROUTER)] == ["bf16"] * 3
    assert held.of(TensorClass.ROUTED_EXPERTS).name == "mxfp4"
    assert plan.live(stored) == frozenset()
    assert PLANS["livequant-fused"].live(stored) == PLANS["livequant-fused"].fp8(stored) == plan.fp8(stored)
    assert plan_of("persistent", load_preset("gpt-oss-20b")) is PLANS["persistent"]


class FakeEngine(kernel.LatentEngine):
    """The kernel's bookkeeping on the CPU: the next token follows from token and position, the experts from the
    forced choices or from it."""

    def __init__(
        self, shape: Any, weights: Any, *, capacity: int, rope: Tensor, plan: Any, forced: Any, device: Any
    ) -> None:
        self.shape, self.weights, self.capacity, self.device, self.plan = shape, weights, capacity, CPU, plan
        self.forced = forced
        if forced is not None:
            kernel.check_forced(shape, forced)
        self.buffers = kernel.make_buffers(shape, plan, weights, capacity, rope, CPU)
        self.ran: list[tuple[int, int]] = []

    def step(self) -> None:
        token, position, launches, _ = self.buffers.state.tolist()
        self.ran.append((token, position))
        following = (5 * token + position) % self.shape.vocab
        own = torch.tensor([[following % 8, (following + 1) % 8]] * self.shape.moe_layers)
        self.buffers.routing[:] = own if self.forced is None else self.forced[position % len(self.forced)]
        self.buffers.state[:] = torch.tensor([following, position + 1, launches + 1, 0])
        self.buffers.logits.copy_(torch.nn.functional.one_hot(torch.tensor(following), self.shape.vocab))


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rung over a kernel that is bookkeeping only."""
    monkeypatch.setattr(persistent_latent, "LatentEngine", FakeEngine)
    monkeypatch.setattr(persistent, "captured", lambda works, device, reset: works)


def rung(target: Target, packed: tuple[PackedExperts, ...], **more: Any) -> PersistentForward[Any]:
    return latent_forward(target, packed, CAPACITY, kernel.make_plan(step_shape(target.spec), 16), **more)


def test_the_loop_steps_and_runs_ahead_of_the_kernel(on_the_cpu: None) -> None:
    forward, prompt, verify = rung(*build()), [3, 40, 7], DeviceVerifier(1, CPU)
    found = []
    for ahead in (None, verify):
        engine, record = Engine(forward, NoDrafter(), SamplingRule(), verify=verify, ahead=ahead), SequenceRecord(3)
        steps = [(step.context, step.tokens, step.experts) for step in engine.decode(prompt, 12, record)]
        assert all(step[2] == (2, 2) for step in steps)  # two layers have experts, the dense one does not count
        found.append((record.tokens, steps, list(forward.engine.ran)))
        forward.engine.ran.clear()
    assert found[0] == found[1]
    launches = int(forward.engine.buffers.state[2])
    assert launches == 2 * len(found[0][2])  # the count of launches is the kernel's own: no position overwrites it


def test_caches_are_the_eager_rung_s(on_the_cpu: None) -> None:
    target, packed = build()
    forward, eager = rung(target, packed), EagerForward(target, CAPACITY)
    for got, want in zip(forward.caches(), eager.caches(), strict=True):
        assert [slab.shape for slab in got] == [slab.shape for slab in want]
    fill_context(forward, 5)
    fill_context(eager, 5)
    for got, want in zip(forward.caches(), eager.caches(), strict=True):
        assert all(map(torch.equal, got, want))
    assert bool(forward.engine.buffers.index_keys[1, :5].any())


def test_choices_collectives_and_weights_reach_the_kernel_and_its_laned_twin(on_the_cpu: None) -> None:
    plain, packed = build()
    choices = drawn_choices(plain.spec, exponent=None, seed=4)
    kept: persistent_latent.Relaid = {}
    assert collective_ns(plain) == 0
    alone = rung(plain, packed, relaid=kept)
    assert (alone.engine.plan.collective_ns, alone.engine.forced) == (0, None)
    asked = rung(with_collectives(with_choices(plain, choices), 8.0), packed, relaid=kept)
    laned = asked.laned()
    for forward in (asked, laned):
        engine = forward.engine
        assert engine.plan.collective_ns == 8000
        assert engine.weights is alone.engine.weights
        assert torch.equal(engine.forced, choices.int())
        forward.length = 3
        scores = forward.score(torch.tensor([[7]]))
        assert torch.equal(scores.experts[:, 0].long(), choices[3])
    assert (asked.engine.plan.lanes, laned.engine.plan.lanes) == (False, True)
    assert laned.engine.buffers.lanes.shape == (16, 3 * len(laned.phases) + 1, 3)
    assert laned.phases == kernel.PHASES


def test_a_variant_becomes_the_rung_and_its_weights_are_laid_out_once(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_latent, "CARD_SMS", 16)
    text = """
    name = "s"
    model = { preset = "glm-5.2", weights = "random", tp = 8, routing = "uniform" }
    precision = { policy = "mxfp4-experts-fp8" }
    [[matrix]]
    name = "one"
    engine = { rung = "persistent", collective_us = 8 }
    [[matrix]]
    name = "ahead"
    engine = { rung = "persistent", run_ahead = true }
    """
    target, packed = build()
    held, found = Held(target, None, packed), []
    for variant in parse_scenario(text, source="test", folder=Path()).variants():
        runner = build_rung(variant, held, CAPACITY, None)
        assert isinstance(runner.forward, PersistentForward)
        engine = runner.forward.engine
        assert isinstance(engine, FakeEngine)
        assert engine.forced.shape == (1024, 2, 2)
        found.append((engine.plan.collective_ns, runner.ahead is not None, engine.weights))
    (one, ahead), weights = [entry[:2] for entry in found], [entry[2] for entry in found]
    assert (one, ahead) == ((8000, False), (0, True))
    assert weights[0] is weights[1] is held.relaid[step_shape(target.spec)]


@pytest.mark.gpu
def test_the_captured_launch_runs_ahead() -> None:
    device = torch.device("cuda")
    forward, verify, texts = rung(*build(device)), DeviceVerifier(1, device), []
    for ahead in (None, verify, None, verify):
        engine, record = Engine(forward, NoDrafter(), SamplingRule(), verify=verify, ahead=ahead), SequenceRecord(4)
        steps = [(step.context, step.tokens, step.experts) for step in engine.decode([3, 40, 7, 11], 24, record)]
        texts.append((record.tokens, steps))
    assert texts == [texts[0]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "collective_us"), [(4, 0.0), (4, COLLECTIVE_US), (8, 0.0)])
def test_one_launch_scores_the_glm_slice_as_the_eager_rung(layers: int, collective_us: float) -> None:
    device, capacity, context = torch.device("cuda"), 600, 512
    spec = first_layers(rank_slice(load_preset("glm-5.2"), 8), layers)
    target, packed = random_model(spec, load_policy(POLICY), seed=0, device=device, dtype=torch.bfloat16, packed=True)
    target = with_choices(target, drawn_choices(spec, exponent=None, seed=0))
    experts = [part for part in packed if isinstance(part, PackedExperts)]
    forward = latent_forward(with_collectives(target, collective_us), experts, capacity)
    eager = EagerForward(target, capacity)
    for one in (forward, eager):
        fill_context(one, context)
    tokens = torch.tensor([[17]], device=device)
    want = eager.score(tokens)
    tolerance = TOLERANCE * max(1, layers / 4) ** 0.5  # eager rounds to bf16 between all operators: its own error grows
    for one in (forward, forward.laned()):
        fill_context(one, context)
        result = agreement(one.score(tokens), want)
        assert passed(result, tolerance), result
        for got_slabs, wanted_slabs in zip(one.caches(), eager.caches(), strict=True):
            for got, wanted in zip(got_slabs, wanted_slabs, strict=True):
                if wanted.shape[2]:
                    new, old = got[:, context].float(), wanted[:, context].float()
                    assert float((new - old).norm() / old.norm()) < tolerance
    with pytest.raises(InputError, match="2 tokens a step"):
        forward.score(torch.zeros(1, 2, dtype=torch.int64, device=device))

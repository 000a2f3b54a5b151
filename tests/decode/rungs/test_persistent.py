"""The persistent rung's weights against the kernel's own reference; the kernel itself needs a GPU."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Proposal
from workbench.decode.engine import Engine, SamplingRule, SequenceRecord
from workbench.decode.model import Block, Target
from workbench.decode.precision import load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rungs import persistent
from workbench.decode.rungs.agreement import agreement, fill_context
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.persistent import (
    PersistentForward,
    checkpoint_layer,
    persistent_forward,
    step_shape,
    step_weights,
)
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.verifiers import DeviceVerifier
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError, UnfitError
from workbench.kernels import persistent as persistent_kernel
from workbench.kernels import persistent_layout, persistent_reference
from workbench.kernels.persistent_shape import check_weights, rope_table
from workbench.kernels.step_engine import FLAGS_AT

CPU = torch.device("cpu")
Rung = PersistentForward[persistent_kernel.PersistentEngine]
CAPACITY = 32
SHAPE: dict[str, Any] = {
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
BARE = {
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "qk_dim": 64, "v_dim": 64},
    "moe": {"experts": 8, "top_k": 2, "inter": 64, "activation": "clamped-swiglu"},
}


def build(device: torch.device, **changes: Any) -> tuple[Target, tuple[PackedExperts, ...], Target]:
    """The packed model in bfloat16, and the same one expanded in float32."""
    spec, policy = ModelSpec.model_validate(SHAPE | changes), load_policy("mxfp4-experts")
    target, packed = random_model(spec, policy, seed=2, device=device, dtype=torch.bfloat16, packed=True)
    expanded, _ = random_model(spec, policy, seed=2, device=device, dtype=torch.bfloat16, packed=False)
    return target, packed, expanded.float()


@pytest.mark.parametrize("changes", [{}, BARE])
def test_the_kernel_s_reference_computes_what_the_eager_rung_does(changes: dict[str, Any]) -> None:
    target, packed, expanded = build(CPU, **changes)
    shape = step_shape(target.spec)
    blocks = [block for block in target.blocks if isinstance(block, Block)]
    layers = tuple(checkpoint_layer(block, experts) for block, experts in zip(blocks, packed, strict=True))
    model = persistent_reference.ModelWeights(target.embed.weight, layers, target.norm.weight, target.head_weight)
    eager = EagerForward(expanded, CAPACITY)
    keys, values = (torch.zeros(2, 2, CAPACITY, 64, dtype=torch.bfloat16) for _ in range(2))
    rope = rope_table(CAPACITY, 64, target.spec.rope_theta)
    for position, token in enumerate([3, 90, 41, 7, 7, 55, 12, 81, 0]):
        want = eager.score(torch.tensor([[token]]))
        eager.length += 1
        got = persistent_reference.reference_step(shape, model, token, position, keys, values, rope)
        assert torch.equal(got.routing.sort(-1).values, want.experts[:, 0].sort(-1).values)
        # The reference rounds keys and values to bfloat16, and nothing else.
        assert float((got.logits - want.logits[0, 0]).norm() / want.logits.norm()) < 1e-2


@pytest.mark.parametrize("changes", [{}, BARE])
def test_weights_are_packed_into_the_kernel_s_layouts(changes: dict[str, Any]) -> None:
    target, packed, _ = build(CPU, **changes)
    shape = step_shape(target.spec)
    weights = step_weights(target, packed, shape)
    check_weights(shape, weights, CPU)
    assert torch.equal(persistent_layout.unpack_matrix(weights.head), target.head_weight)
    assert torch.equal(
        persistent_layout.unpack_matrix(weights.out[1]), target.get_submodule("blocks.1.attention.o").weight
    )
    assert torch.equal(weights.gains[-1], target.norm.weight.float())
    assert weights.embedding.data_ptr() == target.embed.weight.data_ptr()


def test_models_that_the_kernel_was_not_written_for_are_refused() -> None:
    for name, complaint in (
        ("qwen3-30b-a3b", "attention: the persistent step takes one GQA shape, no QK-norm"),
        ("mimo-v2-flash", "attention: the persistent step takes one GQA shape"),
    ):
        with pytest.raises(InputError, match=f"{name}: {complaint}"):
            step_shape(load_preset(name))
    with pytest.raises(InputError, match="tiny-64: moe: the persistent step takes experts in every layer, clamped"):
        step_shape(ModelSpec.model_validate(SHAPE | {"moe": {"experts": 8, "top_k": 2, "inter": 64}}))
    assert step_shape(load_preset("gpt-oss-20b")).windows == (128, 0) * 12


class FakeEngine(persistent_kernel.PersistentEngine):
    """The kernel's bookkeeping on the CPU: the next token follows from token and position, the experts from it."""

    def __init__(self, shape: Any, weights: Any, *, capacity: int, rope: Tensor, plan: Any, device: Any) -> None:
        self.shape, self.weights, self.capacity, self.device = shape, weights, capacity, CPU
        self.plan = plan or persistent_kernel.make_plan(shape, 4)
        self.buffers = persistent_kernel.make_buffers(shape, self.plan, capacity, rope, CPU)
        self.ran: list[tuple[int, int]] = []
        self.wrong = -1  # the position at which a launch goes wrong

    def step(self) -> None:
        token, position = self.buffers.state.tolist()
        self.ran.append((token, position))
        if token >= self.shape.vocab or position == self.wrong:
            self.buffers.sync[FLAGS_AT] = 4
            return
        following = (5 * token + position) % self.shape.vocab
        self.buffers.routing[:] = torch.tensor([[following % 8, (following + 1) % 8]] * self.shape.layers)
        self.buffers.state[:] = torch.tensor([following, position + 1])
        self.buffers.logits.copy_(torch.nn.functional.one_hot(torch.tensor(following), self.shape.vocab))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Rung:
    """The rung over a kernel that is bookkeeping only."""
    monkeypatch.setattr(persistent, "PersistentEngine", FakeEngine)
    monkeypatch.setattr(persistent, "captured", lambda works, device, reset: works)
    target, packed, _ = build(CPU)
    return persistent_forward(target, packed, CAPACITY)


def test_a_loop_that_follows_the_kernel_writes_nothing(fake: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = Engine(fake, NoDrafter(), SamplingRule(), verify=DeviceVerifier(1, CPU)), [3, 90, 7]
    writes: list[int] = []
    copy_, fill_, state = Tensor.copy_, Tensor.fill_, fake.engine.buffers.state
    places = {state[:1].data_ptr(), state[1:].data_ptr()}

    def watched(write: Any) -> Any:
        def run(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
            if self.data_ptr() in places:
                writes.append(self.data_ptr())
            return write(self, *arguments, **named)

        return run

    monkeypatch.setattr(Tensor, "copy_", watched(copy_))
    monkeypatch.setattr(Tensor, "fill_", watched(fill_))
    for _ in range(2):  # the second text stands at the first position again
        record, seen = SequenceRecord(len(prompt)), []
        for step in engine.decode(prompt, 9, record):
            seen.append(len(writes))
            writes.clear()
            assert step.experts == (2, 2)
        assert seen[1:] == [0] * 7
        wanted, following = [], (5 * prompt[-1] + len(prompt) - 1) % 96
        for position in range(len(prompt), len(prompt) + 9):
            wanted.append(following)
            following = (5 * following + position) % 96
        assert record.tokens == wanted


def test_a_step_that_went_wrong_is_refused_where_its_token_is_read(fake: Rung) -> None:
    scores = fake.score(torch.tensor([[500]]))
    with pytest.raises(UnfitError, match="the token is outside the vocabulary"):
        DeviceVerifier(1, CPU)(Proposal(torch.empty(0, dtype=torch.int64)), scores, torch.Generator())
    fake.score(torch.tensor([[5]]))
    assert fake.engine.ran[-1] == (5, 0)


def test_the_loop_runs_ahead_of_the_kernel(fake: Rung) -> None:
    prompt, verify = [3, 90, 7], DeviceVerifier(1, CPU)
    found = []
    for ahead in (None, verify):
        engine, record = Engine(fake, NoDrafter(), SamplingRule(), verify=verify, ahead=ahead), SequenceRecord(3)
        steps = [(step.context, step.tokens, step.experts) for step in engine.decode(prompt, 12, record)]
        kernel = cast("FakeEngine", fake.engine)
        found.append((record.tokens, record.finish, steps, kernel.ran[3:]))
        kernel.ran.clear()
    assert found[0] == found[1]


def test_a_launch_that_goes_wrong_ends_the_text_at_its_own_step(fake: Rung) -> None:
    prompt, verify = [3, 90, 7], DeviceVerifier(1, CPU)
    engine = Engine(fake, NoDrafter(), SamplingRule(), verify=verify, ahead=verify)
    kernel = cast("FakeEngine", fake.engine)
    kernel.wrong = 6  # the position of the fourth step
    record = SequenceRecord(3)
    steps = engine.decode(prompt, 12, record)
    assert [next(steps).context for _ in range(3)] == [3, 4, 5]
    with pytest.raises(UnfitError, match="the token is outside the vocabulary"):
        next(steps)
    assert len(record.tokens) == 4
    kernel.wrong = -1
    assert len(list(engine.decode(prompt, 12, SequenceRecord(3)))) == 11  # the device is as it was
    kernel.wrong = 4
    steps = engine.decode(prompt, 12, SequenceRecord(3))
    assert next(steps).context == 3
    with pytest.raises(UnfitError, match="the token is outside the vocabulary"):
        steps.close()  # type: ignore[attr-defined]  # a generator; the step under way is not lost silently


@pytest.mark.gpu
def test_the_captured_launch_runs_ahead() -> None:
    device = torch.device("cuda")
    target, packed, _ = build(device)
    forward, verify, texts = persistent_forward(target, packed, CAPACITY), DeviceVerifier(1, device), []
    for ahead in (None, verify, None, verify):
        engine, record = Engine(forward, NoDrafter(), SamplingRule(), verify=verify, ahead=ahead), SequenceRecord(4)
        steps = [(step.context, step.tokens, step.experts) for step in engine.decode([3, 90, 7, 11], 24, record)]
        texts.append((record.tokens, steps))
        closed = engine.decode([3, 90], 24, SequenceRecord(2))
        next(closed)
        closed.close()  # type: ignore[attr-defined]  # a generator
    assert texts == [texts[0]] * 4


@pytest.mark.gpu
def test_a_loop_over_the_captured_launch_is_the_kernel_s_own_sequence() -> None:
    device = torch.device("cuda")
    target, packed, _ = build(device)
    forward, prompt = persistent_forward(target, packed, CAPACITY), [3, 90, 7, 11]
    texts = []
    for one in (forward, forward.laned()):
        engine, record = Engine(one, NoDrafter(), SamplingRule(), verify=DeviceVerifier(1, device)), SequenceRecord(4)
        steps = list(engine.decode(prompt, 20, record))
        assert all(step.experts == (2, 2) for step in steps)
        texts.append(record.tokens)
    assert int((one.engine.buffers.lanes[:, -1, 2] > 0).sum()) == one.engine.plan.grid  # the graph's launch is laned
    plain, text = forward.engine, []
    for position, token in enumerate(prompt):
        plain.start(token, position)
        plain.step()
    for _ in range(20):
        text.append(plain.state()[0])
        plain.step()
    plain.check()
    assert texts == [text, text]
    scores = forward.score(torch.tensor([[SHAPE["vocab"] + 1]], device=device))
    with pytest.raises(UnfitError, match="the token is outside the vocabulary"):
        DeviceVerifier(1, device)(
            Proposal(torch.empty(0, dtype=torch.int64, device=device)), scores, torch.Generator(device)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, BARE])
def test_one_launch_scores_as_the_eager_rung(changes: dict[str, Any]) -> None:
    device = torch.device("cuda")
    target, packed, expanded = build(device, **changes)
    forward, eager = persistent_forward(target, packed, CAPACITY), EagerForward(expanded, CAPACITY)
    for context in (0, 5, 20):
        fill_context(forward, context)
        fill_context(eager, context)
        tokens = torch.tensor([[17]], device=device)
        result = agreement(forward.score(tokens), eager.score(tokens))
        assert result.same == 1
        assert result.error < 1e-2
    with pytest.raises(InputError, match="2 tokens a step"):
        forward.score(torch.zeros(1, 2, dtype=torch.int64, device=device))

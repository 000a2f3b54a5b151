"""The persistent rung: one launch takes a token through the whole model.

There are two kernels of one token a step, each with its own layout of every weight: one for the gpt-oss family
(workbench/kernels/persistent.py: clamped activation, no QK-norm, one head size), made here, and one for rank slices of
latent attention, made by persistent_latent.py. The forward is the same around both.

A kernel chooses the next token and counts the position itself, so a step in a loop that follows it is one graph: the
launch, and one copy of token, chosen experts and error flags to pinned memory. There are two such graphs, used in
turns, that differ in where they copy to: a loop can run ahead of what it has read.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from workbench.decode.attention import Attention
from workbench.decode.experts import ALPHA, LIMIT, Experts
from workbench.decode.model import Block, Scores, Target
from workbench.decode.replay import Work, captured
from workbench.decode.rungs.decided import DecidedScores, HostWords, Words
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.spec import GQA, ModelSpec
from workbench.errors import InputError
from workbench.kernels import persistent_layout, persistent_reference
from workbench.kernels.mxfp4_layout import restore
from workbench.kernels.persistent import PHASES, PersistentEngine, StepPlan
from workbench.kernels.persistent_shape import StepShape, StepWeights, expected_weights, rope_table
from workbench.kernels.step_engine import FLAGS_AT, STATE_WORDS, OneTokenEngine

NO_SINK = -1e30
"""A sink that takes no part in the softmax."""


def step_shape(spec: ModelSpec) -> StepShape:
    """Return ``spec`` as the kernel takes it; raises InputError, naming the field, for a model it does not."""
    shapes = {spec.mixer_spec(layer) for layer in range(spec.layers)}
    shape = spec.attention
    if len(shapes) > 1 or not isinstance(shape, GQA) or shape.qk_norm or shape.qk_dim != shape.v_dim:
        raise InputError(f"{spec.name}: attention: the persistent step takes one GQA shape, no QK-norm, one head size")
    if spec.moe is None or spec.moe_layers < spec.layers or spec.moe.activation != "clamped-swiglu":
        raise InputError(f"{spec.name}: moe: the persistent step takes experts in every layer, clamped-swiglu")
    return StepShape(
        layers=spec.layers,
        hidden=spec.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.qk_dim,
        experts=spec.moe.experts,
        top_k=spec.moe.top_k,
        inter=spec.moe.inter,
        vocab=spec.vocab,
        windows=tuple((spec.window or 0) if mixer == "sliding" else 0 for mixer in spec.mixers),
        eps=spec.norm_eps,
        limit=LIMIT,
        alpha=ALPHA,
    )


def checkpoint_layer(block: Block, packed: PackedExperts) -> persistent_reference.LayerWeights:
    """Return one layer in the form that the kernel's packing starts from; absent biases and sinks are neutral ones."""
    attention, ffn = block.attention, block.ffn
    assert isinstance(ffn, Experts)  # noqa: S101 - checked by step_shape
    assert isinstance(attention, Attention)  # noqa: S101 - likewise
    parts = (attention.q, attention.k, attention.v)
    gate_up, gate_up_scales = restore(*packed.gate_up, "interleaved")
    down, down_scales = restore(*packed.down, "plain")
    moe, hidden = ffn.shape, block.ffn_norm.weight.shape[0]
    bias = packed.gate_up_bias
    zeros = block.ffn_norm.weight.new_zeros
    return persistent_reference.LayerWeights(
        attention_norm=block.attention_norm.weight,
        qkv=torch.cat([part.weight for part in parts]),
        qkv_bias=torch.cat([_bias(part) for part in parts]),
        sinks=zeros(attention.shape.heads) + NO_SINK if attention.sinks is None else attention.sinks,
        out=attention.o.weight,
        out_bias=_bias(attention.o),
        mlp_norm=block.ffn_norm.weight,
        router=ffn.router.weight,
        router_bias=_bias(ffn.router),
        gate_up=gate_up,
        gate_up_scales=gate_up_scales,
        gate_up_bias=zeros(moe.experts, 2 * moe.inter) if bias is None else bias.transpose(1, 2).flatten(1),
        down=down,
        down_scales=down_scales,
        down_bias=zeros(moe.experts, hidden) if packed.down_bias is None else packed.down_bias,
    )


def _bias(part: torch.nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias


@torch.no_grad()
def step_weights(target: Target, packed: Sequence[PackedExperts], shape: StepShape) -> StepWeights:
    """Return ``target``'s weights in the kernel's layouts, packed layer by layer into their final place."""
    device = target.device
    places = {
        name: torch.empty(extents, dtype=dtype, device=device)
        for name, (dtype, extents) in expected_weights(shape).items()
    }
    single = replace(shape, layers=1, windows=(0,), vocab=16)
    ends = (target.embed.weight[:16], target.norm.weight, target.head_weight[:16])
    for index, (block, experts) in enumerate(zip(target.blocks, packed, strict=True)):
        assert isinstance(block, Block)  # noqa: S101 - for the type checker
        model = persistent_reference.ModelWeights(ends[0], (checkpoint_layer(block, experts),), ends[1], ends[2])
        layer = persistent_reference.pack_model(single, model)
        for field in fields(StepWeights):
            if field.name == "gains":
                places["gains"][2 * index : 2 * index + 2] = layer.gains[:2]
            elif field.name not in ("embedding", "head"):
                places[field.name][index] = getattr(layer, field.name)[0]
    places["gains"][-1] = target.norm.weight
    places["embedding"] = target.embed.weight.detach()
    places["head"] = persistent_layout.pack_matrix(target.head_weight.detach())
    return StepWeights(**places)


EngineT = TypeVar("EngineT", bound=OneTokenEngine)


class PersistentReport:
    """What a launch leaves in the host's memory; a step that went wrong is refused where it is read."""

    def __init__(self, engine: OneTokenEngine) -> None:
        buffers = engine.buffers
        self._engine, self._shape = engine, (len(engine.routing), 1, engine.routing.shape[1])
        self._state, self._routing = len(buffers.sync), len(buffers.sync) + STATE_WORDS
        self.words = HostWords(len(buffers.words), engine.device)

    def outcome(self) -> list[int]:
        """Wait for the launch and return its token as an outcome of width 1."""
        token = int(self._read()[self._state])
        return [token, 1, token]

    def experts(self) -> Words:
        """Wait for the launch and return its experts."""
        return self._read()[self._routing :].reshape(self._shape)

    def _read(self) -> Words:
        words = self.words.read()
        self._engine.refuse(int(words[FLAGS_AT]))
        return words


class PersistentForward(Generic[EngineT]):
    """A persistent kernel as a forward of one token a step. Scores have logits and experts; no hidden state leaves
    the launch, so ``hidden`` is NaN: whoever reads it is found out.

    ``phases``: what the kernel's stamps of one layer are called, in order.
    """

    def __init__(
        self,
        target: Target,
        engine: EngineT,
        *,
        phases: Sequence[str],
        laned: Callable[[], EngineT],
        slabs: Callable[[EngineT], list[tuple[Tensor, Tensor]]],
    ) -> None:
        """``laned`` makes an engine over the same weights whose kernel stamps its phases; ``slabs`` are its caches as
        :meth:`caches` returns them."""
        self.length = 0
        self.phases = tuple(phases)
        self._laned, self._slabs = laned, slabs
        hidden = target.spec.hidden
        self._hidden = torch.full((1, 1, hidden), float("nan"), dtype=target.dtype, device=target.device)
        self._take(engine)

    def _take(self, engine: EngineT) -> None:
        """Run ``engine``: capture its launch and the copy behind it."""
        buffers = engine.buffers
        self._engine, self._reports = engine, [PersistentReport(engine) for _ in range(2)]
        self._next, self._place = buffers.state[:1], buffers.state[1:2]
        self._position: int | None = None  # where the device's next step stands
        self._turn, self._unread = 0, list[PersistentReport]()
        self._scores = [
            DecidedScores(
                logits=engine.logits[None, None],
                hidden=self._hidden,
                taps=self._hidden[:, :, None][:, :, :0],
                experts=engine.routing[:, None],
                outcome=self._next,
                report=report,
            )
            for report in self._reports
        ]

        def running(report: PersistentReport) -> Work:
            def run() -> None:
                engine.step()
                report.words.send(buffers.words)

            return run

        works = captured([[running(report)] for report in self._reports], engine.device, reset=lambda: engine.start(0))
        self._replays = [work for (work,) in works]
        engine.check()

    @property
    def device(self) -> torch.device:
        """The kernel's device."""
        return self._engine.device

    @property
    def engine(self) -> EngineT:
        """The kernel and its buffers."""
        return self._engine

    def laned(self) -> "PersistentForward[EngineT]":
        """Return a forward over the same weights whose kernel stamps its phases, with a cache of its own.

        Raises UnfitError where its buffers do not fit.
        """
        other = copy(self)
        other.length = 0
        other._take(self._laned())
        return other

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """The kernel's slabs."""
        return self._slabs(self._engine)

    def prefill(self, tokens: Tensor) -> Scores:
        """Run the prompt token by token."""
        count, committed = tokens.shape[1], self.length
        try:
            for index in range(count):
                self.length = committed + index
                scores = self.score(tokens[:, index : index + 1])
        finally:
            self.length = committed
        return replace(scores, hidden=self._hidden.expand(1, count, -1), taps=scores.taps.expand(1, count, -1, -1))

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Return ``last``; where the launch chose it, the next one reads it from where it lies."""
        return torch.cat((last, drafts))[None] if drafts.shape[0] else last[None]

    def score(self, tokens: Tensor) -> Scores:
        """Run one token."""
        if tokens.shape[1] != 1:
            raise InputError(f"persistent: {tokens.shape[1]} tokens a step; it runs one", hint="drafter.kind 'none'")
        if self.length >= self._engine.capacity:
            raise InputError(f"KV cache: {self.length} + 1 positions exceed its capacity {self._engine.capacity}")
        if tokens.data_ptr() != self._next.data_ptr():
            self._next.copy_(tokens[0])
        if self._position != self.length:
            self._place.fill_(self.length)
        scores = self._enqueue()
        self._position = self.length + 1
        return scores

    def stand(self, last: Tensor) -> None:
        """Put token and position where the next launch reads them."""
        self._next.copy_(last)
        self._place.fill_(self.length)

    def follow(self, drafts: Tensor, *, latest: int, keep: int | None = None) -> Scores:
        """Enqueue one launch; it reads what the last one left."""
        if drafts.shape[0]:
            raise InputError("persistent: a step of one token takes no drafts", hint="drafter.kind 'none'")
        if latest >= self._engine.capacity:
            raise InputError(f"KV cache: {latest} + 1 positions exceed its capacity {self._engine.capacity}")
        scores = self._enqueue()
        self._position = None
        self._unread = [*self._unread[-1:], self._reports[1 - self._turn]]
        return scores

    def leave(self) -> None:
        """Wait; a launch that went wrong is refused here at the latest."""
        unread, self._unread = self._unread, []
        for report in unread:
            report.outcome()

    def _enqueue(self) -> Scores:
        turn, self._turn = self._turn, 1 - self._turn
        self._replays[turn]()
        self._reports[turn].words.renew()
        return self._scores[turn]


def persistent_forward(
    target: Target, packed: Sequence[PackedExperts], capacity: int, plan: StepPlan | None = None
) -> PersistentForward[PersistentEngine]:
    """Return the rung of the gpt-oss family. ``plan``: how the step is cut up; the fastest measured without one
    (``persistent.make_plan``).

    Raises InputError for a model the kernel does not take, UnfitError without a GPU of compute capability 9.
    """
    shape = step_shape(target.spec)
    rope = rope_table(capacity, shape.head_dim, target.spec.rope_theta, target.device)
    weights = step_weights(target, packed, shape)

    def make(plan: StepPlan | None) -> PersistentEngine:
        return PersistentEngine(shape, weights, capacity=capacity, rope=rope, plan=plan, device=target.device)

    engine = make(plan)
    return PersistentForward(
        target, engine, phases=PHASES, laned=lambda: make(replace(engine.plan, lanes=True)), slabs=_slabs
    )


def _slabs(engine: PersistentEngine) -> list[tuple[Tensor, Tensor]]:
    return list(zip(engine.buffers.keys, engine.buffers.values, strict=True))

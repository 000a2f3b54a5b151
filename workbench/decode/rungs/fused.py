"""The kernel step: a layer in eight launches (MLA: eleven), the products and experts as the rung's plan says.

Per layer: norm, attention (attend.py), output product, norm with the residual add, router, experts (two), and three for
a shared expert (feed.py). Everything is bfloat16 with float32 sums; logits leave the head in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.attention import Attention
from workbench.decode.cache import cache_shape
from workbench.decode.experts import Experts
from workbench.decode.layers import SwiGLU, rope_table
from workbench.decode.mla import LatentAttention
from workbench.decode.model import Block, Target
from workbench.decode.precision import TensorClass
from workbench.decode.rungs import small_ops
from workbench.decode.rungs.attend import Attend, AttendSettings, GqaAttend, MlaAttend, slabs
from workbench.decode.rungs.decided import DecidedScores
from workbench.decode.rungs.expert_pass import expert_pass
from workbench.decode.rungs.feed import DenseFeed, RoutedFeed
from workbench.decode.rungs.merging import merged, same_input
from workbench.decode.rungs.plan import ATTENTION_PROJECTIONS, RungPlan
from workbench.decode.rungs.products import Bf16Product, Blocks, Cut, Product, live_fp8
from workbench.decode.rungs.random_model import HeldExperts
from workbench.decode.rungs.static import StepInputs
from workbench.kernels.chain_verify import decide_greedy
from workbench.kernels.lm_head import lm_head
from workbench.kernels.rms_norm import rms_norm
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class FusedFaults:
    """Planted faults of the kernel step; each changes time or bytes and nothing else, ``narrow`` the numbers too.

    ``small_kernels``: norms and rotary embedding as chains of operators. ``low_split``: one program a KV head and no
    Split-K anywhere. ``over_read``: every layer copies its whole cache slab before attention reads it. ``registers``:
    cap of the product kernels' registers a thread, 0 for none. ``narrow``: experts multiply MXFP8 activations.
    """

    small_kernels: bool = False
    low_split: bool = False
    over_read: bool = False
    registers: int = 0
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer as the kernels run it. ``exchange``: what stands in for the ranks' collectives, or nothing."""

    attention_norm: Tensor
    attend: Attend
    out: Product
    ffn_norm: Tensor
    feed: DenseFeed | RoutedFeed
    exchange: Callable[[], None]


@dataclass(slots=True)
class FusedState:
    """A step under way; ``residual`` [T, H] is updated in place. ``words``: first the outcome, last the experts."""

    inputs: StepInputs
    workspace: Workspace
    residual: Tensor
    taps: Tensor
    words: Tensor
    experts: Tensor
    moe_layers: int = 0
    tapped: int = 0


class FusedStep:
    """``target``'s forward by Triton kernels over a cache of its own; bfloat16, CUDA or Triton's interpreter."""

    def __init__(
        self,
        target: Target,
        packed: Sequence[HeldExperts],
        plan: RungPlan,
        capacity: int,
        *,
        sms: int = 132,
        overlap: bool = False,
        faults: FusedFaults = FusedFaults(),
        fp8: frozenset[TensorClass] = ATTENTION_PROJECTIONS,
        blocks: Blocks | None = None,
    ) -> None:
        """``packed``: one entry a layer with experts where ``plan.packed``, else empty. ``sms``: multiprocessors.

        ``overlap``: kernels start under their predecessor's tail (programmatic dependent launch). ``fp8``: the classes
        that a livequant plan multiplies in block FP8; ``blocks`` holds their FP8 forms, shared with other rungs.
        """
        self.layers = target.spec.layers
        self._target, self._faults = target, faults
        self._cut = Cut(sms, plan.split and not faults.low_split, faults.registers, overlap)
        self._fp8 = frozenset() if plan.dense == "bf16" else fp8
        self._plan, self._blocks = plan, {} if blocks is None else blocks
        self._settings = AttendSettings(
            target.spec.norm_eps, overlap, faults.small_kernels, faults.low_split, faults.over_read
        )
        self._tables: dict[tuple[int, float], Tensor] = {}
        left = iter(packed)
        self._layers = [
            self._layer(index, block, next(left) if packed and isinstance(block.ffn, Experts) else None, capacity)
            for index, block in enumerate(target.blocks)
            if isinstance(block, Block)
        ]
        self._head_weight = target.head_weight.detach()
        self._workspaces: dict[int, Workspace] = {}

    def begin(self, inputs: StepInputs) -> FusedState:
        """Embed the tokens."""
        width, spec = len(inputs.tokens), self._target.spec
        if width not in self._workspaces:
            self._workspaces[width] = Workspace(inputs.tokens.device)
        residual = F.embedding(inputs.tokens, self._target.embed.weight)
        top_k = spec.moe.top_k if spec.moe else 0
        before = -(-3 * width // 4) * 4  # the experts begin at 16 bytes, as the kernels were compiled for
        words = torch.empty(before + spec.moe_layers * width * top_k, dtype=torch.int32, device=residual.device)
        return FusedState(
            inputs,
            self._workspaces[width],
            residual,
            residual.new_empty(width, len(self._target.taps), spec.hidden),
            words,
            words[before:].view(spec.moe_layers, width, top_k),
        )

    def layer(self, index: int, state: FusedState) -> None:
        """Run one layer."""
        layer, residual, workspace, kv_len = self._layers[index], state.residual, state.workspace, state.inputs.kv_len
        attended = layer.attend(self._norm(residual, layer.attention_norm), kv_len, workspace)
        delta = layer.out(attended, workspace)
        layer.exchange()
        normed = self._norm(delta, layer.ffn_norm, residual)
        if isinstance(layer.feed, RoutedFeed):
            chosen = state.experts[state.moe_layers]
            state.moe_layers += 1
            layer.feed(normed, residual, workspace, kv_len, chosen)
        else:
            layer.feed(normed, residual, workspace)
        layer.exchange()
        if index in self._target.taps:
            state.taps[:, state.tapped].copy_(residual)
            state.tapped += 1

    def end(self, state: FusedState) -> DecidedScores:
        """Norm, head, and the greedy verification of the step's own drafts."""
        normed = self._norm(state.residual, self._target.norm.weight.detach())
        width = len(state.inputs.tokens)
        logits = torch.empty(width, len(self._head_weight), device=normed.device)
        outcome = state.words[: 3 * width]
        lm_head(
            normed,
            self._head_weight,
            logits=logits,
            out=outcome[width + 1 : 2 * width + 1],
            workspace=state.workspace,
            overlap=self._cut.overlap,
        )
        inputs = state.inputs
        decide_greedy(inputs.tokens, outcome, inputs.lengths, keep=inputs.keep)
        return DecidedScores(
            logits=logits[None], hidden=state.residual[None], taps=state.taps[None], experts=state.experts,
            outcome=outcome, words=state.words,
        )  # fmt: skip

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Every layer's slabs."""
        return [(layer.attend.keys, layer.attend.values) for layer in self._layers]

    def _norm(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        eps = self._target.spec.norm_eps
        if self._faults.small_kernels:
            return small_ops.rms_norm(x, weight, eps, residual)
        return rms_norm(x, weight, eps=eps, residual=residual, overlap=self._cut.overlap)

    def _layer(self, index: int, block: Block, packed: HeldExperts | None, capacity: int) -> FusedLayer:
        return FusedLayer(
            attention_norm=block.attention_norm.weight.detach(),
            attend=self._attend(index, block.attention, capacity),
            out=self._product(TensorClass.O_PROJ, block.attention.o),
            ffn_norm=block.ffn_norm.weight.detach(),
            feed=self._feed(block.ffn, packed),
            exchange=block.exchange,
        )

    def _attend(self, index: int, attention: Attention | LatentAttention, capacity: int) -> Attend:
        spec, device = self._target.spec, self._target.device
        key = spec.rope(index)
        if key not in self._tables:
            table = rope_table(capacity, *key, device)
            self._tables[key] = torch.cat((table[0], table[1]), 1).contiguous()
        keys, values = slabs(cache_shape(spec, index), capacity, device)
        first, *rest = same_input(attention)
        if isinstance(attention, Attention):
            qkv = self._product(TensorClass.QKV, *first)
            return GqaAttend(attention, qkv, self._tables[key], keys, values, self._settings)
        low, up = self._product(TensorClass.QKV_A, *first), self._product(TensorClass.Q_B, *rest[0])
        return MlaAttend(attention, low, up, self._tables[key], keys, values, self._settings)

    def _feed(self, ffn: Experts | SwiGLU, packed: HeldExperts | None) -> DenseFeed | RoutedFeed:
        if isinstance(ffn, SwiGLU):
            return self._dense(TensorClass.DENSE_FFN, ffn)
        return RoutedFeed(
            ffn,
            expert_pass(ffn, packed, self._cut, narrow=self._faults.narrow),
            None if ffn.shared is None else self._dense(TensorClass.SHARED_EXPERTS, ffn.shared),
            split=not self._faults.low_split,
            overlap=self._cut.overlap,
            forced=None if ffn.forced is None else ffn.forced.to(torch.int32).contiguous(),
        )

    def _dense(self, cls: TensorClass, ffn: SwiGLU) -> DenseFeed:
        return DenseFeed(self._product(cls, ffn.gate_up), self._product(cls, ffn.down), self._cut.overlap)

    def _product(self, cls: TensorClass, *parts: torch.nn.Linear) -> Product:
        weight, bias = merged(*parts)
        if cls not in self._fp8:
            return Bf16Product(weight, bias, self._cut.skinny(*weight.shape), self._cut.overlap)
        form = self._plan.dense
        cut = Cut(self._cut.sms, self._cut.split and form != "fp8-naive", self._cut.registers)
        return live_fp8(weight, bias, cut, prologue=form == "fp8-pq", blocks=self._blocks)

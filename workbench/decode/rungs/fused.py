"""The kernel step: a layer in eight launches, the products and experts as the rung's plan says.

Per layer: norm, QKV product, rotary embedding with the cache write, attention, output product, norm with the residual
add, router, experts (two). Everything is bfloat16 with float32 sums; logits leave the head in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.attention import Attention
from workbench.decode.experts import Experts
from workbench.decode.layers import RMSNorm, rope_table
from workbench.decode.model import Block, Target
from workbench.decode.rungs import small_ops
from workbench.decode.rungs.expert_pass import ExpertPass, expert_pass
from workbench.decode.rungs.merging import merged
from workbench.decode.rungs.packed import PackedExperts
from workbench.decode.rungs.plan import RungPlan
from workbench.decode.rungs.products import Bf16Product, Cut, Product, live_fp8
from workbench.decode.rungs.static import StepInputs
from workbench.decode.rungs.verifiers import DecidedScores
from workbench.decode.spec import GQA
from workbench.kernels.attention import AttentionConfig, gqa_decode
from workbench.kernels.attention import default_config as attention_config
from workbench.kernels.chain_verify import verify_greedy
from workbench.kernels.contract import power_of_2
from workbench.kernels.lm_head import lm_head
from workbench.kernels.rms_norm import rms_norm
from workbench.kernels.rope import rope_write
from workbench.kernels.router import route
from workbench.kernels.skinny_gemm import SkinnyConfig
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
    """One layer's weights as the kernels read them, and its cache: keys and values [KV, capacity, D]."""

    shape: GQA
    window: int | None
    attention_norm: Tensor
    qkv: Product
    out: Product
    norms: tuple[Tensor, Tensor] | None
    sinks: Tensor | None
    ffn_norm: Tensor
    router: tuple[Tensor, Tensor | None] | None
    experts: ExpertPass | None
    dense: tuple[Product, Bf16Product] | None
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class FusedState:
    """A step under way; ``residual`` [T, H] is updated in place."""

    inputs: StepInputs
    workspace: Workspace
    residual: Tensor
    taps: Tensor
    experts: Tensor
    moe_layers: int = 0
    tapped: int = 0


class FusedStep:
    """``target``'s forward by Triton kernels over a cache of its own; bfloat16, CUDA or Triton's interpreter."""

    def __init__(
        self,
        target: Target,
        packed: Sequence[PackedExperts],
        plan: RungPlan,
        capacity: int,
        *,
        sms: int = 132,
        overlap: bool = False,
        faults: FusedFaults = FusedFaults(),
    ) -> None:
        """``packed``: one entry a layer with experts where ``plan.packed``, else empty. ``sms``: multiprocessors.

        ``overlap``: kernels start under their predecessor's tail (programmatic dependent launch).
        """
        self.layers = target.spec.layers
        self._target, self._faults = target, faults
        self._cut = Cut(sms, plan.split and not faults.low_split, faults.registers, overlap)
        shape = target.spec.attention
        assert isinstance(shape, GQA)  # noqa: S101 - checked when the target was built
        table = rope_table(capacity, shape.qk_dim, target.spec.rope_theta, target.device)
        self._table = torch.cat((table[0], table[1]), 1).contiguous()
        left = iter(packed)
        self._layers = [
            self._layer(block, next(left) if plan.packed and isinstance(block.ffn, Experts) else None, plan, capacity)
            for block in target.blocks
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
        return FusedState(
            inputs,
            self._workspaces[width],
            residual,
            residual.new_empty(width, len(self._target.taps), spec.hidden),
            torch.empty(spec.moe_layers, width, top_k, dtype=torch.int32, device=residual.device),
        )

    def layer(self, index: int, state: FusedState) -> None:
        """Run one layer."""
        layer, residual, workspace = self._layers[index], state.residual, state.workspace
        attended = self._attend(layer, self._norm(residual, layer.attention_norm), state)
        delta = layer.out(attended.flatten(1), workspace)
        normed = self._norm(delta, layer.ffn_norm, residual)
        if layer.experts is not None and layer.router is not None:
            chosen = state.experts[state.moe_layers]
            state.moe_layers += 1
            weight, bias = layer.router
            config = SkinnyConfig() if self._faults.low_split else None
            _, weights = route(
                normed,
                weight,
                chosen.shape[1],
                bias=bias,
                ids=chosen,
                workspace=workspace,
                config=config,
                overlap=self._cut.overlap,
            )
            layer.experts(normed, chosen, weights, residual, workspace)
        elif layer.dense is not None:
            gate, up = layer.dense[0](normed, workspace).chunk(2, -1)
            layer.dense[1](F.silu(gate) * up, workspace, residual=residual)
        if index in self._target.taps:
            state.taps[:, state.tapped].copy_(residual)
            state.tapped += 1

    def end(self, state: FusedState) -> DecidedScores:
        """Norm, head, and the greedy verification of the step's own drafts."""
        normed = self._norm(state.residual, self._target.norm.weight.detach())
        width = len(state.inputs.tokens)
        logits = torch.empty(width, len(self._head_weight), device=normed.device)
        outcome = torch.empty(3 * width, dtype=torch.int32, device=normed.device)
        committed, count, chosen, drafts = torch.split(outcome, [width, 1, width, width - 1])
        lm_head(
            normed,
            self._head_weight,
            logits=logits,
            out=chosen,
            workspace=state.workspace,
            overlap=self._cut.overlap,
        )
        if width > 1:
            drafts.copy_(state.inputs.tokens[1:])
            verify_greedy(chosen, drafts, committed=committed, count=count)
        else:
            committed.copy_(chosen)
            count.fill_(1)
        return DecidedScores(
            logits=logits[None], hidden=state.residual[None], taps=state.taps[None], experts=state.experts,
            outcome=outcome,
        )  # fmt: skip

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Every layer's slabs."""
        return [(layer.keys, layer.values) for layer in self._layers]

    def _attend(self, layer: FusedLayer, normed: Tensor, state: FusedState) -> Tensor:
        qkv = layer.qkv(normed, state.workspace)
        eps, kv_len = self._target.spec.norm_eps, state.inputs.kv_len
        if self._faults.small_kernels:
            q = small_ops.rope_write(
                qkv, self._table, kv_len, layer.keys, layer.values, heads=layer.shape.heads, norms=layer.norms, eps=eps
            )
        else:
            q_norm, k_norm = layer.norms or (None, None)
            q = rope_write(
                qkv, self._table, kv_len, layer.keys, layer.values, heads=layer.shape.heads, q_norm=q_norm,
                k_norm=k_norm, eps=eps, overlap=self._cut.overlap,
            )  # fmt: skip
        keys, values = layer.keys, layer.values
        if self._faults.over_read:
            keys, values = keys.clone(), values.clone()
        return gqa_decode(
            q,
            keys,
            values,
            kv_len,
            scale=layer.shape.qk_dim**-0.5,
            window=layer.window,
            sinks=layer.sinks,
            workspace=state.workspace,
            config=_unsplit(q, layer.shape) if self._faults.low_split else None,
            overlap=self._cut.overlap,
        )

    def _norm(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        eps = self._target.spec.norm_eps
        if self._faults.small_kernels:
            return small_ops.rms_norm(x, weight, eps, residual)
        return rms_norm(x, weight, eps=eps, residual=residual, overlap=self._cut.overlap)

    def _layer(self, block: Block, packed: PackedExperts | None, plan: RungPlan, capacity: int) -> FusedLayer:
        attention, ffn = block.attention, block.ffn
        shape, target = attention.shape, self._target
        slab = (shape.kv_heads, capacity)
        router = experts = dense = None
        if isinstance(ffn, Experts):
            bias = ffn.router.bias
            router = (ffn.router.weight.detach(), None if bias is None else bias.detach())
            experts = expert_pass(ffn, packed, self._cut, narrow=self._faults.narrow)
        else:
            dense = (self._bf16(ffn.gate_up), self._bf16(ffn.down))
        return FusedLayer(
            shape=shape,
            window=attention.window,
            attention_norm=block.attention_norm.weight.detach(),
            qkv=self._product(plan, attention.q, attention.k, attention.v),
            out=self._product(plan, attention.o),
            norms=_qk_norms(attention),
            sinks=None if attention.sinks is None else attention.sinks.detach(),
            ffn_norm=block.ffn_norm.weight.detach(),
            router=router,
            experts=experts,
            dense=dense,
            keys=torch.zeros(*slab, shape.qk_dim, dtype=torch.bfloat16, device=target.device),
            values=torch.zeros(*slab, shape.v_dim, dtype=torch.bfloat16, device=target.device),
        )

    def _product(self, plan: RungPlan, *parts: torch.nn.Linear) -> Product:
        weight, bias = merged(*parts)
        if plan.dense == "bf16":
            return Bf16Product(weight, bias, self._cut.skinny(*weight.shape), self._cut.overlap)
        naive = plan.dense == "fp8-naive"
        return live_fp8(weight, bias, Cut(self._cut.sms, self._cut.split and not naive, self._cut.registers))

    def _bf16(self, part: torch.nn.Linear) -> Bf16Product:
        weight = part.weight.detach()
        bias = None if part.bias is None else part.bias.detach()
        return Bf16Product(weight, bias, self._cut.skinny(*weight.shape), self._cut.overlap)


def _unsplit(q: Tensor, shape: GQA) -> AttentionConfig:
    rows = max(16, power_of_2(len(q) * shape.heads // shape.kv_heads))
    return replace(attention_config(rows, shape.qk_dim, shape.v_dim), splits=1)


def _qk_norms(attention: Attention) -> tuple[Tensor, Tensor] | None:
    if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
        return attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return None

"""Routed experts: dense over all experts for training, sparse over the chosen ones for decoding."""

from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.fp8 import MX_GROUP, fake_quantize_groups
from workbench.decode.grouped import grouped_linear, sort_by_expert, ungroup
from workbench.decode.layers import SwiGLU
from workbench.decode.mxfp4 import ScaleRounding, fake_quantize
from workbench.decode.spec import MoE

MANY_TOKENS = 256
"""From this many rows on, most experts are chosen by someone: two large products beat many small ones."""

MANY_GATHERED = 16
"""On a GPU already from this many where they are gathered: that copies an expert for each token that chose it."""

ALPHA, LIMIT = 1.702, 7.0
"""gpt-oss's clamped SwiGLU: slope of the sigmoid, bound of gate (above) and up (both sides)."""

GATHER_ROWS = 8
"""Rows of a long input that are gathered at a time where experts are expanded as they are chosen."""

Half = Literal["gate_up", "down"]


class NarrowExperts(Protocol):
    """Experts that stay in their stored format; rows are expanded when they are asked for."""

    def rows(self, half: Half, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the projections of experts ``ids`` [...], [..., outputs, inputs] in ``dtype``."""


class Experts(nn.Module):
    """Top-k mixture of SwiGLU experts and, where the shape has them, shared experts that always run.

    The router is a softmax over all experts, or sigmoid scores chosen with a correction; the chosen weights are
    renormalised, times ``factor``.

    ``gate_up`` is [experts, 2*inter, hidden] (gate rows first) and ``down`` [experts, hidden, inter]: both are
    contracted along their last axis, the one that MXFP4 blocks run along. ``quantize_forward`` simulates MXFP4
    in the forward pass with a straight-through backward (quantisation-aware training). ``quantize_activations``
    rounds what the chosen experts multiply to FP8 in groups of ``activation_group``: 32 is MXFP8, with MXFP4 weights
    W4A8; 128 is the form that block FP8 kernels take. ``narrow``, where set, holds the weights instead of ``gate_up``
    and ``down``. ``forced`` [positions, top_k], where set, replaces the router's choice by the row of a token's
    position, counted modulo its length; the weights follow from the router's scores of these experts. ``groups`` int64
    [experts], 0 and up, where set: the chosen experts run as grouped products (workbench/decode/grouped.py).
    """

    def __init__(self, hidden: int, shape: MoE, *, rounding: ScaleRounding = "up") -> None:
        super().__init__()
        self.shape, self.rounding = shape, rounding
        self.quantize_forward = False
        self.quantize_activations = False
        self.activation_group = MX_GROUP
        self.narrow: NarrowExperts | None = None
        self.forced: Tensor | None = None
        self.groups: Tensor | None = None
        self.correction = nn.Parameter(torch.zeros(shape.experts)) if shape.score == "sigmoid" else None
        self.shared = SwiGLU(hidden, shape.shared * (shape.shared_inter or shape.inter)) if shape.shared else None
        self.router = nn.Linear(hidden, shape.experts, bias=shape.bias)
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.inter, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, hidden, shape.inter) * shape.inter**-0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(shape.experts, 2 * shape.inter)) if shape.bias else None
        self.down_bias = nn.Parameter(torch.zeros(shape.experts, hidden)) if shape.bias else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (probabilities [..., experts], weights [..., top_k], indices [..., top_k]) of ``x`` [..., hidden].

        Of sigmoid scores the probabilities are the scores.
        """
        # The router stays in float32: a flipped top-k is a different model, not a rounding error.
        bias = None if self.router.bias is None else self.router.bias.float()
        logits = F.linear(x.float(), self.router.weight.float(), bias)
        if self.correction is None:
            probabilities = logits.softmax(dim=-1)
            weights, indices = probabilities.topk(self.shape.top_k, dim=-1)
        else:
            probabilities = logits.sigmoid()
            indices = (probabilities + self.correction.float()).topk(self.shape.top_k, dim=-1).indices
            weights = probabilities.gather(-1, indices)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights if self.shape.factor == 1 else weights * self.shape.factor, indices

    def choose(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the weights and indices [T, top_k] that ``x`` [T, hidden] at ``positions`` int64 [T] runs with."""
        probabilities, weights, indices = self.route(x)
        if self.forced is None:
            return weights, indices
        assert positions is not None  # noqa: S101 - whoever forces a choice passes positions
        indices = self.forced[positions % len(self.forced)].long()
        weights = probabilities.gather(-1, indices)
        return weights / weights.sum(dim=-1, keepdim=True) * self.shape.factor, indices

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run every expert on every token of ``x`` [B, S, hidden]; return the output and the balance loss.

        The balance loss is the Switch Transformer's (arXiv 2101.03961): experts * sum(load share * mean probability),
        1 when routing is uniform.
        """
        with torch.autocast(x.device.type, enabled=False):
            probabilities, weights, indices = self.route(x)
        dense = torch.zeros_like(probabilities).scatter(-1, indices, weights)
        load = (dense > 0).float().flatten(0, -2).mean(0) / self.shape.top_k
        balance = self.shape.experts * (load * probabilities.flatten(0, -2).mean(0)).sum()
        if self.quantize_forward:
            gate_up, down = fake_quantize(self.gate_up, self.rounding), fake_quantize(self.down, self.rounding)
            return self._with_shared(self._all(x, dense, gate_up, down), x), balance
        return self._with_shared(self._all(x, dense, self.gate_up, self.down), x), balance

    def chosen(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run only the chosen experts on ``x`` [T, hidden]; return the output [T, hidden] and indices [T, top_k]."""
        weights, indices = self.choose(x, positions)
        return self._with_shared(self._routed(self._narrow(x), weights.to(x.dtype), indices), x), indices

    def fixed(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As :meth:`chosen`, grouped or gathered: no shape depends on the data, so a graph can capture it."""
        weights, indices = self.choose(x, positions)
        run = self._gathered if self.groups is None else self._grouped
        return self._with_shared(run(self._narrow(x), weights.to(x.dtype), indices), x), indices

    def _with_shared(self, out: Tensor, x: Tensor) -> Tensor:
        return out if self.shared is None else out + self.shared(x)

    def _routed(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        on_cpu = x.device.type == "cpu"
        if self.groups is not None:
            return self._grouped(x, weights, indices)
        if self.narrow is not None:
            pieces = zip(*(torch.split(part, GATHER_ROWS) for part in (x, weights, indices)), strict=True)
            return torch.cat([self._gathered(*piece) for piece in pieces])
        if x.shape[0] > (MANY_TOKENS if on_cpu else MANY_GATHERED):
            dense = torch.zeros(x.shape[0], self.shape.experts, device=x.device, dtype=x.dtype)
            return self._all(x, dense.scatter(-1, indices, weights), self.gate_up, self.down)
        return (self._by_expert if on_cpu else self._gathered)(x, weights, indices)

    def rows(self, half: Half, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return one projection of the experts ``indices`` [...], [..., outputs, inputs]."""
        if self.narrow is not None:
            return self.narrow.rows(half, indices, dtype)
        whole: Tensor = getattr(self, half)
        return whole[indices]

    def activate(self, hidden: Tensor) -> Tensor:
        """Turn gate and up ``hidden`` [..., 2*inter] into what the down projection multiplies, [..., inter]."""
        gate, up = hidden.chunk(2, dim=-1)
        if self.shape.activation == "swiglu":
            return self._narrow(F.silu(gate) * up)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return self._narrow(gate * torch.sigmoid(ALPHA * gate) * (up + 1))

    def _narrow(self, x: Tensor) -> Tensor:
        return fake_quantize_groups(x, self.activation_group) if self.quantize_activations else x

    def _all(self, x: Tensor, dense: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Run all experts as two large products, weighted by ``dense`` [..., experts] (zero where not chosen)."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias.flatten()
        hidden = F.linear(x, gate_up.flatten(0, 1), bias)
        act = self.activate(hidden.view(*x.shape[:-1], self.shape.experts, -1))
        dense = dense.to(act.dtype)
        out = F.linear((act * dense.unsqueeze(-1)).flatten(-2), down.permute(1, 0, 2).flatten(1))
        return out if self.down_bias is None else out + dense @ self.down_bias.to(dense.dtype)

    def _by_expert(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Loop over the distinct experts: each weight is read once, at the price of a host decision per expert."""
        out = torch.zeros_like(x)
        for expert in sorted(set(indices.flatten().tolist())):
            tokens, slots = (indices == expert).nonzero(as_tuple=True)
            act = self.activate(F.linear(x[tokens], self.gate_up[expert], _row(self.gate_up_bias, expert)))
            part = F.linear(act, self.down[expert], _row(self.down_bias, expert))
            out.index_add_(0, tokens, part * weights[tokens, slots, None])
        return out

    def _grouped(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Sort the tokens by expert and multiply once a projection: each chosen weight is read once, nothing copied."""
        assert self.groups is not None  # noqa: S101 - for the type checker
        groups = sort_by_expert(indices, self.groups)
        hidden = grouped_linear(x.index_select(0, groups.tokens), self.gate_up, self.gate_up_bias, groups)
        parts = grouped_linear(self.activate(hidden), self.down, self.down_bias, groups)
        return (ungroup(parts, groups).view(*indices.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    def _gathered(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Gather each token's experts and multiply in a batch: no host round trip, so a graph can capture it."""
        hidden = torch.einsum("tkfh,th->tkf", self.rows("gate_up", indices, x.dtype), x)
        act = self.activate(hidden if self.gate_up_bias is None else hidden + self.gate_up_bias[indices])
        parts = torch.einsum("tkhf,tkf->tkh", self.rows("down", indices, x.dtype), act)
        parts = parts if self.down_bias is None else parts + self.down_bias[indices]
        return (parts * weights.unsqueeze(-1)).sum(dim=1)


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]

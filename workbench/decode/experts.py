"""Routed experts: dense over all experts for training, sparse over the chosen ones for decoding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.fp8 import fake_quantize_groups
from workbench.decode.mxfp4 import ScaleRounding, fake_quantize
from workbench.decode.spec import MoE

MANY_TOKENS = 256
"""From this many rows on, most experts are chosen by someone: two large products beat many small ones."""

MANY_GATHERED = 16
"""On a GPU already from this many: gathering copies an expert's weights once for each token that chose it."""

ALPHA, LIMIT = 1.702, 7.0
"""gpt-oss's clamped SwiGLU: slope of the sigmoid, bound of gate (above) and up (both sides)."""


class Experts(nn.Module):
    """Top-k mixture of SwiGLU experts; router softmax over all experts, the chosen weights renormalised.

    ``gate_up`` is [experts, 2*inter, hidden] (gate rows first) and ``down`` [experts, hidden, inter]: both are
    contracted along their last axis, the one that MXFP4 blocks run along. ``quantize_forward`` simulates MXFP4
    in the forward pass with a straight-through backward (quantisation-aware training). ``quantize_activations``
    rounds what the chosen experts multiply to MXFP8: with MXFP4 weights, W4A8.
    """

    def __init__(self, hidden: int, shape: MoE, *, rounding: ScaleRounding = "up") -> None:
        super().__init__()
        self.shape, self.rounding = shape, rounding
        self.quantize_forward = False
        self.quantize_activations = False
        self.router = nn.Linear(hidden, shape.experts, bias=shape.bias)
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.inter, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, hidden, shape.inter) * shape.inter**-0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(shape.experts, 2 * shape.inter)) if shape.bias else None
        self.down_bias = nn.Parameter(torch.zeros(shape.experts, hidden)) if shape.bias else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (probabilities [..., experts], weights [..., top_k], indices [..., top_k]) of ``x`` [..., hidden]."""
        # The router stays in float32: a flipped top-k is a different model, not a rounding error.
        bias = None if self.router.bias is None else self.router.bias.float()
        logits = F.linear(x.float(), self.router.weight.float(), bias)
        probabilities = logits.softmax(dim=-1)
        weights, indices = probabilities.topk(self.shape.top_k, dim=-1)
        return probabilities, weights / weights.sum(dim=-1, keepdim=True), indices

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
            return self._all(x, dense, gate_up, down), balance
        return self._all(x, dense, self.gate_up, self.down), balance

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run only the chosen experts on ``x`` [T, hidden]; return the output [T, hidden] and indices [T, top_k]."""
        _, weights, indices = self.route(x)
        weights, x = weights.to(x.dtype), self._narrow(x)
        on_cpu = x.device.type == "cpu"
        if x.shape[0] > (MANY_TOKENS if on_cpu else MANY_GATHERED):
            dense = torch.zeros(x.shape[0], self.shape.experts, device=x.device, dtype=x.dtype)
            return self._all(x, dense.scatter(-1, indices, weights), self.gate_up, self.down), indices
        return (self._by_expert if on_cpu else self._gathered)(x, weights, indices), indices

    def gathered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`chosen`, always by gathering: no shape depends on the data, so a graph can capture it."""
        _, weights, indices = self.route(x)
        return self._gathered(self._narrow(x), weights.to(x.dtype), indices), indices

    def activate(self, hidden: Tensor) -> Tensor:
        """Turn gate and up ``hidden`` [..., 2*inter] into what the down projection multiplies, [..., inter]."""
        gate, up = hidden.chunk(2, dim=-1)
        if self.shape.activation == "swiglu":
            return self._narrow(F.silu(gate) * up)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return self._narrow(gate * torch.sigmoid(ALPHA * gate) * (up + 1))

    def _narrow(self, x: Tensor) -> Tensor:
        return fake_quantize_groups(x) if self.quantize_activations else x

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

    def _gathered(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Gather each token's experts and multiply in a batch: no host round trip, so a graph can capture it."""
        hidden = torch.einsum("tkfh,th->tkf", self.gate_up[indices], x)
        act = self.activate(hidden if self.gate_up_bias is None else hidden + self.gate_up_bias[indices])
        parts = torch.einsum("tkhf,tkf->tkh", self.down[indices], act)
        parts = parts if self.down_bias is None else parts + self.down_bias[indices]
        return (parts * weights.unsqueeze(-1)).sum(dim=1)


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]

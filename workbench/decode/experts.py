"""Routed experts: dense over all experts for training, sparse over the chosen ones for decoding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.mxfp4 import ScaleRounding, fake_quantize
from workbench.decode.spec import MoE

MANY_TOKENS = 256
"""From this many rows on, most experts are chosen by someone: two large products beat many small ones."""


class Experts(nn.Module):
    """Top-k mixture of SwiGLU experts; router softmax over all experts, the chosen weights renormalised.

    ``gate_up`` is [experts, 2*inter, hidden] (gate rows first) and ``down`` [experts, hidden, inter]: both are
    contracted along their last axis, the one that MXFP4 blocks run along. ``quantize_forward`` simulates MXFP4
    in the forward pass with a straight-through backward (quantisation-aware training).
    """

    def __init__(self, hidden: int, shape: MoE, *, rounding: ScaleRounding = "up") -> None:
        super().__init__()
        self.shape, self.rounding = shape, rounding
        self.quantize_forward = False
        self.router = nn.Linear(hidden, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.inter, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, hidden, shape.inter) * shape.inter**-0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (probabilities [..., experts], weights [..., top_k], indices [..., top_k]) of ``x`` [..., hidden]."""
        # The router stays in float32: a flipped top-k is a different model, not a rounding error.
        logits = F.linear(x.float(), self.router.weight.float())
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
        gate_up, down = self.gate_up, self.down
        if self.quantize_forward:
            gate_up, down = fake_quantize(gate_up, self.rounding), fake_quantize(down, self.rounding)
        return self._all(x, dense, gate_up, down), balance

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run only the chosen experts on ``x`` [T, hidden]; return the output [T, hidden] and indices [T, top_k]."""
        _, weights, indices = self.route(x)
        weights = weights.to(x.dtype)
        if x.shape[0] > MANY_TOKENS:
            dense = torch.zeros(x.shape[0], self.shape.experts, device=x.device, dtype=x.dtype)
            return self._all(x, dense.scatter(-1, indices, weights), self.gate_up, self.down), indices
        return (self._by_expert if x.device.type == "cpu" else self._gathered)(x, weights, indices), indices

    def _all(self, x: Tensor, dense: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Run all experts as two large products, weighted by ``dense`` [..., experts] (zero where not chosen)."""
        hidden = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (self.shape.experts, -1))
        gate, up = hidden.chunk(2, dim=-1)
        act = F.silu(gate) * up * dense.unsqueeze(-1).to(gate.dtype)
        return F.linear(act.flatten(-2), down.permute(1, 0, 2).flatten(1))

    def _by_expert(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Loop over the distinct experts: each weight is read once, at the price of a host decision per expert."""
        out = torch.zeros_like(x)
        for expert in sorted(set(indices.flatten().tolist())):
            tokens, slots = (indices == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            part = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, tokens, part * weights[tokens, slots, None])
        return out

    def _gathered(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Gather each token's experts and multiply in a batch: no host round trip, so a graph can capture it."""
        gate, up = torch.einsum("tkfh,th->tkf", self.gate_up[indices], x).chunk(2, dim=-1)
        parts = torch.einsum("tkhf,tkf->tkh", self.down[indices], F.silu(gate) * up)
        return (parts * weights.unsqueeze(-1)).sum(dim=1)

"""The small parts every layer shares: RMS norm, rotary embedding, SwiGLU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., width]; the result has ``x``'s dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_table(positions: int, dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return cosines and sines [2, positions, dim/2] in float32 (RoFormer, arXiv 2104.09864; half-split pairs)."""
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inverse
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply rotary embedding to ``x`` [..., S, heads, dim] with ``table`` [2, S, rot/2] (or [2, ..., S, rot/2]).

    The first rot numbers of a head rotate, the others pass.
    """
    cos, sin = table[0].unsqueeze(-2), table[1].unsqueeze(-2)
    turning, passing = torch.split(x, [2 * table.shape[-1], x.shape[-1] - 2 * table.shape[-1]], dim=-1)
    low, high = turning.float().chunk(2, dim=-1)
    return torch.cat(((low * cos - high * sin).to(x.dtype), (high * cos + low * sin).to(x.dtype), passing), dim=-1)


class SwiGLU(nn.Module):
    """Dense feed-forward: ``down(silu(gate(x)) * up(x))``; gate and up are one projection, gate first."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inter, bias=False)
        self.down = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out

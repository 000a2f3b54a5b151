"""Grouped-query attention in plain torch: parallel over a sequence for training, cached for decoding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.cache import LayerCache
from workbench.decode.layers import RMSNorm, rotate
from workbench.decode.spec import GQA
from workbench.errors import InputError


class Attention(nn.Module):
    """One attention layer. ``window`` counts the current position (the Hugging Face convention); None is full."""

    def __init__(self, hidden: int, shape: GQA, *, window: int | None, eps: float) -> None:
        super().__init__()
        if shape.output_gate:
            raise InputError("attention.output_gate: is counted by the byte model but not run in plain torch")
        self.shape, self.window = shape, window
        self.q = nn.Linear(hidden, shape.heads * shape.qk_dim, bias=shape.bias)
        self.k = nn.Linear(hidden, shape.kv_heads * shape.qk_dim, bias=shape.bias)
        self.v = nn.Linear(hidden, shape.kv_heads * shape.v_dim, bias=shape.bias)
        self.o = nn.Linear(shape.heads * shape.v_dim, hidden, bias=shape.bias)
        self.q_norm = RMSNorm(shape.qk_dim, eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.qk_dim, eps) if shape.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(shape.heads)) if shape.sinks else None

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return rotated queries [B, S, heads, qk_dim] of ``x`` [B, S, hidden]; ``rope`` is [2, (B,) S, rot/2]."""
        return rotate(self.q_norm(self.q(x).unflatten(-1, (self.shape.heads, -1))), rope)

    def keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys [B, S, kv_heads, qk_dim] and values [B, S, kv_heads, v_dim] of ``x``."""
        keys = rotate(self.k_norm(self.k(x).unflatten(-1, (self.shape.kv_heads, -1))), rope)
        values = self.v(x).unflatten(-1, (self.shape.kv_heads, -1))
        return keys, values if self.shape.value_scale == 1 else values * self.shape.value_scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Attend and project out.

        ``q`` [B, T, heads, qk_dim], ``k``/``v`` [B, kv_heads, S, dim], ``allowed`` boolean, broadcastable to
        [B, 1, 1, T, S]. Query heads of one KV head are folded into the row axis, so K and V are never expanded.
        Returns [B, T, hidden].
        """
        batch, tokens = q.shape[:2]
        kv_heads, groups = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        q = q.view(batch, tokens, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
        scores = (q.flatten(2, 3) @ k.transpose(-1, -2)).view(batch, kv_heads, groups, tokens, -1).float()
        scores = (scores * self.shape.qk_dim**-0.5).masked_fill(~allowed, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.float().view(1, kv_heads, groups, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        out = (weights.to(v.dtype).flatten(2, 3) @ v).view(batch, kv_heads, groups, tokens, -1)
        projected: Tensor = self.o(out.permute(0, 3, 1, 2, 4).reshape(batch, tokens, -1))
        return projected

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Causal attention over whole sequences ``x`` [B, S, hidden], positions 0 to S-1 (training and scoring)."""
        if self.sinks is not None:
            k, v = self.keys_values(x, rope)
            mask = causal_mask(x.shape[1], x.shape[1], self.window, x.device)
            return self.attend(self.queries(x, rope), k.transpose(1, 2), v.transpose(1, 2), mask)
        groups = self.shape.heads // self.shape.kv_heads
        q = self.queries(x, rope).transpose(1, 2)
        k, v = (t.transpose(1, 2).repeat_interleave(groups, dim=1) for t in self.keys_values(x, rope))
        if self.window is None or self.window >= x.shape[1]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = causal_mask(x.shape[1], x.shape[1], self.window, x.device)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        projected: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return projected

    def cached(self, x: Tensor, rope: Tensor, cache: LayerCache, start: int) -> Tensor:
        """Attend ``x`` [B, T, hidden] at positions ``start`` onwards to the cache, which receives their K and V."""
        k, v = self.keys_values(x, rope)
        cache.write(start, k.transpose(1, 2), v.transpose(1, 2))
        end = start + x.shape[1]
        first = 0 if self.window is None else max(0, start + 1 - self.window)
        mask = causal_mask(x.shape[1], end - first, self.window, x.device)
        return self.attend(self.queries(x, rope), cache.keys[:, :, first:end], cache.values[:, :, first:end], mask)

    def fixed(self, x: Tensor, rope: Tensor, cache: LayerCache, positions: Tensor, allowed: Tensor) -> Tensor:
        """As :meth:`cached` with positions on the device: the whole slab is read under ``allowed`` [T, capacity]."""
        k, v = self.keys_values(x, rope)
        cache.write_at(positions, k.transpose(1, 2), v.transpose(1, 2))
        return self.attend(self.queries(x, rope), cache.keys, cache.values, allowed)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the boolean mask [queries, keys] of the last ``queries`` positions over the last ``keys`` ones."""
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    mask = column <= row
    return mask if window is None else mask & (column > row - window)

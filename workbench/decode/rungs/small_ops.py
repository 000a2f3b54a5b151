"""The fused kernels' work as chains of small operators: the ``small-kernels`` fault.

Every line is a launch of its own, as in engines that were never fused; the numbers are those of the fused kernels up
to the order of rounding.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the normed ``x`` [T, H]; ``residual`` is updated in place to x + residual and normed instead of x."""
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    square = wide.square()
    mean = square.mean(-1, keepdim=True)
    shifted = mean + eps
    root = shifted.rsqrt()
    scaled = wide * root
    weighted = scaled * weight.float()
    return weighted.to(x.dtype)


def rope_write(
    qkv: Tensor,
    table: Tensor,
    kv_len: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    value_scale: float = 1.0,
) -> Tensor:
    """Return rotated queries [T, heads, Dk] and write the T new positions of ``keys`` and ``values`` [KV, C, D].

    ``table`` float32 [C, rot] holds cosines, then sines, for the first ``rot`` numbers of a head; ``norms`` are QK-norm
    weights.
    """
    tokens, (kv_heads, _, width) = len(qkv), keys.shape
    positions = kv_len - tokens + torch.arange(tokens, device=qkv.device)
    angles = table.index_select(0, positions)
    cos, sin = angles[:, None].chunk(2, -1)
    q, k, v = torch.split(qkv, [heads * width, kv_heads * width, kv_heads * values.shape[2]], 1)
    q, k, v = q.view(tokens, heads, -1), k.view(tokens, kv_heads, -1), v.view(tokens, kv_heads, -1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    keys.index_copy_(1, positions, _rotate(k, cos, sin).transpose(0, 1))
    values.index_copy_(1, positions, (v if value_scale == 1 else v * value_scale).transpose(0, 1))
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, passing = torch.split(x, [2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    low, high = turning.float().chunk(2, -1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)
    return torch.cat((turned, passing), -1) if passing.shape[-1] else turned

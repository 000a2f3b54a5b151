"""Attention of the kernel rungs: what a layer launches between its norm and its output product."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from workbench.decode.attention import Attention
from workbench.decode.layers import RMSNorm
from workbench.decode.mla import LatentAttention
from workbench.decode.rungs import small_ops
from workbench.decode.rungs.products import Product
from workbench.kernels.attention import AttentionConfig, gqa_decode
from workbench.kernels.attention import default_config as attention_config
from workbench.kernels.contract import power_of_2
from workbench.kernels.mla import MlaConfig, mla_decode
from workbench.kernels.mla_project import per_head, prepare
from workbench.kernels.rope import rope_write
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class AttendSettings:
    """What attention takes from the rung: norm epsilon, overlapping launches, and the planted faults."""

    eps: float
    overlap: bool = False
    small_kernels: bool = False
    low_split: bool = False
    over_read: bool = False


class Attend(Protocol):
    """One layer's attention over a cache of its own; ``keys`` and ``values`` are the slabs."""

    keys: Tensor
    values: Tensor

    def __call__(self, normed: Tensor, kv_len: Tensor, workspace: Workspace) -> Tensor:
        """Return [T, heads * v] of ``normed`` [T, H], whose positions are the last T of ``kv_len``."""


@dataclass(slots=True)
class GqaAttend:
    """Three launches: the QKV product, rotation with the cache write, attention.

    Not ``causal``: a draft block's tokens see each other.
    """

    attention: Attention
    qkv: Product
    table: Tensor
    keys: Tensor
    values: Tensor
    settings: AttendSettings
    causal: bool = True

    def __call__(self, normed: Tensor, kv_len: Tensor, workspace: Workspace) -> Tensor:
        """Run the layer's attention."""
        shape, settings = self.attention.shape, self.settings
        qkv = self.qkv(normed, workspace)
        norms = _qk_norms(self.attention)
        if settings.small_kernels:
            q = small_ops.rope_write(
                qkv, self.table, kv_len, self.keys, self.values, heads=shape.heads, norms=norms, eps=settings.eps,
                value_scale=shape.value_scale,
            )  # fmt: skip
        else:
            q_norm, k_norm = norms or (None, None)
            q = rope_write(
                qkv, self.table, kv_len, self.keys, self.values, heads=shape.heads, q_norm=q_norm, k_norm=k_norm,
                eps=settings.eps, v_scale=shape.value_scale, overlap=settings.overlap,
            )  # fmt: skip
        keys, values = self.keys, self.values
        if settings.over_read:
            keys, values = keys.clone(), values.clone()
        attended = gqa_decode(
            q,
            keys,
            values,
            kv_len,
            scale=shape.qk_dim**-0.5,
            window=self.attention.window,
            causal=self.causal,
            sinks=None if self.attention.sinks is None else self.attention.sinks.detach(),
            workspace=workspace,
            config=self._unsplit(q) if settings.low_split else None,
            overlap=settings.overlap,
        )
        return attended.flatten(1)

    def _unsplit(self, q: Tensor) -> AttentionConfig:
        shape = self.attention.shape
        rows = max(16, power_of_2(len(q) * shape.heads // shape.kv_heads))
        return replace(attention_config(rows, shape.qk_dim, shape.v_dim), splits=1)


@dataclass(slots=True)
class MlaAttend:
    """Six launches: low-rank product, norms and cache writes, query product, absorbed keys, attention, absorbed values.

    ``low`` yields query, latent, rotary key and, where the layer owns an indexer, its key and head weights; ``up`` the
    queries and the indexer's. What the indexer would choose with them is left out: workbench/decode/mla.py.
    ``values`` is the indexer's cache, of width 0 without one.
    """

    attention: LatentAttention
    low: Product
    up: Product
    table: Tensor
    keys: Tensor
    values: Tensor
    settings: AttendSettings

    def __call__(self, normed: Tensor, kv_len: Tensor, workspace: Workspace) -> Tensor:
        """Run the layer's attention."""
        attention, settings = self.attention, self.settings
        shape, indexer, cache = attention.shape, attention.indexer, self.keys[0]
        index = None
        if indexer is not None:
            norm = indexer.k_norm
            index = (norm.weight.detach(), norm.bias.detach(), self.values[0])
        low = prepare(
            self.low(normed, workspace), self.table, kv_len, attention.q_a_norm.weight.detach(),
            attention.kv_a_norm.weight.detach(), cache, eps=settings.eps, index=index, overlap=settings.overlap,
        )  # fmt: skip
        heads = self.up(low, workspace)
        q = per_head(heads, attention.uk.detach(), rotate=(self.table, kv_len), overlap=settings.overlap)
        if settings.over_read:
            cache = cache.clone()
        latent = mla_decode(
            q,
            cache,
            kv_len,
            rank=shape.kv_lora,
            scale=attention.scale,
            workspace=workspace,
            config=MlaConfig(splits=1) if settings.low_split else None,
            overlap=settings.overlap,
        )
        return per_head(latent.flatten(1), attention.uv.detach(), overlap=settings.overlap).flatten(1)


def _qk_norms(attention: Attention) -> tuple[Tensor, Tensor] | None:
    if isinstance(attention.q_norm, RMSNorm) and isinstance(attention.k_norm, RMSNorm):
        return attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return None


def slabs(shape: tuple[int, int, int], capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return empty keys and values of one layer, [KV, capacity, width] each, for ``shape`` (KV heads, two widths)."""
    heads, *widths = shape
    keys, values = (torch.zeros(heads, capacity, width, dtype=torch.bfloat16, device=device) for width in widths)
    return keys, values

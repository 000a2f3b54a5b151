"""Multi-head latent attention in plain torch, in the absorbed form that decoding uses (DeepSeek-V2, arXiv 2405.04434).

Every head attends to one latent per position. The up-projections of keys and values never touch the cache: the key
half is multiplied into the query, the value half behind the attention. They are kept apart for that, in the dtype of
the model, as SGLang keeps them in BF16 whatever the checkpoint's format.

Where the layer owns a DSA indexer, its projections run and its key is cached, so their weights are read. Which
positions it would choose does not matter up to ``Indexer.top_k`` of them, because then every position is chosen; the
scores and the choice itself are therefore left out, and longer contexts are refused (workbench/decode/rank.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.attention import causal_mask
from workbench.decode.cache import LayerCache
from workbench.decode.layers import RMSNorm, rotate
from workbench.decode.spec import MLA, Indexer


class IndexerProjections(nn.Module):
    """A layer's own indexer: queries from the low-rank query, one key and head weights from the layer's input."""

    def __init__(self, hidden: int, q_lora: int, shape: Indexer, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = shape, eps
        self.wq_b = nn.Linear(q_lora, shape.heads * shape.dim, bias=False)
        self.wk = nn.Linear(hidden, shape.dim, bias=False)
        self.weights = nn.Linear(hidden, shape.heads, bias=False)
        self.k_norm = nn.LayerNorm(shape.dim, eps)

    def key(self, raw: Tensor, rope: Tensor) -> Tensor:
        """Return the cached key [B, S, 1, dim] of ``raw`` [B, S, dim]: normed, its first numbers rotated."""
        norm = self.k_norm
        normed = F.layer_norm(raw.float(), (self.shape.dim,), norm.weight.float(), norm.bias.float(), self.eps)
        return rotate(normed.to(raw.dtype).unsqueeze(-2), rope)


class LatentAttention(nn.Module):
    """One MLA layer. ``uk`` [heads, kv_lora, nope] and ``uv`` [heads, v, kv_lora] are the two absorbed halves.

    The cache holds the normed latent and the rotated shared key as keys [B, 1, positions, kv_lora + rope], and the
    indexer's keys as values [B, 1, positions, dim], dim 0 where the layer owns no indexer.
    """

    window: int | None = None

    def __init__(self, hidden: int, shape: MLA, *, indexer: bool, eps: float) -> None:
        super().__init__()
        self.shape = shape
        self.q_a = nn.Linear(hidden, shape.q_lora, bias=False)
        self.kv_a = nn.Linear(hidden, shape.kv_lora + shape.rope_dim, bias=False)
        self.q_a_norm = RMSNorm(shape.q_lora, eps)
        self.kv_a_norm = RMSNorm(shape.kv_lora, eps)
        self.q_b = nn.Linear(shape.q_lora, shape.heads * (shape.nope_dim + shape.rope_dim), bias=False)
        self.uk = nn.Parameter(torch.randn(shape.heads, shape.kv_lora, shape.nope_dim) * shape.nope_dim**-0.5)
        self.uv = nn.Parameter(torch.randn(shape.heads, shape.v_dim, shape.kv_lora) * shape.kv_lora**-0.5)
        self.o = nn.Linear(shape.heads * shape.v_dim, hidden, bias=False)
        owned = shape.indexer if indexer else None
        self.indexer = None if owned is None else IndexerProjections(hidden, shape.q_lora, owned, eps)

    @property
    def scale(self) -> float:
        """Factor of the scores: the size of a head before absorption, to the power -1/2."""
        return float((self.shape.nope_dim + self.shape.rope_dim) ** -0.5)

    def project(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, T, heads, kv_lora + rope], and what the two slabs get, [B, 1, T, width] each."""
        shape = self.shape
        low = self.q_a_norm(self.q_a(x))
        q = self.q_b(low).unflatten(-1, (shape.heads, -1))
        nope, turning = q.split([shape.nope_dim, shape.rope_dim], dim=-1)
        absorbed = torch.einsum("bthn,hrn->bthr", nope, self.uk)
        latent, key = self.kv_a(x).split([shape.kv_lora, shape.rope_dim], dim=-1)
        key = rotate(key.unsqueeze(-2), rope).squeeze(-2)
        stored = torch.cat((self.kv_a_norm(latent), key), dim=-1).unsqueeze(1)
        index_key = stored[..., :0]
        if self.indexer is not None:
            # Queries and head weights go nowhere: see the module text.
            self.indexer.wq_b(low)
            self.indexer.weights(x)
            index_key = self.indexer.key(self.indexer.wk(x), rope).transpose(1, 2)
        return torch.cat((absorbed, rotate(turning, rope)), dim=-1), stored, index_key

    def attend(self, q: Tensor, slab: Tensor, allowed: Tensor) -> Tensor:
        """Attend to ``slab`` [B, 1, S, kv_lora + rope] where ``allowed`` [T, S] holds; return [B, T, hidden]."""
        batch, tokens, heads, _ = q.shape
        cached = slab[:, 0]
        scores = (q.flatten(1, 2) @ cached.transpose(-1, -2)).view(batch, tokens, heads, -1).float()
        scores = (scores * self.scale).masked_fill(~allowed[:, None], float("-inf"))
        latent = cached[..., : self.shape.kv_lora]
        out = (scores.softmax(-1).to(cached.dtype).flatten(1, 2) @ latent).view(batch, tokens, heads, -1)
        projected: Tensor = self.o(torch.einsum("bthr,hvr->bthv", out, self.uv).flatten(2))
        return projected

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Causal attention over whole sequences ``x`` [B, S, hidden], positions 0 to S-1."""
        q, stored, _ = self.project(x, rope)
        return self.attend(q, stored, causal_mask(x.shape[1], x.shape[1], None, x.device))

    def cached(self, x: Tensor, rope: Tensor, cache: LayerCache, start: int) -> Tensor:
        """Attend ``x`` [B, T, hidden] at positions ``start`` onwards to the cache, which receives what they leave."""
        q, stored, index_key = self.project(x, rope)
        cache.write(start, stored, index_key)
        end = start + x.shape[1]
        return self.attend(q, cache.keys[:, :, :end], causal_mask(x.shape[1], end, None, x.device))

    def fixed(self, x: Tensor, rope: Tensor, cache: LayerCache, positions: Tensor, allowed: Tensor) -> Tensor:
        """As :meth:`cached` with positions on the device: the whole slab is read under ``allowed``."""
        q, stored, index_key = self.project(x, rope)
        cache.write_at(positions, stored, index_key)
        return self.attend(q, cache.keys, allowed)

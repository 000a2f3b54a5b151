"""DFlash: a block-diffusion drafter that fills a block of masks in one pass (arXiv 2602.06036).

The block is [anchor, MASK x (block-1)], the anchor being the last committed token. Hidden states of a few target
layers at the positions before it are concatenated, projected, normed, and injected into every draft layer as extra
keys and values. Embedding and head are the target's. All layers are windowed, so the draft's cost depends neither on
the block's content nor on the context; inside the block attention is bidirectional.
"""

import torch
from torch import Tensor, nn

from workbench.decode.attention import Attention
from workbench.decode.layers import RMSNorm, SwiGLU
from workbench.decode.spec import GQA, DFlash, ModelSpec
from workbench.errors import InputError

KeyValue = tuple[Tensor, Tensor]


class DraftLayer(nn.Module):
    """One draft layer; context keys and values come from target features, not from this layer's input."""

    def __init__(self, hidden: int, shape: GQA, inter: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden, eps)
        self.attention = Attention(hidden, shape, window=None, eps=eps)
        self.ffn_norm = RMSNorm(hidden, eps)
        self.ffn = SwiGLU(hidden, inter)

    def forward(self, x: Tensor, rope: Tensor, context: KeyValue, allowed: Tensor) -> Tensor:
        """Run block tokens ``x`` [B, Q, hidden]; ``context`` K, V are [B, kv_heads, C, dim].

        ``allowed`` is boolean, broadcastable to [B, 1, 1, Q, C + Q].
        """
        normed = self.attention_norm(x)
        k, v = self.attention.keys_values(normed, rope)
        keys = torch.cat((context[0], k.transpose(1, 2)), dim=2)
        values = torch.cat((context[1], v.transpose(1, 2)), dim=2)
        x = x + self.attention.attend(self.attention.queries(normed, rope), keys, values, allowed)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class DFlashModel(nn.Module):
    """The drafter's weights: projection of target features, mask embedding, draft layers."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.dflash is None or not isinstance(spec.attention, GQA):
            raise InputError(f"{spec.name}: a dflash section and grouped-query attention are needed to build a drafter")
        self.shape: DFlash = spec.dflash
        base = spec.attention
        attention = GQA(
            heads=self.shape.heads or base.heads,
            kv_heads=self.shape.kv_heads or base.kv_heads,
            qk_dim=self.shape.qk_dim or base.qk_dim,
            v_dim=self.shape.qk_dim or base.v_dim,
            qk_norm=True,
        )
        if attention.qk_dim != base.qk_dim:
            raise InputError(f"{spec.name}: dflash.qk_dim={attention.qk_dim} differs from the target's {base.qk_dim}")
        self.project = nn.Linear(len(self.shape.taps) * spec.hidden, spec.hidden, bias=False)
        self.context_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.mask = nn.Parameter(torch.randn(spec.hidden) * 0.02)
        self.layers = nn.ModuleList(
            DraftLayer(spec.hidden, attention, self.shape.inter, spec.norm_eps) for _ in range(self.shape.layers)
        )
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)

    def context(self, taps: Tensor, rope: Tensor) -> list[KeyValue]:
        """Turn target features ``taps`` [B, C, n_taps, hidden] into every layer's K and V [B, kv_heads, C, dim]."""
        features = self.context_norm(self.project(taps.flatten(2)))
        result: list[KeyValue] = []
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)  # noqa: S101 - for the type checker
            k, v = layer.attention.keys_values(features, rope)
            result.append((k.transpose(1, 2), v.transpose(1, 2)))
        return result

    def fill(self, anchors: Tensor, rope: Tensor, context: list[KeyValue], allowed: Tensor) -> Tensor:
        """Fill blocks behind embedded ``anchors`` [B, A, hidden] in one pass.

        ``rope`` covers the A * block query positions. Returns normed states [B, A, block-1, hidden] of the masks, ready
        for the target's head without its final norm.
        """
        batch, count, hidden = anchors.shape
        masks = self.mask.to(anchors.dtype).expand(batch, count, self.shape.block - 1, hidden)
        x = torch.cat((anchors.unsqueeze(2), masks), dim=2).flatten(1, 2)
        for layer, key_value in zip(self.layers, context, strict=True):
            x = layer(x, rope, key_value, allowed)
        out: Tensor = self.norm(x).unflatten(1, (count, self.shape.block))[:, :, 1:]
        return out

"""Multi-token prediction: one extra layer that guesses the token after next (DeepSeek-V3, arXiv 2412.19437)."""

import torch
from torch import Tensor, nn

from workbench.decode.attention import Attention
from workbench.decode.cache import LayerCache
from workbench.decode.layers import RMSNorm, SwiGLU
from workbench.decode.spec import GQA, ModelSpec
from workbench.errors import InputError


class MtpHead(nn.Module):
    """Combine a hidden state with the embedding of the token that follows it; predict the one after.

    Row i takes (hidden state at i, token i+1) and its state predicts token i+2 through the target's head. Depth is
    reached by iterating: the module's own output stands in for the hidden state of the next row (as GLM-5.2 does).
    Embedding and head are the target's. Attention is windowed where the target has a window.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.mtp is None or spec.mtp.dense_inter is None or not isinstance(spec.attention, GQA):
            raise InputError(f"{spec.name}: an MTP head needs mtp.dense_inter and grouped-query attention")
        self.token_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.state_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.combine = nn.Linear(2 * spec.hidden, spec.hidden, bias=False)
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attention = Attention(spec.hidden, spec.sliding or spec.attention, window=spec.window, eps=spec.norm_eps)
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.ffn = SwiGLU(spec.hidden, spec.mtp.dense_inter)

    def join(self, state: Tensor, token: Tensor) -> Tensor:
        """Return the layer's input [..., hidden] from ``state`` and embedded ``token``, both [..., hidden]."""
        joined: Tensor = self.combine(torch.cat((self.token_norm(token), self.state_norm(state)), dim=-1))
        return joined

    def forward(self, state: Tensor, token: Tensor, rope: Tensor) -> Tensor:
        """Run whole sequences [B, S, hidden]; return states [B, S, hidden] for the target's norm and head."""
        x = self.join(state, token)
        x = x + self.attention(self.attention_norm(x), rope)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out

    def fixed(
        self, state: Tensor, token: Tensor, rope: Tensor, cache: LayerCache, positions: Tensor, allowed: Tensor
    ) -> Tensor:
        """As :meth:`cached` with ``positions`` int64 [T] on the device; the whole cache is read under ``allowed``."""
        x = self.join(state, token)
        x = x + self.attention.fixed(self.attention_norm(x), rope, cache, positions, allowed)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out

    def cached(self, state: Tensor, token: Tensor, rope: Tensor, cache: LayerCache, start: int) -> Tensor:
        """Run rows [B, T, hidden] at positions ``start`` onwards against ``cache``."""
        x = self.join(state, token)
        x = x + self.attention.cached(self.attention_norm(x), rope, cache, start)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out

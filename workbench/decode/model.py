"""The target model of the pipeline: a decoder stack built from a :class:`ModelSpec`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.attention import Attention
from workbench.decode.cache import KVCache, LayerCache
from workbench.decode.experts import Experts
from workbench.decode.layers import RMSNorm, SwiGLU, rope_table
from workbench.decode.spec import GQA, ModelSpec
from workbench.errors import InputError


@dataclass(frozen=True, slots=True)
class Scores:
    """What one forward over T new positions yields.

    ``logits`` [B, T, vocab]; ``hidden`` [B, T, hidden] before the final norm; ``taps`` [B, T, n_taps, hidden], outputs
    of the layers a DFlash drafter listens to; ``experts`` [layers with experts, B*T, top_k], the chosen indices.
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor
    experts: Tensor


class Block(nn.Module):
    """One decoder layer: attention, then experts or a dense FFN, both pre-normed with a residual."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        mixer = spec.mixer_spec(layer)
        if not isinstance(mixer, GQA):
            raise InputError(
                f"{spec.name}: layer {layer} uses {mixer.kind}; plain torch runs grouped-query attention only"
            )
        window = spec.window if spec.mixers[layer] == "sliding" else None
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attention = Attention(spec.hidden, mixer, window=window, eps=spec.norm_eps)
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.ffn: Experts | SwiGLU
        if spec.moe is not None and layer >= spec.dense_first:
            if spec.moe.shared:
                raise InputError(f"{spec.name}: moe.shared: is counted by the byte model but not run in plain torch")
            self.ffn = Experts(spec.hidden, spec.moe)
        else:
            assert spec.dense_inter is not None  # noqa: S101 - guaranteed by the spec's validator
            self.ffn = SwiGLU(spec.hidden, spec.dense_inter)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Run whole sequences ``x`` [B, S, hidden]; return the output and the balance loss (0 for a dense FFN)."""
        x = x + self.attention(self.attention_norm(x), rope)
        if isinstance(self.ffn, Experts):
            out, balance = self.ffn(self.ffn_norm(x))
            return x + out, balance
        return x + self.ffn(self.ffn_norm(x)), x.new_zeros((), dtype=torch.float32)

    def cached(self, x: Tensor, rope: Tensor, cache: LayerCache, start: int) -> tuple[Tensor, Tensor | None]:
        """Run new positions ``x`` [B, T, hidden] against the cache; return the output and the chosen experts."""
        x = x + self.attention.cached(self.attention_norm(x), rope, cache, start)
        normed = self.ffn_norm(x)
        if isinstance(self.ffn, Experts):
            out, indices = self.ffn.chosen(normed.flatten(0, 1))
            return x + out.view_as(x), indices
        return x + self.ffn(normed), None


class Target(nn.Module):
    """The model that decides the text; drafters only guess it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if not isinstance(spec.attention, GQA):
            raise InputError(f"{spec.name}: plain torch runs grouped-query attention only, not {spec.attention.kind}")
        widths = {mixer.qk_dim for mixer in (spec.attention, spec.sliding) if isinstance(mixer, GQA)}
        if len(widths) > 1 or min(widths) % 2:
            raise InputError(f"{spec.name}: qk_dim {sorted(widths)}: plain torch needs one even width in all layers")
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.head = None if spec.tied_head else nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.taps = spec.dflash.taps if spec.dflash else ()
        # Not a buffer: a cast of the module to bfloat16 must leave the angles in float32. Made on first use, outside
        # inference mode: the engine may come first, and training saves the table for its backward pass.
        self._rope: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device the weights are on."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, the experts included."""
        return self.embed.weight.dtype

    @property
    def rope(self) -> Tensor:
        """Cosines and sines [2, max_positions, qk_dim/2] in float32, on the model's device."""
        if self._rope is None or self._rope.device != self.device:
            shape = self.spec.attention
            assert isinstance(shape, GQA)  # noqa: S101 - checked at construction
            with torch.inference_mode(False):
                self._rope = rope_table(self.spec.max_positions, shape.qk_dim, self.spec.rope_theta, self.device)
        return self._rope

    @property
    def head_weight(self) -> Tensor:
        """The LM head's weight [vocab, hidden], shared with the drafters."""
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [..., vocab] of un-normed states ``hidden`` [..., hidden]."""
        return F.linear(self.norm(hidden), self.head_weight).float()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score whole sequences ``tokens`` [B, S].

        Returns un-normed hidden states [B, S, hidden], taps [B, S, n_taps, hidden] and the summed balance loss.
        """
        x = self.embed(tokens)
        rope = self.rope[:, : tokens.shape[1]]
        balance = torch.zeros((), device=x.device)
        taps: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x, extra = block(x, rope)
            balance = balance + extra
            if layer in self.taps:
                taps.append(x)
        return x, torch.stack(taps, dim=2) if taps else x.new_empty(*x.shape[:2], 0, x.shape[2]), balance

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Return an empty cache for ``capacity`` positions, at most the model's ``max_positions``."""
        if capacity > self.spec.max_positions:
            raise InputError(f"{self.spec.name}: {capacity} positions exceed max_positions={self.spec.max_positions}")
        return KVCache(self.spec, capacity, batch=batch, device=self.device, dtype=self.dtype)

    @torch.no_grad()
    def score(self, tokens: Tensor, cache: KVCache) -> Scores:
        """Run ``tokens`` [B, T] at the cache's end without committing them: the caller sets ``cache.length``."""
        start, count = cache.length, tokens.shape[1]
        cache.reserve(count)
        x = self.embed(tokens)
        rope = self.rope[:, start : start + count]
        taps: list[Tensor] = []
        experts: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)  # noqa: S101 - for the type checker
            x, chosen = block.cached(x, rope, cache.layers[layer], start)
            if layer in self.taps:
                taps.append(x)
            if chosen is not None:
                experts.append(chosen)
        return Scores(
            logits=self.logits(x),
            hidden=x,
            taps=torch.stack(taps, dim=2) if taps else x.new_empty(*x.shape[:2], 0, x.shape[2]),
            experts=torch.stack(experts) if experts else torch.empty(0, tokens.numel(), 0, dtype=torch.long),
        )

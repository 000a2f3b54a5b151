"""The target model of the pipeline: a decoder stack built from a :class:`ModelSpec`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.attention import Attention
from workbench.decode.cache import KVCache, LayerCache
from workbench.decode.experts import Experts
from workbench.decode.layers import RMSNorm, SwiGLU, rope_table
from workbench.decode.mla import LatentAttention
from workbench.decode.spec import GQA, MLA, ModelSpec
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

    def distinct(self) -> tuple[int, ...]:
        """Return how many distinct experts each layer chose; waits for the step."""
        return distinct_experts(self.experts.flatten(1).numpy(force=True))


def distinct_experts(chosen: npt.NDArray[np.integer[Any]]) -> tuple[int, ...]:
    """Return how many distinct values each row of ``chosen`` [layers with experts, n] has."""
    # Rows are a few numbers long: sets of them are done before NumPy has sorted.
    return tuple(map(len, map(set, chosen.tolist())))


class Block(nn.Module):
    """One decoder layer: attention, then experts or a dense FFN, both pre-normed with a residual."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        mixer = spec.mixer_spec(layer)
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attention: Attention | LatentAttention
        if isinstance(mixer, GQA):
            window = spec.window if spec.mixers[layer] == "sliding" else None
            self.attention = Attention(spec.hidden, mixer, window=window, eps=spec.norm_eps)
        elif isinstance(mixer, MLA):
            owned = mixer.indexer is not None and mixer.indexer.owned_by(layer)
            self.attention = LatentAttention(spec.hidden, mixer, indexer=owned, eps=spec.norm_eps)
        else:
            raise InputError(f"{spec.name}: layer {layer} uses {mixer.kind}; plain torch runs gqa and mla only")
        # What the ranks would exchange here, where a rung stands in for it (workbench/decode/rungs/collectives.py).
        self.collective: Callable[[], None] | None = None
        self.ffn_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.ffn: Experts | SwiGLU
        if spec.moe is not None and layer >= spec.dense_first:
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
        attended = self.attention.cached(self.attention_norm(x), rope, cache, start)
        self.exchange()
        x = x + attended
        normed = self.ffn_norm(x)
        if isinstance(self.ffn, Experts):
            out, indices = self.ffn.chosen(normed.flatten(0, 1), self._positions(x, start))
            self.exchange()
            return x + out.view_as(x), indices
        out = self.ffn(normed)
        self.exchange()
        return x + out, None

    def exchange(self) -> None:
        """Run what stands in for the collective behind attention and behind the FFN, if anything does."""
        if self.collective is not None:
            self.collective()

    def _positions(self, x: Tensor, start: int) -> Tensor | None:
        if not isinstance(self.ffn, Experts) or self.ffn.forced is None:
            return None
        return torch.arange(start, start + x.shape[1], device=x.device).repeat(x.shape[0])


class Target(nn.Module):
    """The model that decides the text; drafters only guess it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        for width, _ in {spec.rope(layer) for layer in range(spec.layers)}:
            if width % 2:
                raise InputError(f"{spec.name}: rotary embedding turns pairs, {width} numbers of a head are odd")
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.head = None if spec.tied_head else nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.taps = spec.dflash.taps if spec.dflash else ()
        # Not a buffer: a cast of the module to bfloat16 must leave the angles in float32. Made on first use, outside
        # inference mode: the engine may come first, and training saves the table for its backward pass.
        self._ropes: dict[tuple[int, float], Tensor] = {}

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
        """Cosines and sines [2, max_positions, rot/2] of the full layers in float32, on the model's device."""
        layer = self.spec.mixers.index("full") if "full" in self.spec.mixers else 0
        return self.rope_of(layer, self.spec.max_positions)

    def rope_of(self, layer: int, positions: int) -> Tensor:
        """Cosines and sines [2, n, rot/2] of ``layer`` in float32, on the model's device; n is at least ``positions``.

        A table is built for a power of two of positions, because models that take a million are seldom asked to.
        """
        key = self.spec.rope(layer)
        table = self._ropes.get(key)
        if table is None or table.device != self.device or table.shape[1] < positions:
            length = min(self.spec.max_positions, max(4096, 1 << (positions - 1).bit_length()))
            with torch.inference_mode(False):
                table = self._ropes[key] = rope_table(length, *key, self.device)
        return table

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
        count = tokens.shape[1]
        balance = torch.zeros((), device=x.device)
        taps: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x, extra = block(x, self.rope_of(layer, count)[:, :count])
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
        taps: list[Tensor] = []
        experts: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)  # noqa: S101 - for the type checker
            rope = self.rope_of(layer, start + count)[:, start : start + count]
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

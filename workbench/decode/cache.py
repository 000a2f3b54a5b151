"""The KV cache of the eager engine: one slab a layer, written in place, rolled back by length."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.decode.spec import GQA, MLA, ModelSpec
from workbench.errors import InputError


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer, [batch, kv_heads, capacity, dim] each.

    An MLA layer has one head: latent and rotary key as keys, the indexer's key (or nothing) as values.
    """

    keys: Tensor
    values: Tensor

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` [batch, kv_heads, T, dim] at positions ``start`` onwards."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values

    def write_at(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """As :meth:`write` at ``positions`` int64 [T] on the device."""
        self.keys.index_copy_(2, positions, keys)
        if values.shape[-1]:
            self.values.index_copy_(2, positions, values)


def cache_shape(spec: ModelSpec, layer: int) -> tuple[int, int, int]:
    """Return the KV heads of ``layer``, and the numbers a position and head of keys and of values holds."""
    mixer = spec.mixer_spec(layer)
    if isinstance(mixer, GQA):
        return mixer.kv_heads, mixer.qk_dim, mixer.v_dim
    if isinstance(mixer, MLA):
        owned = mixer.indexer is not None and mixer.indexer.owned_by(layer)
        return 1, mixer.kv_lora + mixer.rope_dim, mixer.indexer.dim if mixer.indexer and owned else 0
    raise InputError(f"{spec.name}: layer {layer} uses {mixer.kind}; the engines run gqa and mla only")


class KVCache:
    """Caches of all layers and the number of positions that are committed.

    Rejected draft positions need no erasing: ``length`` alone says what is valid, and the next write covers them.
    """

    def __init__(
        self, spec: ModelSpec, capacity: int, *, batch: int = 1, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: list[LayerCache] = []
        for index in range(spec.layers):
            heads, *widths = cache_shape(spec, index)
            keys, values = (torch.zeros(batch, heads, capacity, width, device=device, dtype=dtype) for width in widths)
            self.layers.append(LayerCache(keys, values))

    def reserve(self, tokens: int) -> None:
        """Check that ``tokens`` more positions fit."""
        if self.length + tokens > self.capacity:
            raise InputError(
                f"KV cache: {self.length} + {tokens} positions exceed its capacity {self.capacity}; "
                "lower prompts.new_tokens or drafter.depth"
            )

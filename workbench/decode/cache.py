"""The KV cache of the eager engine: one slab a layer, written in place, rolled back by length."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.decode.spec import GQA, ModelSpec
from workbench.errors import InputError


@dataclass(slots=True)
class LayerCache:
    """Keys and values of one layer, [batch, kv_heads, capacity, dim] each."""

    keys: Tensor
    values: Tensor

    def write(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` [batch, kv_heads, T, dim] at positions ``start`` onwards."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values


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
            mixer = spec.mixer_spec(index)
            if not isinstance(mixer, GQA):
                raise InputError(
                    f"{spec.name}: layer {index} uses {mixer.kind}; the eager engine runs grouped-query attention only"
                )
            shape = (batch, mixer.kv_heads, capacity)
            self.layers.append(
                LayerCache(
                    torch.zeros(*shape, mixer.qk_dim, device=device, dtype=dtype),
                    torch.zeros(*shape, mixer.v_dim, device=device, dtype=dtype),
                )
            )

    def reserve(self, tokens: int) -> None:
        """Check that ``tokens`` more positions fit."""
        if self.length + tokens > self.capacity:
            raise InputError(
                f"KV cache: {self.length} + {tokens} positions exceed its capacity {self.capacity}; "
                "lower prompts.new_tokens or drafter.depth"
            )

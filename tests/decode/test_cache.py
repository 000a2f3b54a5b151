from collections.abc import Callable

import pytest
import torch

from workbench.decode.cache import KVCache, cache_shape
from workbench.decode.presets import load_preset
from workbench.decode.spec import MLA, ModelSpec
from workbench.errors import InputError

CPU = torch.device("cpu")


def test_one_slab_a_layer_of_that_layer_s_shape(tiny_spec: Callable[..., ModelSpec]) -> None:
    narrow = {"kind": "gqa", "heads": 4, "kv_heads": 1, "qk_dim": 8, "v_dim": 4}
    cache = KVCache(tiny_spec(sliding=narrow), 10, batch=3, device=CPU, dtype=torch.bfloat16)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(3, 1, 10, 8), (3, 2, 10, 8)]
    assert [tuple(layer.values.shape) for layer in cache.layers] == [(3, 1, 10, 4), (3, 2, 10, 8)]
    assert cache.layers[0].keys.dtype == torch.bfloat16


def test_writing_covers_what_was_there(tiny_spec: Callable[..., ModelSpec]) -> None:
    layer = KVCache(tiny_spec(), 6, device=CPU, dtype=torch.float32).layers[0]
    for start, count, value in ((0, 4, 1.0), (2, 3, 2.0)):
        layer.write(start, torch.full((1, 2, count, 8), value), torch.full((1, 2, count, 8), -value))
    assert layer.keys[0, 1, :, 3].tolist() == [1, 1, 2, 2, 2, 0]
    assert layer.values[0, 0, :, 7].tolist() == [-1, -1, -2, -2, -2, 0]


def test_positions_beyond_the_capacity_are_refused(tiny_spec: Callable[..., ModelSpec]) -> None:
    cache = KVCache(tiny_spec(), 6, device=CPU, dtype=torch.float32)
    cache.length = 4
    cache.reserve(2)
    with pytest.raises(InputError, match=r"4 \+ 3 positions exceed its capacity 6; lower prompts.new_tokens"):
        cache.reserve(3)


def test_what_a_layer_caches() -> None:
    with pytest.raises(InputError, match="layer 0 uses gated_delta"):
        KVCache(load_preset("qwen3-next-80b-a3b"), 4, device=CPU, dtype=torch.float32)
    glm = load_preset("glm-5.2")
    owners = [layer for layer in range(glm.layers) if cache_shape(glm, layer) == (1, 576, 128)]
    assert owners == [0, 1, 2, *range(6, 78, 4)]
    assert isinstance(glm.attention, MLA)
    assert glm.attention.indexer is not None
    assert len(owners) == glm.attention.indexer.layers
    assert cache_shape(glm, 3) == (1, 576, 0)
    assert cache_shape(load_preset("mimo-v2.5-pro"), 1) == (8, 192, 128)

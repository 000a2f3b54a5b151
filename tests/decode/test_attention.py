from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from workbench.decode.attention import Attention, causal_mask
from workbench.decode.cache import LayerCache
from workbench.decode.layers import rope_table
from workbench.decode.spec import GQA
from workbench.errors import InputError

HIDDEN, SEQUENCE = 24, 20
ROPE = rope_table(64, 8, 10000.0)
VARIANTS = [
    pytest.param(window, sinks, qk_norm, id=f"window={window}-sinks={sinks}-qk_norm={qk_norm}")
    for window in (None, 1, 4, 50)
    for sinks in (False, True)
    for qk_norm in (False, True)
]


@pytest.fixture(scope="module")
def make(randomize: Callable[[nn.Module, int], None]) -> Callable[..., Attention]:
    def build(window: int | None, sinks: bool, qk_norm: bool) -> Attention:
        shape = GQA(heads=6, kv_heads=2, qk_dim=8, v_dim=4, bias=True, qk_norm=qk_norm, sinks=sinks)
        layer = Attention(HIDDEN, shape, window=window, eps=1e-6)
        randomize(layer, 3)
        return layer.requires_grad_(False)

    return build


def states(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(seed))


def new_cache(batch: int) -> LayerCache:
    # NaN: whatever is read without having been written shows.
    return LayerCache(torch.full((batch, 2, 64, 8), torch.nan), torch.full((batch, 2, 64, 4), torch.nan))


def one_by_one(layer: Attention, x: Tensor) -> Tensor:
    """Attention written out: one batch entry, one position, one head at a time."""
    shape = layer.shape
    batch, length = x.shape[:2]
    q = layer.queries(x, ROPE[:, :length])
    k, v = layer.keys_values(x, ROPE[:, :length])
    rows = torch.zeros(batch, length, shape.heads, shape.v_dim)
    for b in range(batch):
        for i in range(length):
            first = 0 if layer.window is None else max(0, i - layer.window + 1)
            for head in range(shape.heads):
                shared = head // (shape.heads // shape.kv_heads)
                scores = (k[b, first : i + 1, shared] @ q[b, i, head]) / shape.qk_dim**0.5
                weights = scores.exp()
                total = weights.sum()
                if layer.sinks is not None:
                    total = total + layer.sinks[head].exp()
                rows[b, i, head] = (weights / total) @ v[b, first : i + 1, shared]
    return layer.o(rows.flatten(2))


@pytest.mark.parametrize(("window", "sinks", "qk_norm"), VARIANTS)
def test_the_parallel_forward_is_attention(
    make: Callable[..., Attention], window: int | None, sinks: bool, qk_norm: bool
) -> None:
    layer, x = make(window, sinks, qk_norm), states(2, 9)
    torch.testing.assert_close(layer(x, ROPE[:, :9]), one_by_one(layer, x), rtol=1e-4, atol=1e-5)


@given(chunks=st.lists(st.integers(1, 8), min_size=1, max_size=8))
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize(("window", "sinks", "qk_norm"), VARIANTS)
def test_cached_chunks_of_any_size_equal_the_parallel_forward(
    make: Callable[..., Attention], window: int | None, sinks: bool, qk_norm: bool, chunks: list[int]
) -> None:
    layer, x = make(window, sinks, qk_norm), states(2, sum(chunks))
    expected = layer(x, ROPE[:, : sum(chunks)])
    cache, start = new_cache(2), 0
    for count in chunks:
        rows = slice(start, start + count)
        got = layer.cached(x[:, rows], ROPE[:, rows], cache, start)
        torch.testing.assert_close(got, expected[:, rows], rtol=1e-4, atol=1e-5)
        start += count


@given(steps=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("window", [None, 3])
def test_rejected_positions_leave_no_trace(
    make: Callable[..., Attention], window: int | None, steps: list[tuple[int, int]]
) -> None:
    layer = make(window, True, True)
    kept = sum(count for count, _ in steps)
    x = states(1, kept)
    expected = layer(x, ROPE[:, :kept])
    cache, start = new_cache(1), 0
    for step, (count, rejected) in enumerate(steps):
        fed = torch.cat((x[:, start : start + count], 100 * states(1, rejected, seed=step + 1)), dim=1)
        got = layer.cached(fed, ROPE[:, start : start + count + rejected], cache, start)
        torch.testing.assert_close(got[:, :count], expected[:, start : start + count], rtol=1e-4, atol=1e-5)
        start += count


def test_the_mask_of_the_last_queries() -> None:
    def rows(queries: int, keys: int, window: int | None) -> list[str]:
        mask = causal_mask(queries, keys, window, torch.device("cpu"))
        return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]

    assert rows(1, 1, None) == rows(1, 1, 1) == ["x"]
    assert rows(3, 3, None) == ["x..", "xx.", "xxx"]
    assert rows(2, 4, None) == ["xxx.", "xxxx"]
    assert rows(2, 4, 2) == [".xx.", "..xx"]
    assert rows(3, 3, 1) == ["x..", ".x.", "..x"]
    assert rows(2, 4, 4) == rows(2, 4, 99) == rows(2, 4, None)


def test_a_window_of_the_sequence_s_length_is_full_attention(make: Callable[..., Attention]) -> None:
    x = states(1, SEQUENCE)
    full = make(None, False, True)(x, ROPE[:, :SEQUENCE])
    torch.testing.assert_close(make(SEQUENCE, False, True)(x, ROPE[:, :SEQUENCE]), full)
    assert not torch.allclose(make(SEQUENCE - 1, False, True)(x, ROPE[:, :SEQUENCE]), full)


def test_an_output_gate_is_refused() -> None:
    shape = GQA(heads=2, kv_heads=1, qk_dim=8, v_dim=8, output_gate=True)
    with pytest.raises(InputError, match="output_gate"):
        Attention(HIDDEN, shape, window=None, eps=1e-6)

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decode.cache import LayerCache
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.presets import load_preset
from workbench.decode.spec import ModelSpec
from workbench.errors import InputError


@given(chunks=st.lists(st.integers(1, 6), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("window", [5, None])
def test_cached_rows_equal_the_parallel_forward(
    tiny_target: Callable[..., Target], tiny_mtp: Callable[..., MtpHead], window: int | None, chunks: list[int]
) -> None:
    target = tiny_target(0, window=window, mixers=("full", "full"))
    head, length = tiny_mtp(target), sum(chunks)
    state, token = torch.randn(2, 1, length, 32, generator=torch.Generator().manual_seed(length))
    cache = LayerCache(torch.zeros(1, 2, 40, 8), torch.zeros(1, 2, 40, 8))
    with torch.no_grad():
        expected = head(state, token, target.rope[:, :length])
        start = 0
        for count in chunks:
            rows = slice(start, start + count)
            got = head.cached(state[:, rows], token[:, rows], target.rope[:, rows], cache, start)
            torch.testing.assert_close(got, expected[:, rows], rtol=1e-4, atol=1e-5)
            start += count


def test_state_and_token_are_normed_apart(tiny_target: Callable[..., Target], tiny_mtp: Callable[..., MtpHead]) -> None:
    head = tiny_mtp(tiny_target(0))
    state, token = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    joined = head.join(state, token)
    torch.testing.assert_close(head.join(7 * state, 0.1 * token), joined, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(head.join(token, state), joined, atol=1e-2)


def test_a_shape_without_what_the_head_needs_is_refused(tiny_spec: Callable[..., ModelSpec]) -> None:
    for spec in (tiny_spec(mtp=None), tiny_spec(mtp={"modules": 1}), load_preset("deepseek-v3")):
        with pytest.raises(InputError, match=f"{spec.name}: an MTP head needs mtp.dense_inter"):
            MtpHead(spec)

"""GQA and MLA decode attention against float64 softmax."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import reference
from workbench.kernels.attention import AttentionConfig, default_config, default_splits, floor, gqa_decode
from workbench.kernels.merge import Merge, default_merge
from workbench.kernels.mla import MlaConfig, mla_decode
from workbench.kernels.reference import relative_error
from workbench.kernels.workspace import Workspace


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("merge", ["last", "launch"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dk", "dv", "kv_len", "window", "sinks", "causal", "splits"),
    [
        (1, 8, 2, 32, 32, 77, None, True, True, 5),
        (1, 8, 2, 32, 32, 77, None, False, True, 3),
        (4, 4, 2, 16, 32, 50, None, True, True, 1),
        (3, 4, 1, 192, 16, 40, 13, True, True, 2),
        (5, 2, 2, 16, 16, 45, 20, False, False, 4),
        (2, 2, 1, 16, 16, 2, None, True, True, 4),  # most parts are empty
    ],
)
def test_gqa(
    device: torch.device,
    bf16_tol: float,
    tokens: int,
    heads: int,
    kv_heads: int,
    dk: int,
    dv: int,
    kv_len: int,
    window: int | None,
    sinks: bool,
    causal: bool,
    splits: int,
    merge: Merge,
) -> None:
    capacity = kv_len + 9
    q, k, v = (
        randn(tokens, heads, dk, seed=1),
        randn(kv_heads, capacity, dk, seed=2),
        randn(kv_heads, capacity, dv, seed=3),
    )
    k[:, kv_len:] = float("nan")  # nothing past the context may be read into the sum
    v[:, kv_len:] = float("nan")
    sink = randn(heads, seed=4) if sinks else None
    workspace = Workspace(device)
    out = torch.full((tokens, heads, dv), float("nan"), dtype=torch.bfloat16, device=device)
    length = torch.tensor([kv_len], dtype=torch.int32, device=device)
    for _ in range(2):
        gqa_decode(
            q.to(device), k.to(device), v.to(device), length, scale=dk**-0.5, window=window,
            sinks=None if sink is None else sink.to(device), causal=causal, out=out, workspace=workspace,
            config=AttentionConfig(splits=splits, block=16, merge=merge),
        )  # fmt: skip
    want = reference.gqa(q, k, v, kv_len, scale=dk**-0.5, window=window, sinks=sink, causal=causal)
    assert relative_error(out, want) < 2 * bf16_tol


@pytest.mark.parametrize("merge", ["last", "launch"])
@pytest.mark.parametrize(
    ("tokens", "heads", "chosen", "splits"), [(1, 4, False, 3), (5, 7, False, 2), (2, 4, True, 2), (2, 20, True, 3)]
)
def test_mla(
    device: torch.device, bf16_tol: float, tokens: int, heads: int, chosen: bool, splits: int, merge: Merge
) -> None:
    rank, rope, kv_len = 128, 16, 50
    q, cache = randn(tokens, heads, rank + rope, seed=1), randn(kv_len + 3, rank + rope, seed=2)
    cache[kv_len:] = float("nan")
    indices = None
    if chosen:
        generator = torch.Generator().manual_seed(5)
        indices = torch.stack([torch.randperm(kv_len - tokens, generator=generator)[:20] for _ in range(tokens)])
        indices = torch.cat((indices, torch.full((tokens, 4), -1)), 1).to(torch.int32)
    want = reference.mla(q, cache, kv_len, rank=rank, scale=0.1, indices=indices)
    out = mla_decode(
        q.to(device), cache.to(device), torch.tensor([kv_len], dtype=torch.int32, device=device), rank=rank, scale=0.1,
        indices=None if indices is None else indices.to(device), config=MlaConfig(splits=splits, block=16, merge=merge),
    )  # fmt: skip
    assert relative_error(out, want) < 2 * bf16_tol


def test_splits_and_floor() -> None:
    assert default_splits(8, 8192, 64) == 16
    assert default_splits(8, 128, 64) == 1
    assert [default_config(rows, 64, 64).block for rows in (16, 32, 64)] == [128, 64, 64]
    assert default_config(128, 64, 64).block == 32
    assert (default_merge(4), default_merge(5)) == ("last", "launch")
    assert default_config(16, 128, 128).block == 64
    assert floor(1, 64, 8, 64, 64, 1000).bytes_read == 2 * 8 * 1000 * 128 + 2 * 64 * 64


def test_refusals(device: torch.device) -> None:
    q = torch.zeros(1, 6, 16, dtype=torch.bfloat16, device=device)
    kv = torch.zeros(4, 32, 16, dtype=torch.bfloat16, device=device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match="6 query heads are not a multiple of 4 KV heads"):
        gqa_decode(q, kv, kv, length, scale=1.0)
    with pytest.raises(InputError, match="head size 24"):
        gqa_decode(q.new_zeros(1, 4, 24), kv.new_zeros(4, 32, 24), kv, length, scale=1.0)
    with pytest.raises(InputError, match="window=0"):
        gqa_decode(q.new_zeros(1, 4, 16), kv, kv, length, scale=1.0, window=0)
    with pytest.raises(InputError, match="rank=24"):
        mla_decode(q.new_zeros(1, 4, 40), kv.new_zeros(8, 40), length, rank=24, scale=1.0)

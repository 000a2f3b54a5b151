"""RoPE, QK-norm and the cache write against float64."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels.reference import rotate
from workbench.kernels.rope import floor, rope_table, rope_write, rope_write_mla


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dk", "dv", "rot", "interleaved", "norm"),
    [(4, 2, 32, 32, 32, False, False), (2, 1, 48, 16, 16, True, True), (3, 3, 16, 16, 12, False, True)],
)
def test_rope_write(
    device: torch.device,
    bf16_tol: float,
    heads: int,
    kv_heads: int,
    dk: int,
    dv: int,
    rot: int,
    interleaved: bool,
    norm: bool,
) -> None:
    tokens, kv_len, capacity = 3, 11, 20
    qkv = randn(tokens, (heads + kv_heads) * dk + kv_heads * dv, seed=1)
    table = rope_table(capacity, rot, 10000.0)
    q_norm, k_norm = (randn(dk, seed=2), randn(dk, seed=3)) if norm else (None, None)
    k = torch.zeros(kv_heads, capacity, dk, dtype=torch.bfloat16, device=device)
    v = torch.zeros(kv_heads, capacity, dv, dtype=torch.bfloat16, device=device)
    q = rope_write(
        qkv.to(device), table.to(device), torch.tensor([kv_len], dtype=torch.int32, device=device), k, v, heads=heads,
        q_norm=None if q_norm is None else q_norm.to(device), k_norm=None if k_norm is None else k_norm.to(device),
        v_scale=0.5, interleaved=interleaved,
    )  # fmt: skip
    q_in, k_in, v_in = qkv.double().split((heads * dk, kv_heads * dk, kv_heads * dv), 1)
    q_in, k_in = q_in.view(tokens, heads, dk), k_in.view(tokens, kv_heads, dk)
    if q_norm is not None and k_norm is not None:
        q_in = q_in * (q_in.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * q_norm.double()
        k_in = k_in * (k_in.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * k_norm.double()
    positions = torch.arange(kv_len - tokens, kv_len)
    want_q, want_k = (
        rotate(q_in, table, positions, interleaved=interleaved),
        rotate(k_in, table, positions, interleaved=interleaved),
    )
    want_v = v_in.view(tokens, kv_heads, dv) * 0.5
    for got, want in (
        (q, want_q),
        (k[:, kv_len - tokens : kv_len].transpose(0, 1), want_k),
        (v[:, kv_len - tokens : kv_len].transpose(0, 1), want_v),
    ):
        assert float((got.double().cpu() - want).norm() / want.norm()) < bf16_tol
    assert not bool(k[:, : kv_len - tokens].any() | k[:, kv_len:].any())  # nothing else is touched


def test_rope_write_mla(device: torch.device, bf16_tol: float) -> None:
    tokens, heads, nope, rank, rope, kv_len = 2, 3, 24, 32, 16, 7
    kv, q, norm = randn(tokens, rank + rope, seed=1), randn(tokens, heads, nope + rope, seed=2), randn(rank, seed=3)
    table = rope_table(10, rope, 10000.0)
    cache = torch.zeros(10, rank + rope, dtype=torch.bfloat16, device=device)
    q_out = torch.zeros(tokens, heads, rank + rope, dtype=torch.bfloat16, device=device)
    length = torch.tensor([kv_len], dtype=torch.int32, device=device)
    rope_write_mla(kv.to(device), q.to(device), table.to(device), length, norm.to(device), cache, q_out)
    positions = torch.arange(kv_len - tokens, kv_len)
    latent = kv[:, :rank].double()
    latent = latent * (latent.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    key = rotate(kv[:, None, rank:].double(), table, positions, interleaved=True)[:, 0]
    want = torch.cat((latent, key), 1)
    got = cache[kv_len - tokens : kv_len].double().cpu()
    assert float((got - want).norm() / want.norm()) < bf16_tol
    want_q = rotate(q[..., nope:].double(), table, positions, interleaved=True)
    assert float((q_out[..., rank:].double().cpu() - want_q).norm() / want_q.norm()) < bf16_tol
    assert not bool(q_out[..., :rank].any())


def test_floor_and_refusals(device: torch.device) -> None:
    assert floor(1, 4, 1, 16, 16, 16).bytes_moved == 4 * 6 * 16 + 64
    k = torch.zeros(1, 8, 16, dtype=torch.bfloat16, device=device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match=r"qkv has shape \(1, 64\), needs \(1, 96\)"):
        rope_write(k.new_zeros(1, 64), rope_table(8, 16, 1e4, device), length, k, k, heads=4)
    with pytest.raises(InputError, match="table has 4 positions, the cache 8"):
        rope_write(k.new_zeros(1, 96), rope_table(4, 16, 1e4, device), length, k, k, heads=4)

"""What stands between MLA's projections and its attention, against float64."""

import pytest
import torch

from workbench.errors import InputError
from workbench.kernels import reference
from workbench.kernels.mla_project import floor, per_head, prepare
from workbench.kernels.rope import rope_table


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert reference.relative_error(got.cpu(), want) < tolerance


@pytest.mark.parametrize("dim", [0, 32])
@pytest.mark.parametrize("tokens", [1, 3])
def test_prepare(device: torch.device, bf16_tol: float, tokens: int, dim: int) -> None:
    q_lora, rank, rope, kv_len = 48, 32, 16, 9
    low = draw(tokens, q_lora + rank + rope + dim + 5)
    q_norm, kv_norm, weight, bias = draw(q_lora), draw(rank), draw(max(dim, 1)), draw(max(dim, 1), seed=1)
    table = rope_table(20, rope, 1e4)
    cache, slab = torch.zeros(20, rank + rope).bfloat16(), torch.zeros(20, max(dim, 1)).bfloat16()
    on_device = [part.to(device) for part in (low, table, q_norm, kv_norm, cache, weight, bias, slab)]
    low_d, table_d, q_norm_d, kv_norm_d, cache_d, *index = on_device
    q = prepare(
        low_d,
        table_d,
        torch.tensor([kv_len], dtype=torch.int32, device=device),
        q_norm_d,
        kv_norm_d,
        cache_d,
        eps=1e-6,
        index=(index[0], index[1], index[2]) if dim else None,
    )
    parts = low.double().split([q_lora, rank, rope, dim, 5], 1)
    close(q, reference.rms_norm(parts[0], q_norm, 1e-6), bf16_tol)
    new = slice(kv_len - tokens, kv_len)
    positions = torch.arange(kv_len - tokens, kv_len)
    close(cache_d[new, :rank], reference.rms_norm(parts[1], kv_norm, 1e-6), bf16_tol)
    turned = reference.rotate(parts[2][:, None], table, positions, interleaved=False)[:, 0]
    close(cache_d[new, rank:], turned, bf16_tol)
    assert not cache_d[: kv_len - tokens].any()
    assert not cache_d[kv_len:].any()
    if dim:
        normed = torch.nn.functional.layer_norm(parts[3], (dim,), weight.double(), bias.double(), 1e-6)
        close(index[2][new], reference.rotate(normed[:, None], table, positions, interleaved=False)[:, 0], bf16_tol)


@pytest.mark.parametrize(("tokens", "rows", "columns", "rope"), [(1, 64, 32, 16), (3, 48, 48, 0), (5, 40, 64, 16)])
def test_per_head(device: torch.device, bf16_tol: float, tokens: int, rows: int, columns: int, rope: int) -> None:
    heads, kv_len = 3, 11
    x, w = draw(tokens, heads * (columns + rope) + 7), draw(heads, rows, columns)
    table = rope_table(16, max(rope, 2), 1e4)
    rotate = (table.to(device), torch.tensor([kv_len], dtype=torch.int32, device=device)) if rope else None
    y = per_head(x.to(device), w.to(device), rotate=rotate)
    assert y.shape == (tokens, heads, rows + rope)
    mine = x[:, : heads * (columns + rope)].view(tokens, heads, -1).double()
    close(y[..., :rows], torch.einsum("thk,hnk->thn", mine[..., :columns], w.double()), bf16_tol)
    if rope:
        positions = torch.arange(kv_len - tokens, kv_len)
        turned = reference.rotate(mine[..., columns:], table, positions, interleaved=False)
        close(y[..., rows:], turned, bf16_tol)


def test_floor_and_refusals(device: torch.device) -> None:
    assert floor(1, 8, 512, 192).bytes_moved == 2 * 8 * (512 * 192 + 192 + 512)
    x, w = draw(1, 40).to(device), draw(2, 16, 20).to(device)
    with pytest.raises(InputError, match="K=20 is not a multiple of 16"):
        per_head(x, w)
    with pytest.raises(InputError, match="x has 40 columns, needs at least 64"):
        per_head(x, draw(2, 16, 32).to(device))
    kv_len = torch.ones(1, dtype=torch.int32, device=device)
    norm, table = draw(16).to(device), rope_table(4, 16, 1e4, device)
    with pytest.raises(InputError, match="low has 40 columns, needs at least 48"):
        prepare(x, table, kv_len, norm, norm, torch.zeros(4, 32, device=device).bfloat16(), eps=1e-6)

import math

import pytest
import torch
from torch.nn import functional as F

from workbench.decode.layers import RMSNorm, SwiGLU, rope_table, rotate


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(4, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([3.0, 4.0, 0.0, 0.0])  # root mean square 2.5
    assert norm(x).tolist() == pytest.approx([1.2, 3.2, 0.0, 0.0])
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    table = rope_table(8, 4, theta=100.0)
    assert table.shape == (2, 8, 2)
    x = torch.tensor([1.0, 0.0, 0.0, 2.0])  # pairs (x0, x2) and (x1, x3)
    turned = rotate(x.view(1, 1, 1, 4), table[:, 3:4]).flatten().tolist()
    slow = 3 * 100.0**-0.5
    assert turned == pytest.approx([math.cos(3), -2 * math.sin(slow), math.sin(3), 2 * math.cos(slow)], abs=1e-6)


def test_products_of_rotated_vectors_depend_on_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, generator=generator)
    table = rope_table(40, 16, theta=10000.0)

    def product(at: int, other: int) -> float:
        left, right = rotate(q.view(1, 1, 16), table[:, [at]]), rotate(k.view(1, 1, 16), table[:, [other]])
        return float((left * right).sum())

    assert product(30, 25) == pytest.approx(product(7, 2), abs=1e-5)
    assert product(30, 25) != pytest.approx(product(30, 24), abs=1e-3)


def test_swiglu_is_gate_first() -> None:
    layer = SwiGLU(8, 16)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    gate, up = layer.gate_up.weight[:16], layer.gate_up.weight[16:]
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), expected)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from workbench.decode.train.muon import Muon, orthogonalize, split_parameters


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), scale=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=40, deadline=None)
def test_singular_values_come_near_one_whatever_the_shape_and_scale(rows: int, columns: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    # Known singular values, a factor of 30 apart: that is what five iterations are made for.
    size = min(rows, columns)
    u = torch.linalg.qr(torch.randn(rows, size, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, size, generator=generator)).Q
    matrix = u * torch.linspace(1 / 30, 1, size) @ v.mT * scale
    result = orthogonalize(matrix)
    values = torch.linalg.svdvals(result)
    assert result.shape == matrix.shape
    assert float(values.max()) < 1.3
    assert float(values.min()) > 0.3
    # Only the singular values change, not the directions they belong to.
    torch.testing.assert_close(u.mT @ result @ v, (u.mT @ result @ v).diagonal().diag(), rtol=0, atol=1e-3)


def test_a_stack_is_orthogonalised_matrix_by_matrix() -> None:
    stack = torch.randn(5, 12, 20, generator=torch.Generator().manual_seed(0))
    stack[3] *= 100
    torch.testing.assert_close(orthogonalize(stack), torch.stack([orthogonalize(matrix) for matrix in stack]))
    torch.testing.assert_close(orthogonalize(stack.mT), orthogonalize(stack).mT, rtol=1e-4, atol=1e-5)


def test_a_zero_update_stays_zero() -> None:
    assert orthogonalize(torch.zeros(4, 6)).equal(torch.zeros(4, 6))


def test_a_step_is_nesterov_momentum_orthogonalised_with_decoupled_decay() -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.randn(6, 4, generator=generator))
    optimizer = Muon([parameter], lr=0.1, momentum=0.9, weight_decay=0.5)
    value, momentum = parameter.detach().clone(), torch.zeros(6, 4)
    for _ in range(3):
        gradient = torch.randn(6, 4, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        update = orthogonalize(0.1 * gradient + 0.9 * momentum)
        value = value * (1 - 0.1 * 0.5) - 0.1 * 0.2 * 6**0.5 * update
        torch.testing.assert_close(parameter.detach(), value)
        assert parameter.grad.equal(gradient)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    Muon([parameter], lr=1.0).step()
    assert parameter.detach().equal(torch.ones(3, 3))


def test_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    names = {
        "embed.weight": 2,
        "head.weight": 2,
        "ffn.router.weight": 2,
        "norm.weight": 1,
        "attention.sinks": 1,
        "attention.q.bias": 1,
        "attention.q.weight": 2,
        "ffn.gate_up": 3,
    }
    named = [(name, torch.zeros((2,) * dims)) for name, dims in names.items()]
    matrices, rest = split_parameters(named)
    identity = {id(tensor): name for name, tensor in named}
    assert [identity[id(tensor)] for tensor in matrices] == ["attention.q.weight", "ffn.gate_up"]
    assert len(rest) == 6


def test_a_rate_that_is_a_tensor_counts_as_its_number() -> None:
    def distance(lr: float | torch.Tensor) -> list[float]:
        parameter, wanted = nn.Parameter(torch.full((4, 4), 3.0)), torch.eye(4)
        optimizer = Muon([parameter], lr=lr, weight_decay=0.0)
        distances = []
        for _ in range(30):
            distances.append(float((parameter.detach() - wanted).norm()))
            optimizer.zero_grad()
            (parameter - wanted).pow(2).sum().backward()
            optimizer.step()
        return distances

    distances = distance(0.3)
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] - 2
    assert distance(torch.tensor(0.3)) == pytest.approx(distances)

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from workbench.decode import experts
from workbench.decode.experts import Experts
from workbench.decode.mxfp4 import dequantize, quantize
from workbench.decode.spec import MoE

HIDDEN, INTER, EXPERTS, TOP_K = 32, 64, 6, 3


@pytest.fixture(
    params=[(False, "swiglu"), (True, "swiglu"), (True, "clamped-swiglu")], ids=["plain", "bias", "clamped"]
)
def layer(request: pytest.FixtureRequest, randomize: Callable[[nn.Module, int], None]) -> Experts:
    bias, activation = request.param
    shape = MoE(experts=EXPERTS, top_k=TOP_K, inter=INTER, bias=bias, activation=activation)
    built = Experts(HIDDEN, shape)
    randomize(built, 5)
    return built


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def token_by_token(layer: Experts, x: Tensor) -> Tensor:
    """The mixture written out: every token, every chosen expert."""
    _, weights, indices = layer.route(x)
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        for weight, expert in zip(weights[token], indices[token].tolist(), strict=True):
            both = layer.gate_up[expert] @ row
            if layer.gate_up_bias is not None:
                both = both + layer.gate_up_bias[expert]
            gate, up = both[:INTER], both[INTER:]
            if layer.shape.activation == "swiglu":
                act = gate / (1 + torch.exp(-gate)) * up
            else:  # gpt-oss
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                act = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
            part = layer.down[expert] @ act
            if layer.down_bias is not None:
                part = part + layer.down_bias[expert]
            out[token] += weight * part
    return out


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_all_ways_to_run_the_experts_agree(layer: Experts, count: int) -> None:
    x = 5 * tokens(count)  # far enough to be clamped
    _, weights, indices = layer.route(x)
    expected = token_by_token(layer, x)
    dense = torch.zeros(count, EXPERTS).scatter(-1, indices, weights)
    for got in (
        layer._by_expert(x, weights, indices),
        layer._gathered(x, weights, indices),
        layer._all(x, dense, layer.gate_up, layer.down),
        layer(x[None])[0][0],
        layer.chosen(x)[0],
        layer.fixed(x)[0],
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    layer.groups = torch.arange(EXPERTS)
    for got in (layer.chosen(x)[0], layer.fixed(x)[0]):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_grouped_experts_neither_gather_nor_loop(layer: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    layer.groups = torch.arange(EXPERTS)
    for other in ("_gathered", "_by_expert", "_all", "rows"):
        monkeypatch.delattr(Experts, other)
    few, indices = layer.chosen(tokens(3))
    assert torch.equal(few, layer.fixed(tokens(3))[0])
    assert indices.shape == (3, TOP_K)
    layer.chosen(tokens(300))


def test_many_tokens_run_all_experts(layer: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(9)
    few, indices = layer.chosen(x)
    monkeypatch.setattr(experts, "MANY_TOKENS", 8)
    monkeypatch.delattr(Experts, "_by_expert")
    many, same = layer.chosen(x)
    torch.testing.assert_close(many, few, rtol=1e-4, atol=1e-5)
    assert same.equal(indices)


def test_routing_takes_the_most_likely_experts_and_renormalises(layer: Experts) -> None:
    probabilities, weights, indices = layer.route(tokens(50))
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(50))
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    for row, chosen, weight in zip(probabilities, indices, weights, strict=True):
        assert len(set(chosen.tolist())) == TOP_K
        assert set(chosen.tolist()) == set(row.argsort(descending=True)[:TOP_K].tolist())
        torch.testing.assert_close(weight, row[chosen] / row[chosen].sum())


def test_the_router_is_computed_in_float32(layer: Experts) -> None:
    layer.to(torch.bfloat16)
    probabilities, _, _ = layer.route(tokens(4).bfloat16())
    assert probabilities.dtype == torch.float32


def test_simulated_quantisation_gives_the_stored_weights_output_and_a_gradient(layer: Experts) -> None:
    x = tokens(12)[None]
    plain, _ = layer(x)
    layer.quantize_forward = True
    simulated, _ = layer(x)
    assert not torch.allclose(simulated, plain, atol=1e-3)
    simulated.sum().backward()
    assert layer.gate_up.grad is not None
    assert layer.gate_up.grad.abs().sum() > 0
    stored = Experts(HIDDEN, layer.shape)
    stored.load_state_dict(layer.state_dict())
    with torch.no_grad():
        stored.gate_up.copy_(dequantize(quantize(layer.gate_up)))
        stored.down.copy_(dequantize(quantize(layer.down)))
    torch.testing.assert_close(stored(x)[0], simulated)
    layer.quantize_forward = False
    torch.testing.assert_close(layer(x)[0], plain)


def test_the_balance_loss_is_one_for_uniform_routing_and_more_for_a_favourite() -> None:
    layer = Experts(HIDDEN, MoE(experts=EXPERTS, top_k=1, inter=32))
    x = tokens(20).abs()[None]
    with torch.no_grad():
        layer.router.weight.zero_()
    assert float(layer(x)[1].detach()) == pytest.approx(1)
    with torch.no_grad():
        layer.router.weight[2] = 100
    assert float(layer(x)[1].detach()) == pytest.approx(EXPERTS)

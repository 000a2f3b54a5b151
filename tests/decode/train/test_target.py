import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.experts import Experts
from workbench.decode.model import Target
from workbench.decode.spec import ModelSpec
from workbench.decode.train.target import (
    TargetWithMtp,
    cross_entropy,
    evaluate,
    initialize,
    set_quantization,
    train_target,
)


def stream(path: Path, name: str, tokens: int) -> None:
    np.save(path / f"{name}.npy", np.tile(np.arange(1, 9, dtype=np.uint16), tokens // 8))


@pytest.fixture
def model(tiny_spec: Callable[..., ModelSpec]) -> TargetWithMtp:
    torch.manual_seed(0)
    model = TargetWithMtp(Target(tiny_spec()))
    initialize(model)
    return model


def test_cross_entropy_is_the_mean_of_minus_log_probability() -> None:
    logits = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
    expected = (np.log(2) - (1 - np.log(np.e + 1))) / 2
    assert float(cross_entropy(logits, torch.tensor([[0, 0]]))) == pytest.approx(expected)


def test_each_mtp_depth_is_scored_on_the_token_it_must_predict(
    tiny_target: Callable[..., Target], randomize: Callable[[torch.nn.Module, int], None]
) -> None:
    model = TargetWithMtp(tiny_target(0))
    randomize(model, 4)
    target = model.target
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        main, depths, balance = model.losses(tokens, unroll=3)
        hidden, _, expected_balance = target(tokens)

        def nats(states: Tensor, ahead: int) -> float:
            rows = [
                -F.log_softmax(target.logits(states[b, i]), -1)[tokens[b, i + ahead]]
                for b in range(2)
                for i in range(12 - ahead)
            ]
            return float(torch.stack(rows).mean())

        assert float(main) == pytest.approx(nats(hidden, 1), rel=1e-4)
        state = hidden
        for depth in (1, 2, 3):
            # Row i holds what depth - 1 knows of position i, and the true token i + depth.
            state = state[:, : 12 - depth]
            state = model.mtp(state, target.embed(tokens[:, depth:]), target.rope[:, : 12 - depth])
            assert float(depths[depth - 1]) == pytest.approx(nats(state, depth + 1), rel=1e-4)
    assert balance.equal(expected_balance)


def test_layers_start_as_the_identity(model: TargetWithMtp) -> None:
    tokens = torch.randint(64, (1, 6))
    with torch.no_grad():
        hidden, _, _ = model.target(tokens)
        assert hidden.equal(model.target.embed(tokens))
    assert float(model.target.embed.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(model.target.blocks[0].ffn.gate_up.detach().abs().sum()) > 0


def test_quantisation_is_switched_in_every_expert_layer(model: TargetWithMtp) -> None:
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    assert len(layers) == 2
    for on in (True, False):
        set_quantization(model.target, on)
        assert [layer.quantize_forward for layer in layers] == [on, on]


def test_the_loss_of_a_stream_that_repeats_falls(model: TargetWithMtp, tmp_path: Path) -> None:
    stream(tmp_path, "train", 800)
    stream(tmp_path, "held_out", 400)
    train_target(model, tmp_path, tmp_path, steps=60, minutes=float("inf"), batch=8, length=16, rate=2e-2, seed=0)
    (row,) = [json.loads(line) for line in (tmp_path / "target.log.jsonl").read_text().splitlines()]
    assert row["step"] == 60
    start = np.log(64)  # a uniform guess
    assert row["held_out"] < start / 2
    assert all(loss < start / 2 for loss in row["held_out_mtp"])
    assert len(row["mtp"]) == 3
    assert row["balance"] > 0
    assert all(layer.quantize_forward for layer in model.modules() if isinstance(layer, Experts))
    tokens = torch.arange(16)[None] % 8 + 1
    again = evaluate(model, [tokens, tokens])
    assert float(again["held_out"]) < start / 2  # type: ignore[arg-type]

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workbench.decode.train.loop import Batches, Budget, Trainer, learning_rate
from workbench.errors import InputError

CPU = torch.device("cpu")


def test_the_budget_is_used_by_steps_or_by_time_whichever_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = Budget(steps=10, minutes=2, started=now)
    assert budget.progress(3) == pytest.approx(0.3)
    now += 60
    assert budget.progress(3) == pytest.approx(0.5)
    assert budget.progress(8) == pytest.approx(0.8)
    now += 600
    assert budget.progress(3) == 1
    assert Budget(steps=10).progress(11) == 1


def test_the_rate_warms_up_stays_and_decays_to_nothing() -> None:
    assert [learning_rate(0, step, warmup=4) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    assert learning_rate(0.4, 1000) == 1
    assert learning_rate(0.7, 1000) == pytest.approx(0.5)
    assert learning_rate(1.0, 1000) == 0


def test_crops_come_from_everywhere_in_the_stream_and_follow_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(12, dtype=np.uint16))
    batches = Batches(path, 10, 64, CPU, seed=3)
    batch = next(batches)
    assert batch.dtype == torch.int64
    assert batch.shape == (64, 10)
    assert (batch.diff(dim=1) == 1).all()
    assert set(batch[:, 0].tolist()) == {0, 1, 2}
    assert not next(batches).equal(batch)
    batches.generator.manual_seed(3)
    assert next(batches).equal(batch)
    assert (next(iter(Batches(path, 12, 2, CPU, seed=0))) == torch.arange(12)).all()


def test_a_stream_shorter_than_a_crop_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(5, dtype=np.uint16))
    with pytest.raises(InputError, match=r"tokens\.npy: 5 tokens are fewer than one crop of 6; lower --length"):
        Batches(path, 6, 2, CPU, seed=0)


class Net(nn.Module):
    """A matrix for Muon, a bias for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        error = self.layer(x) - x.flip(-1) - 1
        return error.pow(2).mean(), error.abs().amax()


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def trainer(folder: Path, net: Net, steps: int = 40) -> Trainer:
    return Trainer(net, net.loss, rate=0.3, budget=Budget(steps), folder=folder, name="net")


def test_a_resumed_training_is_the_one_that_was_never_stopped(tmp_path: Path) -> None:
    whole, whole_net = tmp_path / "whole", Net()
    runner = trainer(whole, whole_net)
    for step in range(40):
        loss, _ = runner.update(batch(step))
        runner.log(loss=float(loss))
    assert float(loss) < 0.5 < json.loads((whole / "net.log.jsonl").read_text().splitlines()[0])["loss"]

    first = trainer(tmp_path / "parts", Net())
    assert not first.resume()
    for step in range(17):
        first.log(loss=float(first.update(batch(step))[0]))
    first.save()
    for step in range(17, 23):  # what a killed process did after its last checkpoint
        first.log(loss=float(first.update(batch(step))[0]))
    net = Net()
    second = trainer(tmp_path / "parts", net)
    assert second.resume()
    assert second.step == 17
    for step in range(17, 40):
        second.log(loss=float(second.update(batch(step))[0]))
    assert (tmp_path / "parts" / "net.log.jsonl").read_text() == (whole / "net.log.jsonl").read_text()
    for name, tensor in net.state_dict().items():
        assert tensor.equal(whole_net.state_dict()[name]), name
    assert not list((tmp_path / "parts").glob("*.partial"))


def test_a_training_from_the_start_drops_the_log_of_another(tmp_path: Path) -> None:
    (tmp_path / "net.log.jsonl").write_text('{"step": 9}\n')
    assert not trainer(tmp_path, Net()).resume()
    assert not (tmp_path / "net.log.jsonl").exists()


def test_gradients_are_clipped(tmp_path: Path) -> None:
    net = Net()
    trainer(tmp_path, net).update(1e6 * batch(0))
    total = sum(float(parameter.grad.pow(2).sum()) for parameter in net.parameters() if parameter.grad is not None)
    assert total**0.5 == pytest.approx(1, rel=1e-3)


def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, Net()).save()
    other = nn.Linear(3, 3)
    with pytest.raises(InputError, match=r"net\.checkpoint\.safetensors: does not fit .*; delete it") as error:
        Trainer(other, lambda: (), rate=1, budget=Budget(1), folder=tmp_path, name="net").resume()
    assert "\n" not in str(error.value)
    (tmp_path / "net.checkpoint.safetensors").write_bytes(b"cut off")
    with pytest.raises(InputError, match=r"net\.checkpoint\.safetensors: does not fit"):
        trainer(tmp_path, Net()).resume()

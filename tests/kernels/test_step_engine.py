"""What the engines of persistent steps share, with a kernel that only notes what it is asked."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import step_engine
from workbench.kernels.step_engine import FLAGS_AT, OneTokenEngine, allocate, load_step, refuse

CPU = torch.device("cpu")


@dataclass
class Buffers:
    logits: torch.Tensor = field(default_factory=lambda: torch.zeros(16))
    routing: torch.Tensor = field(default_factory=lambda: torch.zeros(2, 4, dtype=torch.int32))
    state: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int32))
    sync: torch.Tensor = field(default_factory=lambda: torch.zeros(8, dtype=torch.int32))
    words: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))


class Noted(OneTokenEngine):
    def __init__(self) -> None:
        numbers: Any = type("Numbers", (), {"vocab": 16, "grid": 4, "threads": 64})
        self.device, self.shape, self.plan, self.capacity = CPU, numbers, numbers, 8
        self.buffers = Buffers()


def test_a_start_is_what_the_state_says() -> None:
    engine = Noted()
    engine.start(15, 7)
    assert engine.state() == (15, 7)
    assert engine.logits is engine.buffers.logits
    assert engine.routing is engine.buffers.routing


@pytest.mark.parametrize(
    ("token", "position", "message"),
    [(16, 0, "token must be 0 to 15, not 16"), (0, 8, "position must be 0 to 7, not 8")],
)
def test_a_start_outside_is_refused(token: int, position: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Noted().start(token, position)


def test_an_error_resets_the_engine_and_is_said_once() -> None:
    engine = Noted()
    engine.check()
    engine.buffers.sync[FLAGS_AT] = 1 | 4
    engine.buffers.sync[0] = 3
    with pytest.raises(UnfitError, match=r"decode step: a grid barrier timed out, the token is outside the vocabulary"):
        engine.check()
    assert not engine.buffers.sync.any()
    engine.check()


def test_no_flags_are_no_error() -> None:
    refuse(0)
    with pytest.raises(UnfitError, match="number of tokens"):
        refuse(8)


def test_memory_that_runs_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    assert allocate("cache", (2, 3), torch.bfloat16, CPU).tolist() == [[0.0] * 3] * 2
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(UnfitError, match="cache: 48 bytes do not fit the memory of cpu"):
        allocate("cache", (2, 3, 4), torch.bfloat16, CPU)


def test_ctas_that_cannot_all_be_resident_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        def __init__(self, _: object, *, smem_bytes: int) -> None:
            self.smem_bytes = smem_bytes

        def ctas_per_sm(self, threads: int) -> int:
            return 0 if threads > 64 else 1

    monkeypatch.setattr(step_engine.nvrtc, "Kernel", Large)
    cubin: Any = object()
    with pytest.raises(UnfitError, match="133 CTAs cannot be co-resident on 132 multiprocessors"):
        load_step(cubin, 133, 64, 1024, 132)
    with pytest.raises(UnfitError, match="one CTA of 96 threads, 1024 bytes does not fit a multiprocessor"):
        load_step(cubin, 132, 96, 1024, 132)
    assert load_step(cubin, 132, 64, 1024, 132).smem_bytes == 1024

"""A small scenario on the CPU, open bundles, and instruments that do as they are told."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from workbench import runner
from workbench.decode.engine import StepRecord
from workbench.probes.protocol import Capture, Missing
from workbench.quantity import Quantity
from workbench.run.state import Run
from workbench.scenario import Scenario, parse_scenario
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

SHAPE = """
name = "tiny"
hidden = 32
vocab = 16
layer_pattern = "sliding full"
window = 5
tied_head = true
max_positions = 128
attention = { kind = "gqa", heads = 4, kv_heads = 2, qk_dim = 8, v_dim = 8 }
moe = { experts = 4, top_k = 2, inter = 32 }
"""
SCENARIO = """
name = "small"
model = { shape = "tiny.toml", weights = "random" }
precision = { policy = "bf16" }
engine = { device = "cpu" }
prompts = { file = "prompts.jsonl", count = 2, new_tokens = 8 }
measure = { repetitions = 1, warmup_steps = 1, traced_steps = 5 }
instruments = { sampled_steps = 4 }
[[matrix]]
name = "a"
[[matrix]]
name = "b"
"""

MakeScenario = Callable[..., Scenario]


@pytest.fixture(scope="session")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> MakeScenario:
    """``scenario(*settings)``: two variants of a tiny model, changed by TOML settings."""
    folder = tmp_path_factory.mktemp("scenario")
    (folder / "tiny.toml").write_text(SHAPE)
    (folder / "prompts.jsonl").write_text('{"id": "a", "text": "some text here"}\n{"id": "b", "text": "other words"}\n')
    return lambda *settings: parse_scenario(SCENARIO, source="small.toml", folder=folder, overrides=settings)


@pytest.fixture(autouse=True)
def roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roof, without the second that measuring it takes."""
    monkeypatch.setattr(runner, "measure_read_roof", lambda device: Quantity(12.5, "GB/s", "measured", note="made up"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    manifest = Manifest(variants=[VariantRecord(name="a"), VariantRecord(name="b")])
    with BundleWriter.create(tmp_path / "bundle", manifest) as writer:
        yield Run(writer, lambda *_: None)


MakeStep = Callable[..., StepRecord]


@pytest.fixture
def make_step() -> MakeStep:
    """``make_step(start)``: a step of 10 ns drafting, 20 ns forward, 5 ns verification."""

    def make(start: int, *, draft: int = 10, forward: int = 20, verify: int = 5) -> StepRecord:
        ends = start + draft, start + draft + forward, start + draft + forward + verify
        return StepRecord(start, *ends, context=3, width=1, drafted=0, accepted=0, tokens=(1,), experts=(2, 2))

    return make


class FakeProbe:
    """Logs its calls; ``fail`` names the one that raises, ``capture`` is what it saw, ``lacking``: not available."""

    def __init__(
        self, name: str, log: list[str], capture: Capture | None = None, *, fail: str = "", lacking: bool = False
    ) -> None:
        self.name, self._log, self._capture, self._fail = name, log, capture or Capture({}), fail
        self._lacking = lacking

    def _note(self, what: str) -> None:
        self._log.append(f"{self.name} {what}")
        if what == self._fail:
            raise RuntimeError(f"{what} went wrong\nand more")

    def available(self) -> Missing | None:
        self._note("available")
        return Missing(self.name, "its signal", "not on this machine") if self._lacking else None

    def start(self) -> None:
        self._note("start")

    def annotate(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def collect(self) -> None:
        self._note("collect")

    def stop(self) -> Capture:
        self._note("stop")
        return self._capture


@pytest.fixture
def fake_probe() -> type[FakeProbe]:
    return FakeProbe


@pytest.fixture
def counter() -> Callable[..., dict[str, Any]]:
    """``counter(name, start, end, value)``: a row of table counters."""

    def make(name: str, start: int, end: int, value: float) -> dict[str, Any]:
        row = {"source": "pm_sampler", "name": name, "device": 0, "start_ns": start, "end_ns": end, "value": value}
        return {**row, "unit": "share"}

    return make

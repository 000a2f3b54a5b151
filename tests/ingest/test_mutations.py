"""A thousand mutated traces; ``python -m tests.ingest.mutate`` runs more."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PER_TEST, TESTS = 100, 10


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    path = Path(__file__).with_name("mutate.py")
    spec = importlib.util.spec_from_file_location("ingest_mutate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("first", range(0, PER_TEST * TESTS, PER_TEST))
def test_mutated_traces_break_no_promise(mutations: ModuleType, first: int, tmp_path: Path) -> None:
    outcomes = mutations.run(PER_TEST, first, keep=tmp_path)
    assert outcomes["read"] + outcomes["lossy"] + outcomes["refused"] == PER_TEST
    assert min(outcomes["read"], outcomes["lossy"]) >= 5


def test_a_reader_that_loses_events_without_a_word_is_caught(
    mutations: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("workbench.ingest.json_stream.EventReader._lose", lambda *_, **__: None)
    monkeypatch.setattr("workbench.ingest.losses.Losses.add", lambda *_, **__: None)
    with pytest.raises(mutations.BrokenPromiseError, match=r"no loss stated|counted as left out"):
        mutations.run(200, keep=tmp_path)

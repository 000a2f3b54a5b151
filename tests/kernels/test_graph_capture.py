"""What a CUDA graph is captured within: Python's collector rests, since a graph that it destroys ends the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from workbench.kernels.graph_capture import capturing


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for torch.cuda.graph; the graphs and pools that it was given, in order."""
    given: list[Any] = []

    @contextmanager
    def graph(cuda_graph: Any, pool: Any = None) -> Iterator[None]:
        given.append((cuda_graph, pool))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return given


class Cyclic:
    """Only the collector can end it: it refers to itself."""

    def __init__(self, ended: list[bool]) -> None:
        self.itself = self
        self.ended = ended

    def __del__(self) -> None:
        self.ended.append(gc.isenabled())


def allocate() -> None:
    """Make more containers than the collector's thresholds, so that it runs wherever it may."""
    for _ in range(20):
        _ = [[] for _ in range(2000)]


def test_nothing_is_collected_within(no_gpu: list[Any]) -> None:
    graph: Any = object()
    ended: list[bool] = []
    Cyclic(ended)
    with capturing(graph, pool="pool"):
        allocate()
        assert ended == []
    assert no_gpu == [(graph, "pool")]
    allocate()
    gc.collect()
    assert ended == [True]


def test_the_collector_is_as_before(no_gpu: list[Any]) -> None:
    graph: Any = object()
    with pytest.raises(ValueError, match="refused"), capturing(graph):
        raise ValueError("refused")
    assert gc.isenabled()
    gc.disable()
    try:
        with capturing(graph):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
def test_an_older_graph_in_a_cycle() -> None:
    data = torch.zeros(8, device="cuda")
    older: list[Any] = [torch.cuda.CUDAGraph()]
    with capturing(older[0]):
        data.add_(1.0)
    older[0].replay()
    older.append(older)
    del older
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        data.add_(1.0)
        allocate()
    graph.replay()
    torch.cuda.synchronize()
    assert data.tolist() == [2.0] * 8

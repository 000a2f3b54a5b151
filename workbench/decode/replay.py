"""Work of fixed shapes, captured as CUDA graphs: enqueued by one call of the host instead of one for each kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.kernels.graph_capture import capturing

Work = Callable[[], None]


def captured(works: Sequence[Sequence[Work]], device: torch.device, *, reset: Work) -> list[list[Work]]:
    """Return what replays ``works``: lists of pieces, of which each is run in order.

    All of it is run twice before, so that kernels are compiled and scratch memory has its size; ``reset`` goes before
    every list, since works move positions on. It must leave the device as a first run should find it, and is called
    last too. No piece may wait for the device. Pieces of one list share a memory pool and must be replayed in their
    order: what one hands on stays untouched.
    """
    stream: Any = torch.cuda.Stream  # untyped in torch
    side = stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for pieces in (*works, *works):
            reset()
            for piece in pieces:
                piece()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    replays: list[list[Work]] = []
    for pieces in works:
        graphs: list[torch.cuda.CUDAGraph] = []
        for piece in pieces:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, pool=graphs[0].pool() if graphs else None):
                piece()
            graphs.append(graph)
        replays.append([graph.replay for graph in graphs])
    reset()
    return replays

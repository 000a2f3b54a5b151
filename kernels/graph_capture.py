"""Capturing launches as a CUDA graph, with Python's garbage collector at rest meanwhile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is launched within as ``graph``, its memory from ``pool`` (of another graph), like torch.cuda.graph.

    No cycle of objects is collected within. An older CUDAGraph may be part of one, and destroying a graph while
    another is captured is an error that CUDA reports from a destructor: it ends the process. torch itself collects
    before a capture only where ``torch.compiler.config.force_cudagraph_gc`` says so, and never rests the collector.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if enabled:
            gc.enable()

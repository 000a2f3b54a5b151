"""Times of launches on the current stream, and the read roof that they are held against."""

import ctypes
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from workbench.kernels import nvrtc
from workbench.kernels.budget import wait
from workbench.kernels.graph_capture import capturing


def measure(replay: Callable[[], None], *, repeats: int = 15, warm: int = 3) -> list[float]:
    """Microseconds of each of ``repeats`` calls, by events."""
    for _ in range(warm):
        replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        wait("timing")
        times.append(start.elapsed_time(end) * 1e3)
    return times


def read_roof() -> dict[str, Any]:
    """The best read bandwidth of a plain streaming kernel over 6 GiB, bytes a second."""
    data = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
    data.view(torch.int32).random_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    rows = []
    for unroll in (4, 8):
        kernel = nvrtc.Kernel(nvrtc.compile_kernel("read_roof.cu", "read_roof", {"UNROLL": unroll}))
        for ctas in (264, 528, 1056, 2112):
            args: list[nvrtc.Argument] = [
                ctypes.c_void_p(data.data_ptr()),
                ctypes.c_ulonglong(data.numel() // 16),
                ctypes.c_void_p(sink.data_ptr()),
            ]
            stream = torch.cuda.current_stream().cuda_stream
            times = measure(functools.partial(kernel.launch, ctas, 512, stream, args), repeats=5, warm=1)
            rate = data.numel() / (statistics.median(times) * 1e-6)
            rows.append({"unroll": unroll, "ctas": ctas, "bytes_per_s": rate})
    return {"best": max(row["bytes_per_s"] for row in rows), "rows": rows}


def graph_times(step: Callable[[], None]) -> tuple[list[float], float]:
    """Microseconds of each replay of a graph of one ``step``, and what a further step takes: a graph of three less one
    of one, by their medians, over two. So the second is without the graph's own start. ``step`` has run before."""
    measured = []
    for steps in (1, 3):
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            for _ in range(steps):
                step()
        measured.append(measure(graph.replay))
    once, thrice = measured
    return once, (statistics.median(thrice) - statistics.median(once)) / 2

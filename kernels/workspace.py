"""Scratch memory of the split kernels: fp32 partial sums and arrival counters that return to zero by themselves."""

import torch

from workbench.errors import InputError


class Workspace:
    """Grow-only scratch on one device; one per stream, because launches that share it must not overlap.

    Make it and run once before a CUDA graph is captured: growing during capture would bake a freed address into
    the graph, so it raises InputError then.
    """

    def __init__(self, device: torch.device | str, floats: int = 0, counters: int = 0) -> None:
        self.device = torch.device(device)
        self.partials = torch.empty(floats, dtype=torch.float32, device=self.device)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=self.device)

    def take(self, kernel: str, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two buffers, at least this large. Their content is whatever the launch before left."""
        if floats > self.partials.numel() or counters > self.counters.numel():
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise InputError(
                    f"{kernel}: the workspace is too small and cannot grow during graph capture",
                    hint="run the step once with this workspace before capturing it",
                )
            floats = max(floats, self.partials.numel())
            counters = max(counters, self.counters.numel())
            self.partials = torch.empty(floats, dtype=torch.float32, device=self.device)
            self.counters = torch.zeros(counters, dtype=torch.int32, device=self.device)
        return self.partials, self.counters

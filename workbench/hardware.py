"""Device descriptions from ``devices.toml``, and the read bandwidth this machine reaches: the roof.

The roof divides bytes into a floor. Which peak stands behind it is always stated: the datasheet's, a practical share
of it, or the one measured here.
"""

import re
import time
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from workbench.errors import InputError, UnfitError
from workbench.fingerprint import last_level_cache_bytes, machine_fingerprint
from workbench.quantity import Quantity

__all__ = [
    "Hardware",
    "hardware_names",
    "load_hardware",
    "machine_fingerprint",
    "match_hardware",
    "measure_read_roof",
]

CPU_BYTES, CPU_SECONDS = 256 << 20, 1.0
CUDA_BYTES, CUDA_PASSES, CUDA_ROWS = 4 << 30, 20, 16384


class Hardware(BaseModel):
    """One device: datasheet peaks with their source, and the share of the bandwidth that good kernels reach.

    Bandwidth in bytes per second, TFLOP/s dense; a format the device has no unit for is absent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    match: tuple[str, ...] = Field(description="parts of the name a driver reports")
    architecture: str
    hbm_bytes_per_s: PositiveFloat
    hbm_source: str
    read_fraction: float = Field(gt=0, le=1)
    read_fraction_source: str
    capacity_bytes: PositiveInt
    sms: PositiveInt
    l2_bytes: PositiveInt | None = None
    bf16_tflops: PositiveFloat
    fp8_tflops: PositiveFloat | None = None
    fp4_tflops: PositiveFloat | None = None

    @property
    def datasheet_bandwidth(self) -> Quantity:
        """Peak read bandwidth of the datasheet, GB/s."""
        return Quantity(self.hbm_bytes_per_s / 1e9, "GB/s", "modelled", note=self.hbm_source)

    @property
    def practical_bandwidth(self) -> Quantity:
        """Read bandwidth that well-made kernels reach, GB/s: ``read_fraction`` of the datasheet's."""
        value = self.hbm_bytes_per_s * self.read_fraction / 1e9
        note = f"{self.read_fraction:.0%} of the datasheet, {self.read_fraction_source}"
        return Quantity(value, "GB/s", "modelled", note=note)


@cache
def _devices() -> dict[str, Hardware]:
    table: dict[str, Any] = tomllib.loads(files("workbench").joinpath("devices.toml").read_text(encoding="utf-8"))
    try:
        return {name: Hardware.model_validate({"name": name, **fields}) for name, fields in table.items()}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"devices.toml: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def hardware_names() -> list[str]:
    """Return the names of the described devices."""
    return list(_devices())


def load_hardware(name: str) -> Hardware:
    """Return the description of the device called ``name``, e.g. ``h200``."""
    if name not in _devices():
        raise InputError(f"hardware {name!r} is not known", hint=f"use one of {', '.join(hardware_names())}")
    return _devices()[name]


def match_hardware(reported: str) -> Hardware | None:
    """Return the description that fits the name a driver reports (``NVIDIA H200``), or None.

    Whole words count, so that a GB200 is not taken for a B200.
    """
    for device in _devices().values():
        if any(re.search(rf"\b{re.escape(part)}\b", reported) for part in device.match):
            return device
    return None


def measure_read_roof(device: Literal["cpu", "cuda"]) -> Quantity:
    """Measure how fast ``device`` reads memory, GB/s (1e9 bytes); takes about a second.

    A buffer several times the last-level cache is written and then read by torch reductions that store nothing; the
    best pass counts, for a roof is what the machine can do. On a GPU these are general-purpose reductions: a tuned
    read kernel may reach a few per cent more. Raises UnfitError without torch, without the device or without memory.
    """
    if find_spec("torch") is None:
        raise UnfitError("the read roof needs torch", hint="pip install 'decode-workbench[decode]'")
    return _measure_cpu() if device == "cpu" else _measure_cuda()


def _measure_cpu() -> Quantity:
    import torch

    cache_bytes = last_level_cache_bytes() or 1 << 20
    size = max(CPU_BYTES, 8 * cache_bytes)
    size = min(size, psutil.virtual_memory().available // 4) // 4096 * 4096
    if size < 4 * cache_bytes:
        raise UnfitError(
            f"the read roof needs a buffer of 4 times the last-level cache, {size >> 20} MiB can be had",
            hint="free some memory",
        )
    # Written, not merely allocated: untouched pages all map to one zero page and read at the speed of the cache.
    buffer = torch.empty(size // 8, dtype=torch.int64).fill_(1)
    reads = [buffer.amax, buffer.view(torch.float32).amax, buffer.view(torch.float64).amax]
    for read in reads:
        read()
    passes, best, deadline = 0, 0.0, time.perf_counter_ns() + CPU_SECONDS * 1e9
    while passes < len(reads) or time.perf_counter_ns() < deadline:
        start = time.perf_counter_ns()
        reads[passes % len(reads)]()
        best = max(best, size / (time.perf_counter_ns() - start))
        passes += 1
    note = f"torch amax over {size >> 20} MiB, {torch.get_num_threads()} threads, best of {passes}"
    return Quantity(best, "GB/s", "measured", note=note)


def _measure_cuda() -> Quantity:
    import torch

    if not torch.cuda.is_available():
        raise UnfitError("the read roof of a GPU needs one, torch finds none", hint="measure the cpu")
    free, _ = torch.cuda.mem_get_info()
    size = min(CUDA_BYTES, free // 4) // 4096 * 4096
    if size < 256 << 20:
        raise UnfitError(f"the read roof needs a buffer of 256 MiB, {size >> 20} MiB of GPU memory can be had")
    # Integer rows read fastest: 0.95 of the datasheet on an H200, where one float32 sum stays at 0.92.
    buffer = torch.ones(size // 8, dtype=torch.int64, device="cuda")
    rows = buffer[: buffer.numel() // CUDA_ROWS * CUDA_ROWS].view(CUDA_ROWS, -1)
    best = max(_best_pass(buffer.sum, size), _best_pass(lambda: rows.sum(1), rows.nbytes))
    note = f"torch int64 sums over {size >> 20} MiB on {torch.cuda.get_device_name()}, best of {2 * CUDA_PASSES}"
    return Quantity(best, "GB/s", "measured", note=note)


def _best_pass(read: Callable[[], object], size: int) -> float:
    """Return GB/s of the fastest of CUDA_PASSES reads of ``size`` bytes, by CUDA events around each."""
    import torch

    for _ in range(3):
        read()
    event: Any = torch.cuda.Event  # untyped in torch
    events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(CUDA_PASSES)]
    for start, end in events:
        start.record()
        read()
        end.record()
    torch.cuda.synchronize()
    return float(max(size / (start.elapsed_time(end) * 1e6) for start, end in events))

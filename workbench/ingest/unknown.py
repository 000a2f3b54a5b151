"""What a trace of torch.profiler cannot tell: rows of the bundle's ``limits`` table."""

from collections.abc import Iterator

import numpy as np

from workbench.ingest.kineto import KinetoTrace
from workbench.ingest.kineto_events import MISSING
from workbench.ingest.launches import GRAPH_LAUNCH, named
from workbench.ingest.steps import FoundSteps

_FORMAT = "torch.profiler does not record it"
_VERSION = "the trace does not hold it"


def unknown(trace: KinetoTrace, found: FoundSteps, *, modelled_bytes: bool) -> Iterator[dict[str, str]]:
    """Yield the rows of ``limits``, without their variant."""
    bytes_over_time = "bytes of the byte model over step time, tagged modelled" if modelled_bytes else ""
    yield _row("pm_sampler", "HBM throughput", _FORMAT, bytes_over_time, "sample counters beside the engine")
    yield _row("pm_sampler", "CTA occupancy, measured", _FORMAT, "", "sample counters beside the engine")
    yield _row("static", "register spills", "torch.profiler leaves out local memory", "", "inspect the kernels' code")
    yield _row(
        "steps",
        "step time without instruments",
        "the profiler was on, which stretches steps, most of all those that replay graphs",
        "the traced step",
        "measure tok/s in a process that never profiled",
    )
    if any(step.committed is None for step in found.steps) or not found.steps:
        yield _row("steps", "accept length", "no mark says how many tokens a step committed", "", "the engine's log")
    if any(step.context is None for step in found.steps) or not found.steps:
        yield _row("steps", "tokens in the KV cache", "no mark says it", "", "the engine's log")
    yield _row("steps", "distinct experts", _FORMAT, "uniform routing" if modelled_bytes else "", "")
    yield from _device_limits(trace)


def _device_limits(trace: KinetoTrace) -> Iterator[dict[str, str]]:
    device = trace.device
    if not len(device["start"]):
        yield _row("kernels", "kernel times and launch gaps", "the trace has no device rows", "", "profile the device")
        return
    yield _row("kernels", "cluster size, static and dynamic shared memory apart", _FORMAT, "their sum", "")
    kernels = device["kind"] == 0
    if bool((kernels & (device["blocks_per_sm"] == MISSING)).any()):
        why = "only newer versions work it out; 'est. achieved occupancy %' is no limit"
        yield _row("kernels", "occupancy limit", why, "", "profile with a newer torch")
    if bool((kernels & (device["grid_x"] == MISSING)).any()):
        yield _row("kernels", "grid and block of some kernels", _VERSION, "", "")
    if len(named(trace, GRAPH_LAUNCH)) and bool((device["graph_node"] == MISSING).all()):
        yield _row("kernels", "nodes of CUDA graphs", _VERSION, "order in time", "profile with a newer torch")
    if not len(trace.syncs["start"]):
        fix = "torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)"
        yield _row("syncs", "waits of streams for events", _VERSION, "calls that wait on the host", fix)
    if not np.any(trace.host["category"] == 2):
        yield _row("host", "launches", "the trace has no runtime calls", "", "profile CPU and device together")


def _row(instrument: str, what: str, why: str, fallback: str, fix: str) -> dict[str, str]:
    return {"instrument": instrument, "what": what, "why": why, "fallback": fallback, "fix": fix}

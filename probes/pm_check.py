"""Check the counter sampler on this machine's GPU: known bytes, cost, clock, gaps.

    python -m workbench.probes.pm_sampler --seconds 2 [--sets traffic,pipes,whole] [--interval-ns 10000]

A loop in this process reads a tensor far larger than L2; the sampler must count its bytes. A graph of small kernels is
replayed with the counters armed and not, in turn: the difference is what sampling costs.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from workbench.errors import WorkbenchError
from workbench.probes.counter_sets import SETS
from workbench.probes.pm_sampler import INTERVAL_NS, PmSampler
from workbench.probes.protocol import Capture

MOST_BYTES = 8 << 30
ROUND_SECONDS = 0.1
SMALL_KERNELS = 200
BUSY_BYTES = 1_000_000
"""Bytes in a sample from which the loop is running: an idle GPU reads next to nothing."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the check found. Bytes are of the read loop, times in microseconds, costs in percent of the time without.

    ``rise_us``: from the launch to the first busy sample's start; ``fall_us``: from the last busy sample's end to the
    moment the host knew. Both are positive, or the sampler's clock is off by at least as much as they are below.
    """

    set: str
    interval_ns: int
    known_bytes: int
    measured_bytes: int
    ratio: float
    samples: int
    expected_samples: int
    read_cost_percent: float
    graph_cost_percent: float
    graph_us: float
    peak_tb_s: float
    rise_us: float
    fall_us: float
    residual_us: float
    prepare_s: float
    stop_s: float
    largest: dict[str, float] = field(default_factory=dict)
    means: dict[str, float] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    sidecar: dict[str, Any] = field(default_factory=dict)


def check(seconds: float = 2.0, set_name: str = "traffic", interval_ns: int = INTERVAL_NS, device: int = 0) -> Result:
    """Run the check for about ``seconds`` on CUDA device ``device``. Raises UnfitError where nothing can be sampled."""
    import torch

    target = torch.device("cuda", device)
    free = torch.cuda.mem_get_info(target)[0]
    words = min(MOST_BYTES, free * 2 // 5) // 4
    data = torch.ones(words, dtype=torch.float32, device=target)
    out = torch.empty((), dtype=torch.float32, device=target)
    read_s = _timed(lambda: torch.sum(data, dim=0, out=out), 3)
    reads = max(2, round(ROUND_SECONDS / read_s))

    def loop() -> None:
        for _ in range(reads):
            torch.sum(data, dim=0, out=out)

    replay = _small_kernels(target)
    replays = max(10, round(ROUND_SECONDS / _timed(replay, 20)))
    rounds = max(2, round(seconds / 4 / ROUND_SECONDS))
    off: list[list[float]] = [[], []]
    on: list[list[float]] = [[], []]
    captures: list[Capture] = []
    with PmSampler(device, set_name=set_name, interval_ns=interval_ns) as sampler:
        # Clean first: no sampler exists yet.
        clean = [_timed(loop, 1), _timed(replay, replays)]
        before = time.perf_counter()
        sampler.prepare()
        prepare_s = time.perf_counter() - before
        stops = []
        edges = []
        for _ in range(rounds):
            for index, work, times in ((0, loop, 1), (1, replay, replays)):
                off[index].append(_timed(work, times))
                sampler.start()
                time.sleep(0.002)
                launched = time.perf_counter_ns()
                on[index].append(_timed(work, times))
                known_ns = time.perf_counter_ns()
                before = time.perf_counter()
                captures.append(sampler.stop())
                stops.append(time.perf_counter() - before)
                edges.append((launched, known_ns))
        reading = captures[::2]
        bytes_read = [_series(capture, "dram_read_bytes") for capture in reading]
        lags = [_edges(series, *edge) for series, edge in zip(bytes_read, edges[::2], strict=True)]
        measured = sum(float(values.sum()) for _, _, values in bytes_read)
        known = rounds * reads * words * 4
        rates = [values / np.maximum(1, end - start) for start, end, values in bytes_read if len(values)]
        names = sorted({name for capture in reading for name in _names(capture)})
        everything = {name: np.concatenate([_series(capture, name)[2] for capture in reading]) for name in names}
        return Result(
            set=set_name,
            interval_ns=interval_ns,
            known_bytes=known,
            measured_bytes=round(measured),
            ratio=measured / known,
            samples=sum(len(values) for _, _, values in bytes_read),
            expected_samples=round(sum(edge[1] - edge[0] + 2_000_000 for edge in edges[::2]) / interval_ns),
            read_cost_percent=_cost(on[0], off[0]),
            graph_cost_percent=_cost(on[1], off[1]),
            graph_us=clean[1] * 1e6,
            peak_tb_s=max((float(np.quantile(rate, 0.95)) for rate in rates), default=0.0) / 1e3,
            rise_us=min((lag[0] for lag in lags), default=float("nan")) / 1e3,
            fall_us=min((lag[1] for lag in lags), default=float("nan")) / 1e3,
            residual_us=max(capture.residual_ns for capture in captures) / 1e3,
            prepare_s=prepare_s,
            stop_s=max(stops),
            largest={name: float(values.max()) for name, values in everything.items() if len(values)},
            means={name: float(values.mean()) for name, values in everything.items() if len(values)},
            losses=[f"{row['kind']} x{row['count']}: {row['detail']}" for one in captures for row in one.losses][:20],
            missing=sorted({one.why for capture in captures for one in capture.missing}),
            sidecar=sampler.ready,
        )


def _small_kernels(target: Any) -> Callable[[], None]:
    """Return the replay of a graph of small kernels and products, the shape of a decode step."""
    import torch

    from workbench.kernels.graph_capture import capturing

    vector = torch.ones(1, 2880, dtype=torch.bfloat16, device=target)
    weight = torch.ones(2880, 2880, dtype=torch.bfloat16, device=target)
    small = torch.ones(2880, device=target)

    def body() -> None:
        for index in range(SMALL_KERNELS):
            small.add_(1.0)
            if index % 4 == 0:
                torch.mm(vector, weight)

    body()
    torch.cuda.synchronize(target)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        body()
    return graph.replay


def _timed(work: Callable[[], object], times: int) -> float:
    """Return seconds per call by CUDA events."""
    import torch

    make: Any = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def _cost(on: list[float], off: list[float]) -> float:
    return (statistics.median(on) / statistics.median(off) - 1) * 100


def _names(capture: Capture) -> set[str]:
    table = capture.columns.get("counters")
    return set() if table is None or "name" not in table.column_names else set(table.column("name").to_pylist())


def _series(capture: Capture, name: str) -> tuple[Any, Any, Any]:
    """Return start, end and value of one counter, arrays of shape (n,)."""
    import pyarrow.compute as pc

    if name not in _names(capture):
        return (np.zeros(0, np.int64),) * 2 + (np.zeros(0),)
    table = capture.columns["counters"]
    rows = table.filter(pc.equal(table.column("name"), name))
    start, end, value = (rows.column(column).to_numpy() for column in ("start_ns", "end_ns", "value"))
    return start, end, value


def _edges(series: tuple[Any, Any, Any], launched: int, known: int) -> tuple[int, int]:
    """Return (rise, fall) in ns: see Result."""
    start, end, values = series
    busy = np.flatnonzero(values > BUSY_BYTES)
    if not len(busy):
        return 0, 0
    return int(start[busy[0]]) - launched, known - int(end[busy[-1]])


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object per set; 4 where a set could not be sampled."""
    parser = argparse.ArgumentParser(prog="python -m workbench.probes.pm_sampler", description="Check the sampler.")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--sets", default="traffic", help=f"of {', '.join(SETS)}; several with commas")
    parser.add_argument("--interval-ns", type=int, default=INTERVAL_NS)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args(arguments)
    code = 0
    for name in options.sets.split(","):
        try:
            print(json.dumps(asdict(check(options.seconds, name, options.interval_ns, options.device)), indent=1))
        except WorkbenchError as error:
            print(json.dumps({"set": name, "why": error.message, "fix": error.hint}, indent=1))
            code = 4
        sys.stdout.flush()
    return code

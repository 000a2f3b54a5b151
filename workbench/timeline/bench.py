"""How long one interaction with a large timeline takes: ``python -m workbench.timeline.bench --events 10000000``.

A bundle of kernels on two streams, gaps and counter samples among them, is written to a temporary folder and opened as
the dashboard does. Then windows between the whole run and 1 us are asked for at random places, each until its figure
is JSON: that is what the server does between a zoom and its answer; and pages of the kernel table. Prints p50, p95 and
the longest, in ms.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from workbench.timeline.kernel_rows import By, Direction, KernelTable
from workbench.timeline.tracks import Timeline, load_timeline
from workbench.timeline.window import clamp, look
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

BATCH = 1 << 20
BINS = 800
STEP_EVENTS = 600
GAP_NS = 20_000
SORTS: tuple[list[tuple[str, Direction]], ...] = ([], [("duration_us", "desc")], [("start_ms", "asc")])
MEAN_KERNEL_NS = 3_000


def write_events(folder: Path, events: int, seed: int = 0) -> None:
    """Write a bundle of about ``events`` rows: nine kernels to one counter sample, a step for every 600 kernels."""
    random_numbers = np.random.default_rng(seed)
    kernels = events * 9 // 10
    with BundleWriter.create(folder, Manifest(variants=[VariantRecord(name="v")])) as writer:
        now = 0
        for first in range(0, kernels, BATCH):
            count = min(BATCH, kernels - first)
            length = random_numbers.integers(500, 2 * MEAN_KERNEL_NS, count)
            gap = np.where(random_numbers.random(count) < 1e-3, GAP_NS, random_numbers.integers(0, 300, count))
            end = now + np.cumsum(length + gap)
            number = np.arange(first, first + count)
            writer.append_table(
                "kernels",
                pa.table(
                    {
                        "variant": pa.array(["v"] * count),
                        "kernel_id": number,
                        "name": pa.array([f"kernel_{index % 97}" for index in number.tolist()]),
                        "kind": pa.array(["kernel"] * count),
                        "device": pa.array(np.zeros(count, np.int32)),
                        "stream": 7 + number % 2,
                        "start_ns": end - length,
                        "end_ns": end,
                        "step_id": number // STEP_EVENTS,
                    }
                ),
            )
            now = int(end[-1])
        _write_steps(writer, now, max(1, kernels // STEP_EVENTS))
        _write_samples(writer, now, events - kernels, random_numbers)


def _write_steps(writer: BundleWriter, length_ns: int, steps: int) -> None:
    edges = np.linspace(0, length_ns, steps + 1).astype(np.int64)
    plain = {"variant": ["v"] * steps, "run_pass": ["traced"] * steps, "warmup": [False] * steps}
    index = np.arange(steps)
    times = {"start_ns": edges[:-1], "draft_end_ns": edges[:-1], "forward_end_ns": edges[1:], "end_ns": edges[1:]}
    counts = {"index": index.astype(np.int32), "committed": (1 + index % 4).astype(np.int32)}
    writer.append_table("steps", pa.table(plain | {"step_id": index} | times | counts))


def _write_samples(writer: BundleWriter, length_ns: int, samples: int, random_numbers: np.random.Generator) -> None:
    edges = np.linspace(0, length_ns, samples + 1).astype(np.int64)
    for first in range(0, samples, BATCH):
        count = min(BATCH, samples - first)
        start, end = edges[first : first + count], edges[first + 1 : first + count + 1]
        plain = {"source": ["pm_sampler"] * count, "name": ["dram_read_bytes"] * count, "unit": ["B"] * count}
        value = random_numbers.uniform(0, 4.5e0, count) * (end - start) * 1e3
        writer.append_table("counters", pa.table(plain | {"start_ns": start, "end_ns": end, "value": value}))


def interact(timeline: Timeline, times: int, seed: int = 1) -> list[float]:
    """Ask for ``times`` windows of any width at random places; return the ms that each took."""
    from workbench.dashboards.timeline_figure import timeline_figure

    chance = random.Random(seed)  # noqa: S311 - places to look at
    whole = timeline.end_ns - timeline.start_ns
    taken = []
    for index in range(times):
        width = whole if index == 0 else round(whole * 10 ** -chance.uniform(0, np.log10(whole / 1000)))
        start = timeline.start_ns + round(chance.random() * (whole - width))
        begin = time.perf_counter()
        window = look(timeline, *clamp(timeline, start, start + width), BINS)
        json.dumps(timeline_figure(timeline, window))
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken


def turn_pages(table: KernelTable, times: int, seed: int = 2) -> list[float]:
    """Ask for ``times`` pages of the kernel table, sorted and filtered in turn; return the ms that each took."""
    chance = random.Random(seed)  # noqa: S311 - pages to look at
    taken = []
    for index in range(times):
        by: By = "name" if index % 4 == 0 else "execution"
        sort = SORTS[index % len(SORTS)]
        text = {"name": {"type": "contains", "filter": f"_{chance.randrange(97)}"}} if index % 2 else {}
        first = 0 if sort else 100 * chance.randrange(1000)
        begin = time.perf_counter()
        json.dumps(table.page(by, first, first + 100, [] if by == "name" else sort, text).rows)
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken


def _print(what: str, taken: list[float]) -> None:
    p50, p95 = np.percentile(taken, [50, 95])
    print(f"{len(taken)} {what}: p50 {p50:.0f} ms, p95 {p95:.0f} ms, longest {max(taken):.0f} ms")


def main() -> None:
    """Write, open, interact, print."""
    parser = argparse.ArgumentParser(prog="python -m workbench.timeline.bench", description=__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--interactions", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle"
        write_events(path, options.events)
        with Bundle.open(path) as bundle:
            begin = time.perf_counter()
            timeline = load_timeline(bundle, "v")
            opened = time.perf_counter() - begin
            begin = time.perf_counter()
            table = KernelTable(bundle, "v")
            opened_table = time.perf_counter() - begin
    print(f"{timeline.events:,} events, opened once in {opened:.1f} s, the kernel table in {opened_table:.1f} s")
    _print("zooms", interact(timeline, options.interactions))
    _print("table pages", turn_pages(table, options.interactions // 3))


if __name__ == "__main__":
    main()

"""GPU metrics that Nsight Systems sampled (``--gpu-metrics-devices``), as rows of table ``counters``.

Values are whole numbers, most of them percent of the device's peak. Bytes read are worked out from that percentage and
the peak that the file states: to one percent of the peak, no better.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from workbench.ingest.columns import Ints
from workbench.ingest.losses import Losses
from workbench.ingest.sqlite_file import SqliteFile

SAMPLES, NAMES, GPUS = "GPU_METRICS", "TARGET_INFO_GPU_METRICS", "TARGET_INFO_GPU"
READ_SHARE = ("DRAM Read Bandwidth [Throughput %]", "DRAM Read Throughput [Throughput %]", "DRAM Read [Throughput %]")
READ_BYTES = "dram_read_bytes"


@dataclass(slots=True)
class Series:
    """Samples of one metric of one device, by time."""

    name: str
    device: int
    times: Ints
    values: Ints


@dataclass(slots=True)
class Metrics:
    """All series of a file. ``peak_bytes_per_s``: memory bandwidth by device, where the file states it."""

    series: list[Series] = field(default_factory=list)
    peak_bytes_per_s: dict[int, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """How many samples were read."""
        return sum(len(one.times) for one in self.series)

    @property
    def reads_memory(self) -> bool:
        """Whether bytes read can be worked out."""
        return any(one.name in READ_SHARE and one.device in self.peak_bytes_per_s for one in self.series)

    def tables(self, variant: str) -> Iterator[pa.Table]:
        """Yield rows of table ``counters``: a sample's value is over the time since the one before."""
        for one in self.series:
            if len(one.times) < 2:
                continue
            starts, ends = one.times[:-1], one.times[1:]
            values = one.values[1:].astype(np.float64)
            unit = "%" if "%" in one.name else ""
            yield _table(variant, one.name, one.device, starts, ends, values, unit)
            if one.name in READ_SHARE and one.device in self.peak_bytes_per_s:
                moved = values / 100 * self.peak_bytes_per_s[one.device] * (ends - starts) / 1e9
                yield _table(variant, READ_BYTES, one.device, starts, ends, moved, "B")


def read_metrics(file: SqliteFile, losses: Losses) -> Metrics:
    """Return the metrics in ``file``; none where it was not asked for them."""
    found = Metrics()
    names: dict[tuple[int, int], str] = {}
    for row in file.values(NAMES, ("typeId", "metricId", "metricName")):
        if type(row["metricId"]) is int and isinstance(row["metricName"], str):
            names[(row["typeId"] if type(row["typeId"]) is int else 0, row["metricId"])] = row["metricName"][:400]
    parts: dict[tuple[int, int], list[tuple[Ints, Ints]]] = {}
    wrong = 0
    for block in file.rows(SAMPLES, ("timestamp", "typeId", "metricId", "value")):
        good = [row for row in block if all(type(one) is int for one in row)]
        wrong += len(block) - len(good)
        if not good:
            continue
        data = np.array(good, np.int64)
        keys = np.unique(data[:, 1:3], axis=0)
        for kind, metric in keys.tolist():
            own = (data[:, 1] == kind) & (data[:, 2] == metric)
            parts.setdefault((kind, metric), []).append((data[own, 0], data[own, 3]))
    losses.add("unusable-counter", "data_loss", "samples of GPU metrics that are no integers", count=wrong)
    for (kind, metric), pieces in parts.items():
        times = np.concatenate([times for times, _ in pieces])
        values = np.concatenate([values for _, values in pieces])
        order = np.argsort(times, kind="stable")
        times, values = times[order], values[order]
        ordered = np.concatenate(([True], np.diff(times) > 0))
        name = names.get((kind, metric)) or names.get((0, metric)) or f"metric {metric}"
        found.series.append(Series(name, kind & 0xFF, times[ordered], values[ordered]))
    for row in file.values(GPUS, ("id", "memoryBandwidth")):
        if _positive(row["id"], 0) and _positive(row["memoryBandwidth"], 1):
            found.peak_bytes_per_s[row["id"]] = row["memoryBandwidth"]
    return found


def _positive(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 1 << 62


def _table(variant: str, name: str, device: int, starts: Ints, ends: Ints, values: Any, unit: str) -> pa.Table:
    count = len(starts)
    return pa.table(
        {
            "variant": pa.array([variant] * count, pa.string()),
            "source": pa.array(["nsys"] * count, pa.string()),
            "name": pa.array([name] * count, pa.string()),
            "device": pa.array(np.full(count, device, np.int32)),
            "start_ns": pa.array(starts),
            "end_ns": pa.array(ends),
            "value": pa.array(values, pa.float64()),
            "unit": pa.array([unit] * count, pa.string()),
        }
    )

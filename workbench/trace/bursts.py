"""Bursts of counter samples: a server is watched from outside for a fraction of the time, by design.

Decoding samples takes longer than taking them, so ``workbench attach`` samples for a while and pauses. A pause between
two bursts is no gap; a hole within a burst is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.trace.bundle import Bundle
from workbench.trace.manifest import Manifest

SAMPLER = "pm_sampler"
TRAFFIC = "dram_read_bytes"
"""The counter whose samples tell when the sampler was on: every set has it."""

IDLE_SHARE_OF_ROOF = 0.01
"""A sample that moves less than this share of the roof counts as idle: some polling always shows."""

IDLE = "dram_idle"
"""Beside merged samples: the share of their time that was idle."""

NONZERO: Mapping[str, str] = MappingProxyType({"ctas_per_sm": "nonzero_ctas", "warps_active": "nonzero_warps"})
"""Counters whose mean is taken while they are above 0, and beside merged samples the share of their time they were."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bursts:
    """When the sampler was on: ``spans``, shape (n, 2), ns. ``expected``: how many bursts there were to be."""

    spans: Ints
    expected: int

    @property
    def covered_ns(self) -> int:
        """Return the time within bursts."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @property
    def pauses(self) -> Ints:
        """Return the length of each pause between two bursts, ns."""
        return np.asarray(self.spans[1:, 0] - self.spans[:-1, 1], np.int64)


def bursts(bundle: Bundle) -> Bursts | None:
    """Return the bursts of a watched server; None where the sampler took nothing."""
    sql = "SELECT start_ns, end_ns FROM counters WHERE source = ? AND name = ? ORDER BY start_ns, end_ns"
    rows = bundle.query(sql, [SAMPLER, TRAFFIC])
    if not rows.num_rows:
        return None
    start, end = (np.asarray(rows[name].to_numpy(), np.int64) for name in ("start_ns", "end_ns"))
    expected = expected_bursts(bundle.manifest)
    cuts = pauses(start, end, expected)
    return Bursts(np.stack([start[[0, *cuts]], end[[*(cut - 1 for cut in cuts), -1]]], axis=1), expected)


def pauses(start_ns: Ints, end_ns: Ints, expected: int) -> list[int]:
    """Return the indices of the samples that begin a burst, but the first: after the ``expected`` - 1 longest holes.

    A hole counts from the length of a sample on; ``start_ns`` and ``end_ns``, shape (n,), are those of one counter.
    """
    holes = start_ns[1:] - end_ns[:-1]
    longest = np.argsort(-holes, kind="stable")[: max(expected - 1, 0)]
    least = float(np.median(end_ns - start_ns))
    return sorted(int(at) + 1 for at in longest if holes[at] > least)


def expected_bursts(manifest: Manifest) -> int:
    """Return how many bursts were taken: as recorded; before that was recorded, one clock was written for each."""
    settings: dict[str, Any] = manifest.variants[0].settings.get("attach", {}) if manifest.variants else {}
    recorded = settings.get("bursts")
    if isinstance(recorded, list):
        return len(recorded)
    return sum(source.name == SAMPLER for source in manifest.clock.sources)


def idle_below(bundle: Bundle) -> float | None:
    """Return the traffic, B/s, below which a sample counts as idle; None without a roof."""
    roofs = {row["name"]: row["bytes_per_s"] for row in bundle.table("roofs").to_pylist()}
    roof = roofs.get("read") or roofs.get("datasheet")
    return roof * IDLE_SHARE_OF_ROOF if roof else None

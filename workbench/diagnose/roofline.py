"""Roofline of one variant: bytes moved per second by the step, its phases and its kernels, under three roofs.

Decoding one sequence is bound by memory, so the axis is not flops per byte but bytes per accepted token: achieved
bandwidth over bytes per accepted token is tok/s. Every point says where its bytes come from; kernels of unknown bytes
are counted, not guessed.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from workbench.diagnose.counted_floor import counted_floor
from workbench.diagnose.intervals import merge
from workbench.diagnose.steps import Ints, Steps, load_steps
from workbench.diagnose.summary import VariantSummary
from workbench.hardware import Hardware, match_hardware
from workbench.quantity import Quantity, Tag
from workbench.trace.bundle import Bundle

RoofName = Literal["datasheet", "measured", "clock-adjusted"]
PointKind = Literal["step", "phase", "kernel", "copy"]

SECTOR_BYTES = 32
"""Bytes of one DRAM sector as NVIDIA's counters count it."""
SAMPLES_PER_KERNEL = 3
"""A kernel's bytes are taken from counter samples only where its mean run is this many samples long."""
MEMORY_CLOCKS = ("memory_clock", "mem_clock")


@dataclass(frozen=True, slots=True)
class Roof:
    """One ceiling: read bandwidth in GB/s (1e9 bytes), its note says how it is known."""

    name: RoofName
    bandwidth: Quantity


@dataclass(frozen=True, slots=True)
class Point:
    """Something that moved bytes. ``total_ns`` and ``calls`` cover all steps of ``run_pass``.

    ``achieved``: bytes over time, GB/s. ``bytes_per_token``: bytes per accepted token (bonus token included), None
    where no step is known. ``above``: roofs it lies above; such a point is impossible, its bytes or its roof are wrong.
    ``ids``: kernel_id of its longest execution, empty for what is no kernel.
    """

    name: str
    kind: PointKind
    run_pass: str
    calls: int
    total_ns: int
    bytes_per_call: Quantity
    achieved: Quantity
    bytes_per_token: Quantity | None
    above: tuple[RoofName, ...]
    ids: tuple[int, ...] = ()

    @property
    def impossible(self) -> bool:
        """Whether it lies above a roof."""
        return bool(self.above)

    def verdict(self) -> str:
        """Say in words what is wrong with an impossible point; empty for a possible one."""
        if "datasheet" in self.above:
            return "impossible: more than the memory can deliver; check the byte count"
        if self.above:
            return f"impossible: above the {self.above[0]} roof; bytes came from a cache, or that roof is too low"
        return ""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofs, the lowest last, and points, the longest first.

    ``unknown_kernels`` kernels by name took ``unknown_ns`` and have no known bytes. ``missing``: what would be needed.
    """

    variant: str
    roofs: tuple[Roof, ...]
    points: tuple[Point, ...]
    unknown_kernels: int
    unknown_ns: int
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "variant": self.variant,
            "roofs": [{"name": roof.name, **roof.bandwidth.to_json()} for roof in self.roofs],
            "points": [
                {
                    "name": point.name,
                    "kind": point.kind,
                    "pass": point.run_pass,
                    "calls": point.calls,
                    "total_ns": point.total_ns,
                    "bytes_per_call": point.bytes_per_call.to_json(),
                    "achieved": point.achieved.to_json(),
                    "bytes_per_token": point.bytes_per_token.to_json() if point.bytes_per_token else None,
                    "above": list(point.above),
                    "ids": list(point.ids),
                }
                for point in self.points
            ],
            "unknown_kernels": self.unknown_kernels,
            "unknown_ns": self.unknown_ns,
            "missing": list(self.missing),
        }


def roofline(bundle: Bundle, variant: VariantSummary) -> Roofline:
    """Return the roofline of ``variant``, as far as the bundle knows bytes and roofs."""
    roofs = _roofs(bundle, variant)
    steps = load_steps(bundle, variant.name)
    points = _phase_points(bundle, variant, steps)
    points += _counted_steps(bundle, variant)
    kernels, unknown, unknown_ns = _kernel_points(bundle, variant)
    judged = [_judged(point, roofs) for point in points + kernels]
    missing = []
    if not any(roof.name == "measured" for roof in roofs):
        missing.append(f"no measured read bandwidth of {variant.device!r}: run with this device to measure it")
    if variant.bytes_per_step is None:
        missing.append("no byte model of this variant, so the step itself has no bytes")
    if unknown:
        missing.append(
            f"{unknown} kernels by name have no known bytes: sample DRAM counters while tracing, or profile them one "
            "by one"
        )
    return Roofline(
        variant.name,
        roofs,
        tuple(sorted(judged, key=lambda point: (-point.total_ns, point.name))),
        unknown,
        unknown_ns,
        tuple(missing),
    )


def _roofs(bundle: Bundle, variant: VariantSummary) -> tuple[Roof, ...]:
    rows = bundle.query("SELECT device, name, bytes_per_s, tag, note FROM roofs WHERE bytes_per_s > 0").to_pylist()
    own = [row for row in rows if row["device"] == variant.device] or ([] if variant.device == "cpu" else rows)
    found: list[Roof] = []
    sheets = [row for row in own if row["name"] == "datasheet"]
    known = _hardware(bundle, variant)
    if sheets:
        found.append(
            Roof("datasheet", Quantity(sheets[0]["bytes_per_s"] / 1e9, "GB/s", "modelled", note=_note(sheets)))
        )
    elif known:
        found.append(Roof("datasheet", known.datasheet_bandwidth))
    measured = [row for row in own if row["tag"] == "measured"]
    if measured:
        value = measured[0]["bytes_per_s"] / 1e9
        found.append(Roof("measured", Quantity(value, "GB/s", "measured", note=_note(measured))))
        if adjusted := _clock_share(bundle, variant.name):
            share, note = adjusted
            found.append(Roof("clock-adjusted", Quantity(value * share, "GB/s", "estimated", note=note)))
    return tuple(found)


def _note(rows: list[dict[str, Any]]) -> str:
    return str(rows[0]["note"])


def _hardware(bundle: Bundle, variant: VariantSummary) -> Hardware | None:
    """Return the description of the device that ``variant`` ran on; None for a CPU or one that is not described."""
    if variant.device == "cpu":
        return None
    gpus = bundle.manifest.environment.get("gpus")
    names = [variant.device, str(bundle.manifest.device.get("name", ""))]
    names += [str(gpu.get("name", "")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return next((known for name in names if (known := match_hardware(name))), None)


_CLOCK = """
WITH clock AS (
    SELECT start_ns, CASE WHEN unit = 'Hz' THEN value / 1e6 ELSE value END AS mhz FROM counters
    WHERE name IN ($2, $3) AND value > 0 AND (variant = $1 OR variant IS NULL)
), ran AS (
    SELECT run_pass, min(start_ns) AS first, max(end_ns) AS last FROM steps WHERE variant = $1 GROUP BY run_pass
)
SELECT run_pass, avg(mhz) AS mean,
       greatest((SELECT max(mhz) FROM clock),
                (SELECT max(TRY_CAST(value AS DOUBLE)) FROM env WHERE key LIKE '%mem_clock_max_mhz')) AS top
FROM clock JOIN ran ON start_ns BETWEEN first AND last GROUP BY run_pass ORDER BY run_pass <> 'clean', run_pass LIMIT 1
"""


def _clock_share(bundle: Bundle, variant: str) -> tuple[float, str] | None:
    """Return the mean memory clock of the clean pass over the highest, and a note; None without samples.

    Where the clean pass has none, a pass with instruments stands in. Highest: what the driver states, or was seen.
    """
    rows = bundle.query(_CLOCK, [variant, *MEMORY_CLOCKS]).to_pylist()
    if not rows:
        return None
    row = rows[0]
    passed = f"the {row['run_pass']} pass"
    note = f"measured roof times the mean memory clock of {passed}, {row['mean']:.0f} of {row['top']:.0f} MHz"
    return row["mean"] / row["top"], note


def _phase_points(bundle: Bundle, variant: VariantSummary, steps: Steps) -> list[Point]:
    """Return the step and its phases with the bytes of the byte model."""
    floor = counted_floor(bundle, variant.name, variant.device, steps)
    if floor is None or not len(steps):
        return []
    target = floor.target_ns(steps).sum() * (floor.bytes_per_s / 1e9)
    draft = floor.draft_ns(steps).sum() * (floor.bytes_per_s / 1e9)
    tokens = int(steps.committed.sum())
    parts: list[tuple[str, PointKind, float, int]] = [
        ("step", "step", target + draft, int(steps.wall.sum())),
        ("verify forward", "phase", target, int((steps.forward_end - steps.draft_end).sum())),
        ("draft", "phase", draft, int((steps.draft_end - steps.start).sum())),
    ]
    recorded = floor.bytes_note == "byte model"
    note = "byte model, stored formats, distinct experts as recorded" if recorded else floor.bytes_note
    return [
        _point(name, kind, "clean", len(steps), total_ns, count, tokens, floor.tag, note)
        for name, kind, count, total_ns in parts
        if count > 0 and total_ns > 0
    ]


def _point(
    name: str,
    kind: PointKind,
    run_pass: str,
    calls: int,
    total_ns: int,
    count: float,
    tokens: int,
    tag: Tag,
    note: str,
    ids: tuple[int, ...] = (),
) -> Point:
    return Point(
        name,
        kind,
        run_pass,
        calls,
        total_ns,
        Quantity(count / calls, "B", tag, note=note),
        Quantity(count / total_ns, "GB/s", tag, note=note),
        Quantity(count / tokens, "B/token", tag, note="per accepted token, bonus token included") if tokens else None,
        (),
        ids,
    )


def _judged(point: Point, roofs: tuple[Roof, ...]) -> Point:
    above = tuple(roof.name for roof in roofs if point.achieved.value > roof.bandwidth.value)
    return replace(point, above=above)


_DRAM = """
SELECT start_ns, end_ns, sum(CASE WHEN contains(lower(name), 'sector') THEN value * ? ELSE value END) AS count
FROM counters
WHERE (variant = ? OR variant IS NULL) AND end_ns > start_ns AND lower(name) LIKE '%dram%' AND lower(name) LIKE '%read%'
  AND (contains(lower(name), 'sector') OR contains(lower(name), 'byte')) AND lower(unit) NOT LIKE '%/s%'
GROUP BY start_ns, end_ns ORDER BY start_ns
"""


def _dram(bundle: Bundle, variant: str) -> tuple[Ints, Ints, Any]:
    """Return start, end (ns) and bytes of every sample of DRAM reads, all devices of one rank added up."""
    table = bundle.query(_DRAM, [SECTOR_BYTES, variant])
    start, end = (table.column(name).to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    return start, end, table.column("count").to_numpy().astype(np.float64)


def bytes_within(start: Ints, end: Ints, count: Any, windows_start: Ints, windows_end: Ints) -> Any:
    """Return bytes of samples [start, end) that fall into each window, a sample shared by time where it straddles.

    Samples are sorted and do not overlap; bytes flow evenly within one.
    """
    if not len(start):
        return np.zeros(len(windows_start))
    total = np.concatenate(([0.0], np.cumsum(count)))

    def until(moment: Ints) -> Any:
        index = np.maximum(np.searchsorted(start, moment, side="right") - 1, 0)
        part = np.clip((moment - start[index]) / np.maximum(end[index] - start[index], 1), 0, 1)
        return total[index] + part * count[index]

    return until(windows_end) - until(windows_start)


def _counted_steps(bundle: Bundle, variant: VariantSummary) -> list[Point]:
    """Return the step with the DRAM bytes that were counted while the sampled pass ran."""
    start, end, count = _dram(bundle, variant.name)
    table = bundle.query(
        "SELECT start_ns, end_ns, coalesce(committed, 0) AS committed FROM steps "
        "WHERE variant = ? AND run_pass = 'sampled' AND NOT warmup ORDER BY start_ns",
        [variant.name],
    )
    if not len(start) or not table.num_rows:
        return []
    begin, stop, committed = (table.column(name).to_numpy().astype(np.int64) for name in table.column_names)
    covered = (begin >= start[0]) & (stop <= end[-1])
    if not covered.any():
        return []
    moved = float(bytes_within(start, end, count, begin[covered], stop[covered]).sum())
    total_ns, tokens = int((stop - begin)[covered].sum()), int(committed[covered].sum())
    if moved <= 0 or total_ns <= 0:
        return []
    note = "DRAM reads counted in the sampled pass"
    return [_point("step, counted", "step", "sampled", int(covered.sum()), total_ns, moved, tokens, "measured", note)]


_KERNELS = """
SELECT name, kind, kernel_id, start_ns, end_ns, coalesce(copied_bytes, 0) AS copied
FROM kernels WHERE variant = ? AND end_ns > start_ns ORDER BY start_ns
"""


def _kernel_points(bundle: Bundle, variant: VariantSummary) -> tuple[list[Point], int, int]:
    """Return kernels by name that have known bytes, the number of the others, and their time in ns."""
    table = bundle.query(_KERNELS, [variant.name])
    if not table.num_rows:
        return [], 0, 0
    names = table.column("name").combine_chunks().dictionary_encode()
    code = names.indices.to_numpy()
    start, end, ids, copied = (
        table.column(name).to_numpy().astype(np.int64) for name in ("start_ns", "end_ns", "kernel_id", "copied")
    )
    copy = np.array([kind != "kernel" for kind in table.column("kind").to_pylist()])
    tokens = _traced_tokens(bundle, variant.name)
    samples = _dram(bundle, variant.name)
    spacing = float(np.median(samples[1] - samples[0])) if len(samples[0]) else 0.0
    counted = bytes_within(*samples, start, end) if spacing else np.zeros(len(start))
    # Samples see the whole device: where kernels of two streams overlap, nobody can tell whose bytes they were.
    alone = _alone(start, end)
    points: list[Point] = []
    unknown, unknown_ns = 0, 0
    for index, name in enumerate(names.dictionary.to_pylist()):
        own = code == index
        total_ns, calls = int((end - start)[own].sum()), int(own.sum())
        longest = int(ids[own][np.argmax((end - start)[own])])
        sampled = spacing > 0 and alone[own].all() and total_ns / calls >= SAMPLES_PER_KERNEL * spacing
        common = (name, "traced", calls, total_ns, tokens, longest)
        if copied[own].sum() and copy[own].all():
            points.append(_execution(*common, float(copied[own].sum()), copy=True))
        elif sampled and counted[own].sum() > 0:
            points.append(_execution(*common, float(counted[own].sum()), copy=False))
        else:
            unknown, unknown_ns = unknown + 1, unknown_ns + total_ns
    return points, unknown, unknown_ns


def _execution(
    name: str, run_pass: str, calls: int, total_ns: int, tokens: int, longest: int, moved: float, *, copy: bool
) -> Point:
    kind: PointKind = "copy" if copy else "kernel"
    tag: Tag = "measured" if copy else "estimated"
    note = "bytes of the copy as traced" if copy else "DRAM reads sampled while it ran, shared by time at its borders"
    return _point(name, kind, run_pass, calls, total_ns, moved, tokens, tag, note, (longest,))


def _alone(start: Ints, end: Ints) -> Any:
    """Return whether each interval, sorted by start, overlaps no other."""
    merged, _ = merge(start, end)
    group = np.searchsorted(merged, start, side="right")
    return np.bincount(group)[group] == 1


def _traced_tokens(bundle: Bundle, variant: str) -> int:
    sql = "SELECT coalesce(sum(committed), 0)::BIGINT AS n FROM steps WHERE variant = ? AND run_pass = 'traced'"
    return int(bundle.query(sql, [variant]).to_pylist()[0]["n"])

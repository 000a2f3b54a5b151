"""Checks of the records themselves: times, clocks, counters, the profiler's own work, losses."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from workbench.trace.bundle import Bundle
from workbench.trace.bursts import IDLE, NONZERO, bursts, expected_bursts
from workbench.trace.claims import CLAIMS, FEW, RESIDUAL_NS, Check, Claim, scoped
from workbench.trace.launch_checks import TRACED_KERNELS
from workbench.trace.manifest import ClockSource
from workbench.trace.salvage import CUT_KIND, CUT_PROBE

RESIDUAL_REFUSED_NS = 50_000
"""From here on, launch delays of some ten microseconds cannot be told from clock error."""

RESIDUAL_WHOLE_NS = 500_000
"""Up to here a trace placed as a whole still gives each step its own kernels: steps take longer."""

IMPOSSIBLE_NS = 10_000_000_000
"""A kernel of ten seconds is a damaged record: no decode step has one."""

_OVERLAPS = """
SELECT variant, count(*) FILTER (start_ns < reach) AS overlaps,
       (sum(least(end_ns, reach) - start_ns) FILTER (start_ns < reach))::BIGINT AS ns
FROM (SELECT variant, start_ns, end_ns, max(end_ns) OVER (
          PARTITION BY variant, rank, device, stream ORDER BY start_ns, end_ns
          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reach
      FROM kernels WHERE kind = 'kernel')
GROUP BY variant ORDER BY variant
"""


def overlaps(bundle: Bundle) -> Iterator[Check]:
    """Kernels of one stream that run at the same time: programmatic dependent launch."""
    for row in bundle.query(_OVERLAPS).to_pylist():
        if row["overlaps"]:
            message = (
                f"{row['overlaps']} kernels begin before the one ahead of them on their stream ends, by "
                f"{row['ns'] / 1e6:.3f} ms in all (programmatic dependent launch): durations must not be added up"
            )
            found = Check("overlap-on-stream", "info", message, row["overlaps"], ("kernel-sums",))
            yield from scoped(bundle, row["variant"], [found])


_TIMES = f"""
SELECT count(*) FILTER (end_ns - start_ns > {IMPOSSIBLE_NS}) AS long, max(end_ns - start_ns) AS longest,
       count(*) FILTER (end_ns = start_ns) AS empty, count(*) AS rows,
       count(*) FILTER (first IS NOT NULL AND (start_ns < first - {IMPOSSIBLE_NS} OR start_ns > last + {IMPOSSIBLE_NS}))
           AS outside, kernels.variant AS variant
FROM {TRACED_KERNELS} AS kernels LEFT JOIN (
    SELECT variant, min(start_ns) AS first, max(end_ns) AS last FROM host GROUP BY variant) USING (variant)
GROUP BY kernels.variant ORDER BY kernels.variant
"""  # noqa: S608


def times(bundle: Bundle) -> Iterator[Check]:
    """Durations and times that cannot be."""
    for row in bundle.query(_TIMES).to_pylist():
        yield from scoped(bundle, row["variant"], _impossible(row))


def _impossible(row: Mapping[str, Any]) -> Iterator[Check]:
    refuses: tuple[Claim, ...] = ("device-time", "kernel-sums", "bandwidth", "steps")
    if row["long"]:
        message = f"{row['long']} device rows are longer than 10 s, up to {row['longest'] / 1e9:.3g} s: damaged records"
        yield Check("impossible-duration", "error", message, row["long"], refuses)
    if row["outside"]:
        message = f"{row['outside']} device rows lie more than 10 s outside the time of all host rows: damaged records"
        yield Check("impossible-time", "error", message, row["outside"], refuses)
    if row["empty"] > FEW * row["rows"]:
        message = f"{row['empty']} of {row['rows']} device rows have no length: their durations are missing"
        yield Check("no-duration", "error", message, row["empty"], refuses)


_GAPS = """
WITH sample AS (
    SELECT variant, source, name, rank, device, value,
           start_ns - lag(start_ns) OVER series AS period,
           start_ns - lag(end_ns) OVER series AS hole,
           lag(end_ns - start_ns) OVER series AS length
    FROM counters
    WINDOW series AS (PARTITION BY variant, source, name, rank, device ORDER BY start_ns)
), placed AS (
    SELECT *, median(period) OVER (PARTITION BY variant, source, name, rank, device) AS usual FROM sample
)
SELECT variant, source, name, count(*) AS samples, max(abs(value)) AS largest, bool_or(length > 0) AS spans,
       -- What counts is the hole between two samples: in a thinned bundle those of one series differ in length.
       list_sort(list(period) FILTER (period > 2 * usual AND hole > usual), 'DESC') AS gaps
FROM placed GROUP BY variant, source, name, rank, device ORDER BY variant, source, name
"""


def counters(bundle: Bundle) -> Iterator[Check]:
    """Counter sets that hold nothing, and gaps between samples; clocks that a driver held down."""
    if not bundle.rows("counters"):
        return
    rows = bundle.query(_GAPS).to_pylist()
    for variant, own in groupby(rows, lambda row: row["variant"]):
        yield from scoped(bundle, variant, _samples(_watched(bundle, list(own))))
    # Not the stalls of Nsight Compute, such as warps_issue_stalled_math_pipe_throttle.
    clocks = [row for row in rows if "throttle" in row["name"].lower() and row["source"] != "ncu"]
    throttled = list(dict.fromkeys(row["name"] for row in clocks if row["largest"]))
    if throttled:
        message = f"clocks were throttled during the run ({', '.join(throttled[:3])})"
        yield Check("throttled", "warning", message, len(throttled), ("step-time", "bandwidth"))


def _watched(bundle: Bundle, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``rows`` without the gaps that are by design: pauses between bursts, and readings by the way."""
    if bundle.manifest.source != "attach":
        return rows
    pauses = max(expected_bursts(bundle.manifest) - 1, 0)
    return [row | {"gaps": (row["gaps"] or [])[pauses:] if _is_series(row) else []} for row in rows]


def _is_series(row: dict[str, Any]) -> bool:
    """Return whether samples of a watched server follow on each other: not readings by the way, nor what stands beside
    merged samples."""
    return row["spans"] and row["name"] not in (IDLE, *NONZERO.values())


def _samples(rows: list[dict[str, Any]]) -> Iterator[Check]:
    # NVML's means cover a whole capture: one sample is all there is.
    # So do sums of a whole run, which a load generator or a profiler wrote.
    single = ("aiperf", "sglang.benchmark", "proton", "ncu")
    silent = [
        row
        for row in rows
        if row["samples"] < 2 and not row["name"].startswith("gpm_") and row["source"] not in (*single, "log")
    ]
    if silent:
        names = ", ".join(row["name"] for row in silent[:3])
        message = f"{len(silent)} counters have fewer than two samples, such as {names}: the set measured nothing"
        yield Check("counter-empty", "error", message, len(silent), ("counters",))
    lively = {row["source"] for row in rows if row["largest"]}
    zero = {row["source"] for row in rows} - lively
    if zero:
        message = f"every counter of {', '.join(sorted(zero))} is zero throughout: the set measured nothing"
        yield Check("counter-zero", "error", message, len(zero), ("counters",))
    gaps = [row for row in rows if row["gaps"] and row["source"] not in (*single, "log")]
    if gaps:
        worst = max(gaps, key=lambda row: row["gaps"][0])
        message = (
            f"{sum(len(row['gaps']) for row in gaps)} gaps of more than two periods between counter samples, the "
            f"longest {worst['gaps'][0] / 1e6:.3g} ms ({worst['name']})"
        )
        yield Check("counter-gap", "warning", message, len(gaps))


def clocks(bundle: Bundle) -> Iterator[Check]:
    """Clocks that were brought together badly."""
    names = [record.name for record in bundle.manifest.variants]
    sources = bundle.manifest.clock.sources
    for source in sources:
        if source.residual_ns <= RESIDUAL_NS:
            continue
        # A source read for one variant is named after it; a clock placed badly refuses nothing of the others.
        whose = tuple(name for name in names if source.name.endswith(f": {name}"))
        off = f"{source.residual_ns / 1e3:.1f} us"
        if _as_a_whole(source, sources) and source.residual_ns <= RESIDUAL_WHOLE_NS:
            if source.name.startswith(_HOST_CLOCK):
                name = source.name.replace(_HOST_CLOCK, "kernels, ", 1)
                message = f"the trace of {name!r} as a whole lies within {off} of its steps: order within it holds"
                yield Check("clock-residual", "warning", message, 1, (), whose)
            continue
        refused = source.residual_ns > RESIDUAL_REFUSED_NS
        message = (
            f"the clock of {source.name!r} agrees with the trace's to {off} only: spans closer than that have no order"
        )
        claims: tuple[Claim, ...] = ("order",) if refused else ()
        yield Check("clock-residual", "error" if refused else "warning", message, 1, claims, whose)


_HOST_CLOCK, _DEVICE_CLOCK = "kernels, host: ", "kernels, device: "


def _as_a_whole(source: ClockSource, sources: Sequence[ClockSource]) -> bool:
    """Whether host and device rows of one trace were moved by one and the same fit: an engine's own trace is."""
    pairs = ((_HOST_CLOCK, _DEVICE_CLOCK), (_DEVICE_CLOCK, _HOST_CLOCK))
    others = [source.name.replace(mine, other, 1) for mine, other in pairs if source.name.startswith(mine)]
    return any(
        (one.offset_ns, one.origin_ns, one.drift_ppb) == (source.offset_ns, source.origin_ns, source.drift_ppb)
        for one in sources
        if one.name in others
    )


def window(bundle: Bundle) -> Iterator[Check]:
    """An empty window: nothing was recorded, or no step was found in it. Or no window at all, by what was ingested."""
    source = bundle.manifest.source
    if source in ("log", "benchmark"):
        message = f"a {source} holds no device rows and no steps"
        yield Check("no-time-line", "info", message, 0, tuple(claim for claim in CLAIMS if claim != "counters"))
        return
    if source == "ncu":
        message = "kernels were replayed one by one, laid end to end here: their places in time mean nothing"
        yield Check("replayed-alone", "info", message, 0, ("steps", "step-time", "device-time", "causes", "order"))
        return
    if source == "proton" and not bundle.rows("kernels"):
        message = "the profile holds sums by name: no kernel has a place in time"
        yield Check("no-time-line", "info", message, 0, tuple(claim for claim in CLAIMS if claim != "kernel-sums"))
        return
    if source == "proton" and bundle.rows("lanes"):
        message = "times inside kernels are cycles of an SM, written as nanoseconds: only their shares of a launch hold"
        refused: tuple[Claim, ...] = (
            "steps",
            "step-time",
            "device-time",
            "kernel-sums",
            "bandwidth",
            "causes",
            "order",
        )
        yield Check("cycles-as-time", "info", message, bundle.rows("lanes"), refused)
        return
    if source == "attach":
        yield from _from_outside(bundle)
        return
    foreign = source != "run"
    if not bundle.rows("kernels") and foreign:
        message = "the trace holds no device rows: it shows the host only"
        yield Check("no-device-rows", "error", message, 0, ("device-time", "kernel-sums", "bandwidth", "order"))
    if not bundle.rows("steps"):
        yield Check("no-steps", "warning", "no step was found: times are those of the whole window", 0, ("steps",))
    if foreign:
        message = "the profiler was on throughout: how fast the engine is without it is not in the trace"
        yield Check("profiled-throughout", "info", message, 0, ("step-time",))


def _from_outside(bundle: Bundle) -> Iterator[Check]:
    """A server that was watched: what its counters say, and what nobody saw."""
    message = (
        "no trace was made: counters and the server's own numbers say means over the window, so bytes, shares and "
        "rates; of single steps and kernels they say nothing"
    )
    refused: tuple[Claim, ...] = ("steps", "device-time", "kernel-sums", "bandwidth", "counts", "causes", "order")
    yield Check("watched-from-outside", "info", message, 0, refused)
    found = bursts(bundle)
    if found is None:
        message = "no counter of device memory was read (table limits says why): nothing is said of bytes"
        yield Check("no-device-counters", "warning", message, 0, ("counters",))
        return
    taken, pauses = len(found.spans), found.pauses
    if taken < found.expected:
        message = f"{found.expected - taken} of {found.expected} bursts of counters hold no sample of their own"
        yield Check("burst-lost", "warning", message, found.expected - taken)
    if len(pauses):
        message = (
            f"counters were read in {taken} bursts, {found.covered_ns / 1e9:.2g} s in all, with pauses of up to "
            f"{pauses.max() / 1e9:.2g} s to decode them: that is by design, and means are those of the bursts"
        )
        yield Check("counter-bursts", "info", message, taken)


_OVERHEAD = """
SELECT variant, count(*) AS rows, sum(end_ns - start_ns)::BIGINT AS ns FROM host
WHERE category = 'overhead' AND step_id IS NOT NULL GROUP BY variant ORDER BY variant
"""


def overhead(bundle: Bundle) -> Iterator[Check]:
    """The profiler's own work within steps."""
    for row in bundle.query(_OVERHEAD).to_pylist():
        message = f"the profiler itself worked for {row['ns'] / 1e6:.3g} ms within steps ({row['rows']} times)"
        found = Check("profiler-overhead", "warning", message, row["rows"], ("step-time",))
        yield from scoped(bundle, row["variant"], [found])


_LOSSES = """
SELECT losses.variant, probe, kind, severity, detail, "count", first_ns, (
    SELECT list(DISTINCT steps.variant ORDER BY steps.variant) FROM steps WHERE end_ns > losses.first_ns) AS later
FROM losses WHERE severity IN ('error', 'data_loss') ORDER BY losses.variant, kind, detail
"""

_DEVICE: tuple[Claim, ...] = ("device-time", "kernel-sums", "bandwidth", "counts")
_HOST: tuple[Claim, ...] = ("causes", "order", "counts")
_RESTS_ON: Mapping[str, tuple[Claim, ...]] = MappingProxyType(
    {
        "pm_sampler": ("counters",),
        "nvml": ("counters",),
        "counters": ("counters",),
        "lanes": (),
        "static": (),
        "kernels": (*_DEVICE, "causes", "order"),
        "host": _HOST,
        "syncs": ("causes", "counts"),
        "steps": ("steps", "step-time"),
        **dict.fromkeys(("sequences", "tensors", "roofs", "env", "limits", "losses"), ()),
    }
)
"""Claims that rest on an instrument, or on a table that was cut off. What another instrument lost may concern all."""


def losses(bundle: Bundle) -> Iterator[Check]:
    """What the instruments or the reader lost: it refuses what rests on that instrument or table, of that variant."""
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in bundle.query(_LOSSES).to_pylist():
        for variant in _concerned(bundle, row):
            found.setdefault((row["severity"], variant), []).append(row)
    for (severity, variant), rows in found.items():
        yield from scoped(bundle, variant, [_lost(severity, rows)])


def _concerned(bundle: Bundle, row: Mapping[str, Any]) -> list[str | None]:
    """Return the variants that lack what ``row`` says. A cut table lacks rows after its last: those of variants with
    later steps."""
    if row["probe"] == CUT_PROBE and row["kind"] == CUT_KIND and row["variant"] is None and row["first_ns"] is not None:
        later = row["later"] or []
        return later if len(later) < len(bundle.manifest.variants) else [None]
    return [row["variant"]]


def _lost(severity: str, rows: list[dict[str, Any]]) -> Check:
    counts: dict[str, int] = {}
    refuses: dict[Claim, None] = {}
    cut = []
    for row in rows:
        source = row["probe"]
        if source == CUT_PROBE and row["kind"] == CUT_KIND:
            source = row["detail"].partition(":")[0]
            cut.append(source)
        else:
            counts[row["kind"]] = counts.get(row["kind"], 0) + row["count"]
        own = _RESTS_ON.get(source, tuple(CLAIMS))
        refuses |= dict.fromkeys(claim for claim in own if severity == "error" or claim == "counts")
    named = [f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    named += [f"table {name} was cut off" for name in dict.fromkeys(cut)]
    message = f"rows are missing or damaged: {', '.join(named[:5])} (table losses says more)"
    total = sum(counts.values()) + len(cut)
    if severity == "error":
        return Check("damaged", "error", message, total, tuple(refuses))
    # A table that was cut off and that no claim rests on is no doubt about anything that is shown.
    return Check("data-loss", "warning" if counts or refuses else "info", message, total, tuple(refuses))

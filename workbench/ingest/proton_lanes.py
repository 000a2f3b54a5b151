"""Read what Triton's Proton saw inside kernels: a chrome_trace of its instrumentation backend, into table ``lanes``.

A span is a scope of one warp (or of one CTA, where it says so). Proton writes one document; a launch's CTAs follow one
another, each with all its warps. Times are the SM's cycles, written as if one took a nanosecond, from a moment at which
the CTA began by the global clock: shares within a launch hold, lengths are too long by the SM's clock in GHz.
Format: triton-lang/triton, third_party/proton, TraceWriter.cpp, 3.6 to 3.9.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from workbench.errors import InputError
from workbench.ingest.bounded import Limits
from workbench.ingest.losses import Losses
from workbench.ingest.part import Part, Row, counter, limit
from workbench.ingest.proton import PROBE, proton_events, read_profile

PLACE = re.compile(r"(?P<kernel>.{1,4096}) Core(?P<sm>\d{1,9}) CTA(?P<cta>\d{1,9})", re.DOTALL)
WARP = re.compile(r"warp (\d{1,9})(?: \(line \d+\))?")
_MOST_NS = 1 << 62
EXACT_NS = (1 << 49) * 1000
"""From here on a time in microseconds as float64 has steps of 0.125 us and more."""


@dataclass(slots=True)
class _Launch:
    kernel: str
    ctas: set[int] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    """One CTA: when its spans ran, in cycles; how long it ran by the global clock, 0 where that is not told."""

    first: int
    last: int
    ns: int


def read_proton_lanes(path: Path, limits: Limits = Limits()) -> Part:  # noqa: B008
    """Read the trace in ``path``. Raises InputError where it holds no span inside a kernel.

    A cut-off document gives every complete span; spans that cannot be used are counted.
    """
    losses = Losses(PROBE)
    launches: list[_Launch] = []
    blocks: dict[tuple[int, int], _Block] = {}
    current = ("", -1, -1)
    for line in read_profile(path, losses, limits).decode("utf-8", "replace").splitlines():
        for event in proton_events(line, losses):
            if event.get("ph") != "X":
                continue
            place = PLACE.fullmatch(event["pid"]) if isinstance(event.get("pid"), str) else None
            if place is None:
                losses.add("not-kept-outside", "data_loss", "rows that are not inside a kernel")
                continue
            times = _times(event)
            if times is None:
                losses.add("unusable-event", "data_loss", "spans without usable times")
                continue
            began = _whole(event.get("args"), "Init Time (ns)")
            block = (place["kernel"], int(place["cta"]), began)
            # A CTA that comes again after another, or began at another time, is one of the next launch.
            if not launches or launches[-1].kernel != block[0] or (block != current and block[1] in launches[-1].ctas):
                launches.append(_Launch(block[0]))
            current = block
            launches[-1].ctas.add(block[1])
            launches[-1].rows.append(_row(event, place, times, len(launches) - 1))
            _note(blocks, (len(launches) - 1, block[1]), times, event.get("args"), began)
    if not launches:
        fix = 'proton.start(backend="instrumentation", data="trace")'
        raise InputError(f"{path}: nothing to read (no span inside a kernel)", hint=fix)
    return _part(launches, blocks, losses)


def _part(launches: list[_Launch], blocks: dict[tuple[int, int], _Block], losses: Losses) -> Part:
    spans = sum(len(launch.rows) for launch in launches)
    part = Part("proton", "Proton, spans inside kernels", losses, records=spans)
    part.tables = {
        "kernels": [_kernel(launch, number) for number, launch in enumerate(launches)],
        "lanes": sorted(
            (row for launch in launches for row in launch.rows), key=lambda row: (row["start_ns"], -row["end_ns"])
        ),
    }
    part.tables["counters"] = list(_cycles(launches))
    slowest = max(((one.last - one.first) / one.ns for one in blocks.values() if one.ns), default=0.0)
    known = f"; here at least {slowest:.2f} GHz" if slowest > 1 else ""
    why = f"Proton counts cycles and writes them as nanoseconds{known}"
    part.notes = [
        f"{spans} spans inside {len(launches)} launches of {len({launch.kernel for launch in launches})} kernels by "
        "Proton: shares within a launch hold, lengths are in cycles of the SM's clock"
    ]
    part.limits = [
        limit("lanes", "lengths of spans in time", why, "shares of a launch", "divide by the SM's clock in GHz"),
        limit("kernels", "kernels without scopes, and what lies outside scopes", "Proton sees scopes alone", "",
              "torch.profiler or nsys"),
        limit("host", "launches and what the host did", "Proton does not record it", "", "torch.profiler or nsys"),
        limit("steps", "decode steps", "spans of single launches", "", "trace with nsys or torch.profiler"),
    ]  # fmt: skip
    if part.tables["lanes"][-1]["start_ns"] >= EXACT_NS:
        why = "Proton writes microseconds since 1970 as float64"
        part.limits.append(limit("lanes", "starts of spans below 0.25 us", why, "lengths are exact", ""))
    return part


def _cycles(launches: list[_Launch]) -> Iterator[Row]:
    """Yield by kernel and scope what a warp spends in it, the median over warps and launches."""
    sums: dict[tuple[str, str], dict[tuple[int, int, int | None], int]] = defaultdict(lambda: defaultdict(int))
    for launch in launches:
        for row in launch.rows:
            warp = (row["kernel_id"], row["cta"], row["warp"])
            sums[launch.kernel, row["task"]][warp] += row["end_ns"] - row["start_ns"]
    for (kernel, task), warps in sums.items():
        yield counter(PROBE, f"cycles of a warp in {task}: {kernel}", median(warps.values()), "cycles")


def _kernel(launch: _Launch, number: int) -> Row:
    return {
        "kernel_id": number,
        "name": launch.kernel,
        "kind": "kernel",
        "device": 0,
        "stream": 0,
        "start_ns": min(row["start_ns"] for row in launch.rows),
        "end_ns": max(row["end_ns"] for row in launch.rows),
    }


def _row(event: dict[str, Any], place: re.Match[str], times: tuple[int, int], launch: int) -> Row:
    warp = WARP.fullmatch(str(event.get("tid", "")))
    return {
        "kernel_id": launch,
        "sm": int(place["sm"]),
        "cta": int(place["cta"]),
        "warp": int(warp[1]) if warp else None,
        "task": str(event.get("name", ""))[:400] or "(unnamed)",
        "kind": "task",
        "start_ns": times[0],
        "end_ns": times[1],
    }


def _note(
    blocks: dict[tuple[int, int], _Block], key: tuple[int, int], times: tuple[int, int], args: Any, began: int
) -> None:
    ended, wrote = _whole(args, "Post Final Time (ns)"), _whole(args, "Finalization Time (ns)")
    ns = max(ended - wrote - began, 0) if began >= 0 and ended >= 0 and wrote >= 0 else 0
    known = blocks.setdefault(key, _Block(*times, ns))
    known.first, known.last = min(known.first, times[0]), max(known.last, times[1])


def _times(event: dict[str, Any]) -> tuple[int, int] | None:
    """Return start and end in whole ns; None where they are no times."""
    try:
        start, length = (round(float(event[key]) * 1000) for key in ("ts", "dur"))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    usable = 0 <= length < _MOST_NS and -_MOST_NS < start < _MOST_NS
    return (start, start + length) if usable else None


def _whole(args: Any, key: str) -> int:
    """Return a whole number that is no less than 0; -1 where there is none."""
    value = args.get(key) if isinstance(args, dict) else None
    return value if type(value) is int and 0 <= value < _MOST_NS else -1

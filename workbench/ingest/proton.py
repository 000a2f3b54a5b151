"""Read what Triton's Proton wrote: its tree of sums (hatchet JSON), or its chrome_trace.

The tree has a time and a count for each frame and no moment at which anything ran: nothing of it can be a row of
``kernels``. It becomes counters of the whole run. The trace has kernels by stream and no host.
Formats: triton-lang/triton, third_party/proton.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from workbench.errors import InputError
from workbench.ingest.bounded import Limits, read_blocks
from workbench.ingest.columns import Columns, Names
from workbench.ingest.kineto import KinetoTrace
from workbench.ingest.kineto_events import MISSING
from workbench.ingest.losses import Losses
from workbench.ingest.nsys import DEVICE_COLUMNS
from workbench.ingest.part import Part, Row, counter, limit

PROBE = "proton"
MAX_BYTES = 1 << 30
"""Largest profile, decompressed: it is read at once. Trees of real runs have some MB."""

TIME, LAUNCHES = "kernel time", "kernel launches"
_OWN = frozenset({"time (ns)", "count", "device_id", "device_type"})


def read_proton_tree(path: Path, limits: Limits = Limits()) -> Part:  # noqa: B008
    """Read the tree in ``path``. Raises InputError where it is damaged or holds no kernel."""
    losses = Losses(PROBE)
    try:
        document = msgspec.json.decode(read_profile(path, losses, limits))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{path}: a damaged profile of Proton ({str(error)[:120]})", hint="profile again") from None
    roots = [one for one in (document if isinstance(document, list) else []) if isinstance(one, dict)]
    sums: dict[tuple[str, str], float] = {}
    for node in _nodes(root for root in roots if "frame" in root):
        metrics, frame = node.get("metrics"), node.get("frame")
        if not isinstance(metrics, dict) or not isinstance(frame, dict):
            losses.add("unusable-frame", "data_loss", "frames without a name or metrics")
            continue
        name = str(frame.get("name", ""))[:400]
        for metric, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and metric != "device_id":
                key = (name, str(metric)[:80])
                sums[key] = sums.get(key, 0.0) + value
    timed = [name for (name, metric), value in sums.items() if metric == "time (ns)" and value > 0]
    kernels = sorted(timed, key=lambda name: -sums[name, "time (ns)"])
    if not kernels:
        raise InputError(f"{path}: nothing to read (no frame has a time)", hint="profile kernels, then finalize")
    part = Part("proton", "Proton, a tree of sums", losses, records=len(sums))
    rows: list[Row] = []
    for name in kernels:
        rows.append(counter(PROBE, f"{TIME}: {name}", sums[name, "time (ns)"], "ns"))
        if (name, "count") in sums:
            rows.append(counter(PROBE, f"{LAUNCHES}: {name}", sums[name, "count"], "launches"))
    rows += [
        counter(PROBE, f"{metric}: {name}", value, "B" if metric == "bytes" else "")
        for (name, metric), value in sums.items()
        if metric not in _OWN
    ]
    part.tables = {"counters": rows, "env": list(_devices(roots))}
    part.device = next((row["value"] for row in part.tables["env"] if row["key"].endswith(".arch")), "")
    part.notes = [f"Proton's sums over {len(kernels)} names: times of kernels added up, at no known moment"]
    part.limits = [
        limit("kernels", "when kernels ran, gaps, overlap", "Proton's tree holds sums", "time and count by name",
              'proton.start(data="trace")'),
        limit("steps", "decode steps", "Proton's tree holds sums", "", 'proton.start(data="trace")'),
        *_both(),
    ]  # fmt: skip
    return part


def _both() -> Iterator[dict[str, str]]:
    fix = "sample counters beside the engine"
    yield limit("pm_sampler", "HBM throughput", "Proton does not record it", "", fix)
    yield limit("syncs", "waits of the host", "Proton does not record them", "", "torch.profiler or nsys")
    yield limit(
        "static", "registers, spills, occupancy", "Proton does not record them", "", "inspect the kernels' code"
    )


def _nodes(roots: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield every frame; without recursion, for trees of any depth."""
    stack = list(roots)
    while stack:
        node = stack.pop()
        yield node
        children = node.get("children")
        stack += [child for child in children if isinstance(child, dict)] if isinstance(children, list) else []


def _devices(roots: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield facts of the devices, which follow the tree: {"CUDA": {"0": {"arch": "90", …}}}."""
    for root in roots:
        for kind, devices in root.items():
            if "frame" in root or not isinstance(devices, dict):
                continue
            for number, facts in list(devices.items())[:64]:
                for key, value in facts.items() if isinstance(facts, dict) else ():
                    yield {"key": f"{kind}.{number}.{key}"[:400], "value": str(value)[:400]}


def read_proton_trace(path: Path, limits: Limits = Limits()) -> KinetoTrace:  # noqa: B008
    """Read the chrome_trace in ``path``: one document a stream, a line each.

    Raises InputError where it holds no kernel. A cut-off document gives every complete event.
    """
    losses = Losses(PROBE)
    names, device, total, stacks, inside = Names(), Columns(*DEVICE_COLUMNS), 0, 0, 0
    for line in read_profile(path, losses, limits).decode("utf-8", "replace").splitlines():
        found: list[tuple[str, int, int, int]] = []
        for event in proton_events(line, losses):
            total += 1
            if event.get("ph") != "X":
                continue
            if event.get("cat") != "kernel" or isinstance(event.get("pid"), str):
                inside += 1
                continue
            try:
                start, length = (round(float(event[key]) * 1000) for key in ("ts", "dur"))
                stream = int(event.get("tid", 0))
            except (KeyError, TypeError, ValueError, OverflowError):
                losses.add("unusable-event", "data_loss", "kernels without usable times")
                continue
            if not (0 <= length < 1 << 60 and -(1 << 60) < start < 1 << 60 and -(1 << 62) < stream < 1 << 62):
                losses.add("unusable-event", "data_loss", "kernels without usable times")
                continue
            stacks += bool(isinstance(event.get("args"), dict) and event["args"].get("call_stack"))
            found.append((str(event.get("name", "")), start, length, stream))
        columns = {name: np.full(len(found), MISSING, np.int64) for name in DEVICE_COLUMNS}
        columns["name"] = names.codes((name for name, *_ in found), len(found))
        columns["start"] = np.array([start for _, start, _, _ in found], np.int64)
        columns["end"] = np.array([start + length for _, start, length, _ in found], np.int64)
        columns["stream"] = np.array([stream for *_, stream in found], np.int64)
        columns["kind"] = columns["device"] = np.zeros(len(found), np.int64)
        device.add(columns)
    losses.add("not-kept-stacks", "info", "scopes around kernels: they have no times", count=stacks)
    losses.add("not-kept-inside", "data_loss", "spans inside kernels, in a trace of whole ones", count=inside)
    if not device.rows:
        raise InputError(f"{path}: nothing to read (no kernel of Proton in it)", hint='proton.start(data="trace")')
    nothing = np.zeros(0, np.int64)
    host = ("name", "category", "start", "end", "process", "thread", "correlation")
    return KinetoTrace(
        names=names.texts,
        device=device.finish(),
        host=dict.fromkeys(host, nothing),
        syncs=dict.fromkeys(("name", "kind", "start", "end", "device", "stream", "correlation"), nothing),
        marks=dict.fromkeys(("name", "start", "end", "device", "stream"), nothing),
        counters=[],
        header={},
        threads={},
        losses=losses,
        events=total,
    )


def trace_limits() -> list[dict[str, str]]:
    """Return what a chrome_trace of Proton cannot tell."""
    return [
        limit("host", "launches and what the host did", "Proton does not record it", "", "torch.profiler or nsys"),
        limit("kernels", "grids, blocks and devices of kernels", "Proton does not record them",
              "all on device 0", "torch.profiler or nsys"),
        *_both(),
    ]  # fmt: skip


def proton_events(line: str, losses: Losses) -> Iterator[dict[str, Any]]:
    """Yield the events of one document; those before the cut where it is cut off."""
    at = line.find('"traceEvents"')
    at = line.find("[", at) + 1 if at >= 0 else 0
    if not at:
        return
    decoder = json.JSONDecoder()
    while True:
        while at < len(line) and line[at] in ", \t":
            at += 1
        if at < len(line) and line[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(line, at)
        except (ValueError, RecursionError):
            losses.add("truncated", "data_loss", "a document ends inside an event, or is damaged there")
            return
        if isinstance(event, dict):
            yield event


def read_profile(path: Path, losses: Losses, limits: Limits) -> bytes:
    """Return the bytes of ``path``, decompressed; what lies beyond MAX_BYTES is a loss."""
    allowed = Limits(min(limits.max_bytes, MAX_BYTES), limits.max_ratio)
    return b"".join(read_blocks(path, losses, allowed))

"""A foreign trace into a bundle like any other: read → find steps → write tables → say what is not known."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import InputError
from workbench.ingest import environment
from workbench.ingest.bounded import Limits
from workbench.ingest.byte_model import Model, roof_rows, tensor_rows
from workbench.ingest.kineto import KinetoTrace, read_kineto
from workbench.ingest.launches import match_launches
from workbench.ingest.steps import FoundSteps, find_steps
from workbench.ingest.tables import VARIANT, Tables, counter_rows, step_rows
from workbench.ingest.unknown import unknown
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""

_SINCE_1970_NS = 10**18
"""Times above this count from 1970: 2001 and later."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What was made: the bundle's folder, the rule that found steps and how many, events read."""

    path: Path
    rule: str
    steps: int
    events: int


def ingest_kineto(
    trace_file: Path,
    out: Path,
    *,
    model: Model | None = None,
    hardware: str | None = None,
    limits: Limits = Limits(),  # noqa: B008
    progress: Progress = lambda *_: None,
) -> Ingested:
    """Read the trace ``trace_file`` and write its bundle to the new folder ``out``.

    ``model`` adds a byte model, ``hardware`` the roof it is divided by (default: the device that the trace names, where
    it is known). Raises InputError, before anything is written, where the file is no trace of torch.profiler or a name
    is not known. A damaged trace gives the bundle of what could be read; table ``losses`` says what is missing.
    """
    progress("read", 0, 3)
    trace = read_kineto(trace_file, limits)
    progress("find steps", 1, 3)
    launches = match_launches(trace)
    found = find_steps(trace, launches)
    tensors = tensor_rows(model, found.steps) if model else []
    roofs = roof_rows(hardware, environment.device_name(trace.header))
    manifest = _manifest(trace_file, trace, found, launches, model, hardware)
    progress("write", 2, 3)
    with BundleWriter.create(out, manifest) as writer:
        _write(writer, trace, found, tensors, roofs)
    progress("write", 3, 3)
    return Ingested(out, found.rule, len(found.steps), trace.events)


def bundle_name(trace_file: Path) -> str:
    """Return the name of a trace's bundle: the file's without its endings."""
    name = trace_file.name
    for ending in (".gz", ".json", ".trace", ".pt"):
        name = name.removesuffix(ending)
    return name or "trace"


def _write(
    writer: BundleWriter,
    trace: KinetoTrace,
    found: FoundSteps,
    tensors: list[dict[str, Any]],
    roofs: list[dict[str, Any]],
) -> None:
    per_sm = {
        ordinal: most
        for ordinal, entry in environment.devices(trace.header).items()
        if type(most := entry.get("maxThreadsPerMultiprocessor")) is int and most > 0
    }
    tables = Tables(trace, found, environment.rank(trace.header), per_sm)
    writer.append("steps", step_rows(found))
    for name, slices in (("kernels", tables.kernels()), ("host", tables.host()), ("syncs", tables.syncs())):
        for piece in slices:
            writer.append_table(name, piece)
    writer.append("counters", counter_rows(trace))
    variant = {"variant": VARIANT}
    writer.append("tensors", [variant | row for row in tensors])
    writer.append("roofs", roofs)
    writer.append("limits", [variant | row for row in unknown(trace, found, modelled_bytes=bool(tensors))])
    writer.append("env", environment.facts(trace.header, trace.threads, trace.losses))
    writer.append("losses", [variant | row for row in trace.losses.rows()])


def _manifest(
    trace_file: Path,
    trace: KinetoTrace,
    found: FoundSteps,
    launches: Any,
    model: Model | None,
    hardware: str | None,
) -> Manifest:
    settings: dict[str, Any] = {"model": asdict(model) if model else {}, "hardware": hardware or ""}
    return Manifest(
        source="kineto",
        scenario={"name": trace_file.name, "trace": {"file": trace_file.name, "bytes": trace_file.stat().st_size}},
        device={"name": environment.device_name(trace.header) or "unknown"},
        variants=[VariantRecord(name=VARIANT, settings=settings)],
        clock=_clock(trace, launches),
        notes=[f"ingested from a trace of torch.profiler; steps found by: {found.rule}", *found.notes],
    )


def _clock(trace: KinetoTrace, launches: Any) -> Clock:
    """Return the trace's clock. Kernels that begin before their launch show by how much host and device disagree."""
    matched = np.flatnonzero(launches >= 0)
    early = trace.host["start"][launches[matched]] - trace.device["start"][matched]
    residual = max(0, int(early.max())) if len(early) else 0
    offset = environment.base_ns(trace.header)
    if offset is None:
        starts = [column["start"].min() for column in (trace.host, trace.device) if len(column["start"])]
        offset = 0 if starts and min(starts) > _SINCE_1970_NS else None
    sources = [ClockSource(name="device", offset_ns=0, residual_ns=residual)]
    return Clock(name="torch.profiler", utc_offset_ns=offset, sources=sources)


def require_new(out: Path) -> None:
    """Raise InputError where ``out`` is taken, before a large trace is read."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists", hint="choose another folder with -o; nothing is overwritten")

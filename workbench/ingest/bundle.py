"""Foreign files into a bundle like any other: tell formats → read → find steps → write tables → say what is missing."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from workbench.errors import InputError
from workbench.ingest import environment
from workbench.ingest.benchmark_json import read_aiperf, read_sglang_benchmark
from workbench.ingest.bounded import Limits
from workbench.ingest.byte_model import Model, roof_rows, tensor_rows
from workbench.ingest.columns import Ints
from workbench.ingest.engine_log import read_log
from workbench.ingest.join import join, stated_step
from workbench.ingest.kineto import KinetoTrace
from workbench.ingest.launches import match_launches
from workbench.ingest.ncu_csv import read_ncu_csv
from workbench.ingest.ncu_report import read_ncu_report
from workbench.ingest.part import Part
from workbench.ingest.proton import read_proton_tree
from workbench.ingest.proton_lanes import read_proton_lanes
from workbench.ingest.sniff import READS, Format, sniff
from workbench.ingest.steps import FoundSteps, find_steps
from workbench.ingest.tables import VARIANT, Tables, counter_rows, step_rows
from workbench.ingest.time_line import TIME_LINES, TimeLine, read_time_line
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What was made: the bundle's folder, the rule that found steps and how many, records read, what each file was.

    ``rule`` is "none" where no file has a time line.
    """

    path: Path
    rule: str
    steps: int
    events: int
    files: tuple[str, ...] = ()
    time_line: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """What the user says beside the files.

    ``model`` adds a byte model, ``hardware`` the roof it is divided by (default: the device that a trace names, where
    it is known); ``log_utc_offset``: by how many hours a log's times differ from UTC; ``clean_step_us``: how long a
    step takes without the profiler, where no log or benchmark is there to say it.
    """

    model: Model | None = None
    hardware: str | None = None
    limits: Limits = field(default_factory=Limits)
    log_utc_offset: float | None = None
    clean_step_us: float | None = None


def ingest_files(
    files: Sequence[Path],
    out: Path,
    options: Options = Options(),
    progress: Progress = lambda *_: None,
) -> Ingested:
    """Read ``files``, all of one run, and write their bundle to the new folder ``out``.

    At most one of them may have a time line; logs are placed on its clock. Raises InputError, before anything is
    written, where a file cannot be read or a name is not known. A damaged file gives the bundle of what could be read;
    table ``losses`` says what is missing.
    """
    progress("read", 0, 3)
    formats = [(file, sniff(file, options.limits)) for file in files]
    lines = [(file, format_) for file, format_ in formats if format_ in TIME_LINES]
    if len(lines) > 1:
        named = " and ".join(str(file) for file, _ in lines[:2])
        raise InputError(f"{named}: each has a time line of its own", hint="ingest them one by one")
    parts = [
        (file, _read_part(file, format_, options.limits)) for file, format_ in formats if format_ not in TIME_LINES
    ]
    told = tuple(READS[format_] for _, format_ in formats)
    if not lines:
        return _write_parts(parts, out, options, told, progress)
    file, format_ = lines[0]
    line = read_time_line(file, format_, options.limits)
    return _write_line(file, line, parts, out, options, told, progress)


def ingest_kineto(
    trace_file: Path,
    out: Path,
    *,
    model: Model | None = None,
    hardware: str | None = None,
    limits: Limits = Limits(),  # noqa: B008
    progress: Progress = lambda *_: None,
) -> Ingested:
    """Read the trace of torch.profiler ``trace_file`` into the new folder ``out``, as ``ingest_files`` does."""
    progress("read", 0, 3)
    line = read_time_line(trace_file, "kineto", limits)
    return _write_line(trace_file, line, [], out, Options(model, hardware, limits), (READS["kineto"],), progress)


def bundle_name(trace_file: Path) -> str:
    """Return the name of a trace's bundle: the file's without its endings."""
    name = trace_file.name
    for ending in (".gz", ".json", ".trace", ".pt", ".sqlite", ".ncu-rep", ".csv", ".hatchet", ".chrome_trace", ".log"):
        name = name.removesuffix(ending)
    return name or "trace"


def _read_part(file: Path, format_: Format, limits: Limits) -> Part:
    readers: dict[Format, Callable[[], Part]] = {
        "ncu-report": lambda: read_ncu_report(file),
        "ncu-csv": lambda: read_ncu_csv(file, limits),
        "proton-tree": lambda: read_proton_tree(file, limits),
        "proton-lanes": lambda: read_proton_lanes(file, limits),
        "sglang-log": lambda: read_log(file, "sglang", limits),
        "vllm-log": lambda: read_log(file, "vllm", limits),
        "aiperf": lambda: read_aiperf(file, limits),
        "sglang-benchmark": lambda: read_sglang_benchmark(file, limits),
    }
    return readers[format_]()


def _write_line(
    file: Path,
    line: TimeLine,
    parts: list[tuple[Path, Part]],
    out: Path,
    options: Options,
    told: tuple[str, ...],
    progress: Progress,
) -> Ingested:
    """Write the bundle of a time line and of what the other files add to it."""
    trace = line.trace
    progress("find steps", 1, 3)
    launches = match_launches(trace)
    found = find_steps(trace, launches)
    device = environment.device_name(trace.header)
    tensors = tensor_rows(options.model, found.steps) if options.model else []
    roofs = roof_rows(options.hardware, device)
    manifest = _manifest([file, *(path for path, _ in parts)], line.source, device, options)
    notes = [f"ingested from {_article(line.what)} of {line.what}; steps found by: {found.rule}", *found.notes]
    manifest = msgspec.structs.replace(manifest, clock=_clock(line, launches), notes=notes)
    window = _window(trace, found)
    if options.clean_step_us is not None:
        manifest = stated_step(manifest, line, found, options.clean_step_us)
    for path, part in parts:
        manifest = join(manifest, path, part, line, found, window, options.log_utc_offset)
    progress("write", 2, 3)
    with BundleWriter.create(out, manifest) as writer:
        _write(writer, line, found, tensors, roofs)
        for _, part in parts:
            _write_part(writer, part)
    progress("write", 3, 3)
    events = trace.events + sum(part.records for _, part in parts)
    return Ingested(out, found.rule, len(found.steps), events, told)


def _write_parts(
    parts: list[tuple[Path, Part]], out: Path, options: Options, told: tuple[str, ...], progress: Progress
) -> Ingested:
    """Write the bundle of files without a time line, each on its own clock."""
    profiles = [path for path, part in parts if "kernels" in part.tables]
    if len(profiles) > 1:
        raise InputError(f"{profiles[0]} and {profiles[1]}: two profiles of kernels", hint="ingest them one by one")
    device = next((part.device for _, part in parts if part.device), "")
    tensors = tensor_rows(options.model, []) if options.model else []
    roofs = roof_rows(options.hardware, device)
    first = parts[0][1]
    manifest = _manifest([path for path, _ in parts], first.source, device, options)
    notes = [f"{path.name}: {note}" for path, part in parts for note in part.notes]
    name = "the log's, time on the wall" if first.source == "log" else first.what
    manifest = msgspec.structs.replace(manifest, clock=Clock(name=name), notes=notes)
    progress("write", 2, 3)
    with BundleWriter.create(out, manifest) as writer:
        for _, part in parts:
            _write_part(writer, part)
        _write_model(writer, tensors, roofs)
    progress("write", 3, 3)
    return Ingested(out, "none", 0, sum(part.records for _, part in parts), told, time_line=False)


def _write(
    writer: BundleWriter,
    line: TimeLine,
    found: FoundSteps,
    tensors: list[dict[str, Any]],
    roofs: list[dict[str, Any]],
) -> None:
    trace = line.trace
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
    for piece in line.counters(VARIANT):
        writer.append_table("counters", piece)
    _write_model(writer, tensors, roofs)
    writer.append("limits", [{"variant": VARIANT} | row for row in line.unknown(found, bool(tensors))])
    writer.append("env", environment.facts(trace.header, trace.threads, trace.losses))
    writer.append("losses", [{"variant": VARIANT} | row for row in trace.losses.rows()])


def _write_part(writer: BundleWriter, part: Part) -> None:
    variant = {"variant": VARIANT}
    for name, rows in part.tables.items():
        writer.append(name, rows if name == "env" else [variant | row for row in rows])
    writer.append("limits", [variant | row for row in part.limits])
    writer.append("losses", [variant | row for row in part.losses.rows()])


def _write_model(writer: BundleWriter, tensors: list[dict[str, Any]], roofs: list[dict[str, Any]]) -> None:
    writer.append("tensors", [{"variant": VARIANT} | row for row in tensors])
    writer.append("roofs", roofs)


def _manifest(files: list[Path], source: Any, device: str, options: Options) -> Manifest:
    settings: dict[str, Any] = {
        "model": asdict(options.model) if options.model else {},
        "hardware": options.hardware or "",
    }
    first, *more = [{"file": file.name, "bytes": file.stat().st_size} for file in files]
    scenario: dict[str, Any] = {"name": files[0].name, "trace": first}
    return Manifest(
        source=source,
        scenario=scenario | ({"with": more} if more else {}),
        device={"name": device or "unknown"},
        variants=[VariantRecord(name=VARIANT, settings=settings)],
    )


def _clock(line: TimeLine, launches: Ints) -> Clock:
    """Return the trace's clock. Kernels that begin before their launch show by how much host and device disagree."""
    trace = line.trace
    matched = np.flatnonzero(launches >= 0)
    early = trace.host["start"][launches[matched]] - trace.device["start"][matched]
    residual = max(0, int(early.max())) if len(early) else 0
    sources = [ClockSource(name="device", offset_ns=0, residual_ns=residual)]
    return Clock(name=line.what, utc_offset_ns=line.utc_offset_ns, sources=sources)


def _window(trace: KinetoTrace, found: FoundSteps) -> tuple[int, int]:
    """Return when the trace's steps ran; without steps, when anything did."""
    if found.steps:
        return found.steps[0].start, found.steps[-1].end
    spans = [columns for columns in (trace.device, trace.host) if len(columns["start"])]
    if not spans:
        return 0, 0
    return min(int(one["start"].min()) for one in spans), max(int(one["end"].max()) for one in spans)


def _article(what: str) -> str:
    return "an export" if what == "Nsight Systems" else "a trace"


def require_new(out: Path) -> None:
    """Raise InputError where ``out`` is taken, before a large trace is read."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists", hint="choose another folder with -o; nothing is overwritten")

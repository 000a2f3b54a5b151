"""A running server, watched from outside, into a bundle: nothing is loaded into its process.

    choose the GPU → read the engine's counters → arm the sampler and NVML → wait → stop → read again → write

What only the engine knows (tokens, forwards) comes from its metrics; what only the device knows (bytes, CTAs) from the
sampler. Where one is missing the bundle says so, and what stands in for it.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.engines.gpus import Gpu, choose, gpus
from workbench.engines.metrics import Snapshot, check_url, read_metrics, server_info, start_profile
from workbench.errors import UnfitError, WorkbenchError
from workbench.hardware import machine_fingerprint
from workbench.ingest.byte_model import Model, roof_rows, routing, tensor_rows
from workbench.ingest.steps import FoundStep
from workbench.probes.protocol import Capture, Missing
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord

if TYPE_CHECKING:
    from workbench.probes.pm_sampler import PmSampler

VARIANT = "attached"
Progress = Callable[[str, int, int], None]
POLL_S = 1.0

BURST_S = 0.3
"""Counters are read in bursts: what is sampled in 1 s takes 6 s to decode at 10 us (CUPTI 13.4, H200), and the
hardware's buffer holds half a second."""

KEPT_INFO = (
    "model_path",
    "version",
    "tp_size",
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "moe_runner_backend",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "max_running_requests",
)
"""Fields of /server_info that the bundle keeps; the rest may hold keys and addresses."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to watch. ``profile_steps`` > 0 asks the server for a trace of so many forwards, after the counters.

    ``width``, ``batch`` and ``context`` are of the byte model, where ``model`` names one: what the server decodes.
    ``tok_s`` and ``accept_length``: what its client measures, for a server without metrics.
    """

    seconds: float = 20.0
    interval_ns: int = 10_000
    model: Model | None = None
    width: int = 1
    batch: int = 1
    context: int = 0
    tok_s: float | None = None
    accept_length: float | None = None
    hardware: str | None = None
    profile_steps: int = 0
    profile_folder: str = ""


@dataclass(slots=True)
class Watched:
    """What was read meanwhile. ``info``: fields of ``/server_info`` that are kept. ``bursts``: when counters were read,
    start and end."""

    snapshots: list[Snapshot] = field(default_factory=list)
    captures: list[tuple[str, Capture]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    window: tuple[int, int] = (0, 0)
    bursts: list[tuple[int, int]] = field(default_factory=list)


def attach(
    out: Path,
    *,
    gpu: int | None = None,
    pid: int | None = None,
    url: str | None = None,
    options: Options = Options(),
    progress: Progress = lambda *_: None,
) -> Path:
    """Watch one GPU for ``options.seconds`` and write the bundle to the new folder ``out``; return it.

    Raises InputError or UnfitError, before anything is written, where there is nothing to watch.
    """
    address = check_url(url) if url else ""
    chosen = choose(gpus(), index=gpu, pid=pid)
    if address:
        read_metrics(address)  # a wrong address must not cost the wait
    tensors = tensor_rows(options.model, [_decoded(options)]) if options.model else []
    roofs = roof_rows(options.hardware, chosen.name)
    watched = watch(chosen, address, options, progress)
    manifest = Manifest(
        source="attach",
        scenario={"name": f"attached to {address or chosen.name}"},
        command=["workbench", *sys.argv[1:]],
        environment=machine_fingerprint(),
        device={"name": chosen.name, "uuid": chosen.uuid, "pids": list(chosen.pids)},
        variants=[VariantRecord(name=VARIANT, settings=_settings(options, watched, address, pid))],
        clock=Clock(
            name="monotonic (time.perf_counter_ns)",
            utc_offset_ns=time.time_ns() - time.perf_counter_ns(),
            sources=[
                ClockSource(name=name, offset_ns=capture.offset_ns, residual_ns=capture.residual_ns)
                for name, capture in watched.captures
                if not capture.missing
            ],
        ),
    )
    with BundleWriter.create(out, manifest) as writer:
        _write(writer, watched, tensors, roofs)
    return out


def watch(chosen: Gpu, address: str, options: Options, progress: Progress = lambda *_: None) -> Watched:
    """Read counters and metrics of ``chosen`` for a while. An instrument that fails is missing, not fatal."""
    from workbench.probes.nvml import NvmlProbe
    from workbench.probes.pm_sampler import PmSampler

    watched = Watched()
    nvml = NvmlProbe(chosen.uuid)
    with PmSampler(uuid=chosen.uuid, interval_ns=options.interval_ns) as sampler:
        no_counters, no_nvml = sampler.available(), nvml.available()
        watched.missing += [missing for missing in (no_counters, no_nvml) if missing]
        if no_counters and no_nvml and not address:
            raise UnfitError(f"nothing can be read of {chosen.name}: {no_counters.why}", hint=no_counters.fix)
        if not no_nvml:
            nvml.start()
        begin = time.perf_counter_ns()
        try:
            _watch(watched, None if no_counters else sampler, begin, address, options, progress)
        finally:
            watched.window = begin, time.perf_counter_ns()
            if not no_nvml:
                watched.captures.append((nvml.name, nvml.stop()))
    if address:
        info = server_info(address)
        watched.info = {key: info[key] for key in KEPT_INFO if isinstance(info.get(key), str | int | float | bool)}
        if options.profile_steps:
            start_profile(address, options.profile_folder, options.profile_steps)
    else:
        watched.missing.append(
            Missing(
                "engine", "tokens, forwards and accept length", "no --url was given", fix="give --url of the server"
            )
        )
    watched.missing.append(
        Missing(
            "steps",
            "boundaries of single steps, kernels, launches and syncs",
            "they are not visible from outside a process",
            fallback="the mean over the window",
            fix="profile the server and ingest its trace",
        )
    )
    return watched


def _watch(
    watched: Watched, sampler: "PmSampler | None", begin: int, address: str, options: Options, progress: Progress
) -> None:
    """Sit out the window: bursts of counters, and the engine's metrics before, between and after them."""
    end = begin + round(options.seconds * 1e9)
    burst_s = min(BURST_S, options.seconds)
    while True:
        now = time.perf_counter_ns()
        if address:
            try:
                watched.snapshots.append(read_metrics(address))
            except WorkbenchError as error:
                watched.missing.append(
                    Missing("engine", "metrics of part of the window", error.message, fix=error.hint)
                )
                address = ""
        progress("watching", round((now - begin) / 1e9), round(options.seconds))
        left = (end - time.perf_counter_ns()) / 1e9
        if left <= 0:
            return
        if sampler is not None and left >= burst_s / 2:
            sampler.start()
            first = time.perf_counter_ns()
            time.sleep(burst_s)
            watched.bursts.append((first, time.perf_counter_ns()))
            capture = sampler.stop()
            watched.captures.append((sampler.name, capture))
            if not capture.columns:
                sampler = None  # what went wrong stays wrong
        else:
            # The last reading is as close to the end as it can be.
            time.sleep(min(POLL_S, left))


def _write(writer: BundleWriter, watched: Watched, tensors: list[dict[str, Any]], roofs: list[dict[str, Any]]) -> None:
    variant = {"variant": VARIANT}
    missing = list(watched.missing)
    for name, capture in watched.captures:
        for table, columns in capture.columns.items():
            writer.append_table(table, _with_variant(columns))
        for table, rows in capture.tables.items():
            writer.append(table, [variant | dict(row) for row in rows])
        writer.append("losses", [variant | {"probe": name} | dict(row) for row in capture.losses])
        missing += [row for row in capture.missing if row not in missing]
    writer.append("counters", [row for snapshot in watched.snapshots for row in _metric_rows(snapshot)])
    writer.append("tensors", [variant | row for row in tensors])
    writer.append("roofs", roofs)
    writer.append("limits", [variant | asdict(row) for row in missing])
    writer.append("env", [{"key": f"server.{key}", "value": str(value)} for key, value in watched.info.items()])


def _with_variant(table: Any) -> Any:
    import pyarrow as pa

    return (
        table
        if "variant" in table.column_names
        else table.append_column("variant", pa.array([VARIANT] * table.num_rows, pa.string()))
    )


def _metric_rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    units = {"accept_length": "tokens", "throughput": "tok/s", "running": "sequences", "tokens": "tokens"}
    return [
        {
            "variant": VARIANT,
            "source": "engine",
            "name": name,
            "rank": None,
            "device": None,
            "start_ns": snapshot.at_ns,
            "end_ns": snapshot.at_ns,
            "value": value,
            "unit": units.get(name, "forwards" if name.endswith("passes") or name == "verifies" else "tokens"),
        }
        for name, value in asdict(snapshot).items()
        if name not in ("at_ns", "engine") and value is not None
    ]


def _decoded(options: Options) -> FoundStep:
    return FoundStep(0, 0, 0, 0, width=options.width, batch=options.batch, context=options.context)


def _settings(options: Options, watched: Watched, address: str, pid: int | None) -> dict[str, Any]:
    return {
        "model": asdict(options.model) | routing(options.model) if options.model else {},
        "hardware": options.hardware or "",
        "attach": {
            "url": address,
            "pid": pid,
            "engine": watched.snapshots[0].engine if watched.snapshots else "",
            "start_ns": watched.window[0],
            "end_ns": watched.window[1],
            "interval_ns": options.interval_ns,
            "bursts": [list(span) for span in watched.bursts],
            "given": {"tok_s": options.tok_s, "accept_length": options.accept_length, "batch": options.batch},
        },
    }

"""Scenario → run → bundle: the main path, top to bottom.

    load_scenario → build every variant → clean passes → sampled, laned and traced passes → byte model → seal

Clean passes of all variants are interleaved and come before any instrument is switched on, because a process that has
profiled once may stay slower (pytorch#146604); for the same reason the profiler comes last (``workbench.run.passes``).
An engine in a process of its own goes through its passes afterwards, alone: two of them may not fit the device, and one
that idles beside a measurement is another process on it. Diagnosis and report read only the bundle.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from workbench.decode.clock import CudaClock
from workbench.decode.engine import Engine
from workbench.decode.pipeline import Pipeline, build_pipeline
from workbench.decode.rungs.fit import check_variants
from workbench.decode.rungs.store import WeightStore
from workbench.decode.tensor_rows import tensor_rows
from workbench.errors import InputError, WorkbenchError
from workbench.hardware import machine_fingerprint, measure_read_roof
from workbench.probes.missing import unmeasured
from workbench.probes.protocol import Missing
from workbench.probes.static import StaticProbe
from workbench.run.bench import CudaBench
from workbench.run.capture import write_capture
from workbench.run.environment import env_rows, expert_rows
from workbench.run.fresh import fresh_costs
from workbench.run.guard import STOP_SECONDS, ProbeError, guarded
from workbench.run.passes import after_profiling, clean_pass, laned_pass, sampled_pass, step_clocks, traced_pass
from workbench.run.recording import failure
from workbench.run.state import Progress, Run
from workbench.scenario import Scenario, Variant
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Clock, Manifest, VariantRecord

STEP_NOTE = (
    "on CUDA a step runs from event to event in the stream: it starts when the idle device takes it up and ends when "
    "the device has completed its last kernel; what the host does between two steps is in neither"
)

AHEAD_NOTE = (
    "with engine.run_ahead a step runs from the end of the one before it to its own end: what the device waited for "
    "the host is in the step that came late, and nothing lies between two steps"
)

ENGINE_NOTE = (
    "an engine that is a process of its own is started, measured and ended by itself, after all other variants: its "
    "clean steps are not interleaved with theirs"
)

DEVICE_CLOCK = "%globaltimer of the device, carried to the host's monotonic clock (time.perf_counter_ns)"


def run_scenario(scenario: Scenario, out: Path, *, progress: Progress = lambda *_: None) -> Path:
    """Run ``scenario`` and write its bundle to the new folder ``out``; return ``out``.

    Raises UnfitError where this machine cannot run a variant and InputError where the scenario makes no sense, before
    anything is written. Whatever happens later, the bundle is readable: an exception leaves it failed, a killed process
    leaves it open for ``workbench check --salvage``. An instrument that fails or hangs costs its own rows alone.
    """
    variants = scenario.variants()
    threads = _threads(variants)
    check_variants(variants)
    costs, uncosted = fresh_costs(variants, progress)  # first: each of these processes needs the device's memory
    store = WeightStore()
    progress("build", 0, len(variants))
    pipelines: list[Pipeline] = []
    with ExitStack() as stack:
        for index, variant in enumerate(variants):
            pipelines.append(build_pipeline(variant, store))
            stack.callback(pipelines[-1].close)
            progress("build", index + 1, len(variants))
        manifest = _manifest(scenario, pipelines)
        run = Run(stack.enter_context(BundleWriter.create(out, manifest)), progress, costs=costs)
        for name, missing in uncosted:
            run.miss(name, missing)
        bench = _bench(run, pipelines, stack)
        run.writer.append("env", [*env_rows(manifest.environment, bench), *expert_rows(pipelines)])
        _write_roofs(run, pipelines)  # with all threads: the roof is the machine's, whatever the engine uses of it
        _place_steps(bench, pipelines)
        with _stated(run, pipelines, manifest, bench), _cpu_threads(threads):
            static = StaticProbe(bench.capability) if bench is not None else None
            own = [pipeline for pipeline in pipelines if isinstance(pipeline.engine, Engine)]
            _all_passes(run, own, bench, static)
            if static is not None and any(pipeline.variant.instruments.static for pipeline in own):
                _write_static(run, static)
            for pipeline in pipelines:
                if not isinstance(pipeline.engine, Engine):
                    run.progress(f"{pipeline.variant.name}: start", 0, 1)
                    with pipeline.engine:
                        _all_passes(run, [pipeline], bench)
            for pipeline in pipelines:
                rows = tensor_rows(pipeline, run.measured[pipeline.variant.name])
                run.writer.append("tensors", [{"variant": pipeline.variant.name, **row} for row in rows])
    return out


def _all_passes(
    run: Run, pipelines: list[Pipeline], bench: CudaBench | None, static: StaticProbe | None = None
) -> None:
    """Run the clean passes, interleaved, then those with instruments."""
    for repetition in range(max((pipeline.variant.measure.repetitions for pipeline in pipelines), default=0)):
        for pipeline in pipelines:
            if repetition < pipeline.variant.measure.repetitions:
                clean_pass(run, pipeline)
    _instrumented(run, pipelines, bench, static)


@contextmanager
def _stated(run: Run, pipelines: list[Pipeline], manifest: Manifest, bench: CudaBench | None) -> Iterator[None]:
    """At the end, whatever it is, state limits, clocks and costs."""

    def state() -> None:
        _write_limits(run, pipelines)
        step_clocks(run, pipelines)
        clock = manifest.clock
        if host := bench.host_clock() if bench is not None else None:
            run.clocks.append(host)
            clock = msgspec.structs.replace(clock, name=DEVICE_CLOCK)
        run.writer.update(clock=msgspec.structs.replace(clock, sources=run.clocks), perturbation=run.costs)

    try:
        yield
    except BaseException:
        with suppress(WorkbenchError, OSError):  # the first error is the one to tell
            state()
        raise
    state()


def _instrumented(run: Run, pipelines: list[Pipeline], bench: CudaBench | None, static: StaticProbe | None) -> None:
    """Run the passes with instruments: on the CPU there is one, the profiler; on CUDA four, the profiler last.

    ``static`` is shown the kernels that were traced.
    """
    device = bench.device.type if bench is not None else ""
    benched = [pipeline for pipeline in pipelines if pipeline.device.type == device]
    if bench is not None:
        for pipeline in benched:
            sampled_pass(run, pipeline, bench)
        for pipeline in benched:
            laned_pass(run, pipeline, bench)
    for pipeline in pipelines:
        traced_pass(run, pipeline, bench if pipeline in benched else None, static)
    for pipeline in benched:
        if (pipeline.variant.name, "traced") in run.recorded:
            after_profiling(run, pipeline, pipeline.variant.measure.traced_steps)


def _write_static(run: Run, static: StaticProbe) -> None:
    """Write what the compiled kernels take; once for the run, since variants share kernels."""
    run.progress("resources of compiled kernels", 0, 1)
    try:
        if missing := static.available():
            run.miss(None, missing)
        else:
            write_capture(run, static.name, None, guarded("static: stop", static.stop, STOP_SECONDS), [])
    except ProbeError as error:
        run.miss(None, failure(static.name, error))
    run.progress("resources of compiled kernels", 1, 1)


def _manifest(scenario: Scenario, pipelines: list[Pipeline]) -> Manifest:
    cuda = pipelines[0].device.type == "cuda"
    served = [not isinstance(pipeline.engine, Engine) for pipeline in pipelines]
    ahead = [pipeline.variant.engine.run_ahead for pipeline in pipelines]
    environment = machine_fingerprint()
    device: dict[str, Any] = {"name": pipelines[0].device.type}
    if cuda:
        device["gpu"] = environment["gpu"] = torch.cuda.get_device_name(pipelines[0].device)
    return Manifest(
        scenario=scenario.to_json(),
        scenario_sha256=scenario.sha256,
        command=["workbench", *sys.argv[1:]],
        environment=environment,
        device=device,
        variants=[VariantRecord(name=one.variant.name, settings=one.variant.settings()) for one in pipelines],
        clock=Clock(name="monotonic (time.perf_counter_ns)", utc_offset_ns=time.time_ns() - time.perf_counter_ns()),
        notes=[
            *([STEP_NOTE] if cuda else []),
            *([AHEAD_NOTE] if any(ahead) else []),
            *([ENGINE_NOTE] if any(served) else []),
        ],
    )


def _bench(run: Run, pipelines: list[Pipeline], stack: ExitStack) -> CudaBench | None:
    """Return what CUDA variants share, None where there are none."""
    on_cuda = [pipeline for pipeline in pipelines if pipeline.device.type == "cuda"]
    if not on_cuda:
        return None
    run.progress("instruments", 0, 1)
    bench = stack.enter_context(CudaBench(run, on_cuda[0].device))
    run.progress("instruments", 1, 1)
    return bench


def _place_steps(bench: CudaBench | None, pipelines: list[Pipeline]) -> None:
    """Let the marker place the steps of CUDA variants: late, since it waits until the clocks' rate is known."""
    for pipeline in pipelines:
        clock = pipeline.engine.clock
        if bench is not None and bench.marker is not None and isinstance(clock, CudaClock):
            clock.use(bench.marker.anchor)


def _threads(variants: list[Variant]) -> int | None:
    """Return the CPU threads all variants agree on: torch's pool is per process, so they cannot differ."""
    wanted = {variant.engine.threads for variant in variants}
    if len(wanted) > 1:
        raise InputError(
            f"engine.threads: variants ask for {', '.join(sorted(map(str, wanted)))}, a run has one thread pool",
            hint="set it once, under [engine]",
        )
    return wanted.pop()


@contextmanager
def _cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` threads, and then as many as before: the next run measures its roof with all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_roofs(run: Run, pipelines: list[Pipeline]) -> None:
    for device in sorted({pipeline.device.type for pipeline in pipelines}):
        run.progress(f"roof of the {device}", 0, 1)
        roof = measure_read_roof(device)  # type: ignore[arg-type]
        run.writer.append(
            "roofs",
            [
                {
                    "device": device,
                    "name": "read",
                    "bytes_per_s": round(roof.value * 1e9),
                    "tag": roof.tag,
                    "note": roof.note,
                }
            ],
        )
        run.progress(f"roof of the {device}", 1, 1)


def _write_limits(run: Run, pipelines: list[Pipeline]) -> None:
    """State what this run could not measure, and what stands in for it."""
    for pipeline in pipelines:
        variant = pipeline.variant
        rows = unmeasured(pipeline.device.type, engine=_engine_name(variant), instruments=variant.instruments)
        run.miss(variant.name, *rows)
        if not isinstance(pipeline.engine, Engine):
            run.miss(variant.name, *pipeline.engine.missing())
        if pipeline.experts is not None and pipeline.experts.name == "gathered":
            run.miss(
                variant.name,
                Missing(
                    "pipeline",
                    "experts as one grouped product",
                    pipeline.experts.why,
                    fallback="the chosen experts are copied in every step, then multiplied",
                    fix="compute capability 9 or 10 and torch 2.10 or later",
                ),
            )
        if length := variant.engine.collective_us:
            run.miss(
                variant.name,
                Missing(
                    "pipeline",
                    "collectives",
                    f"one rank of {variant.model.tp} runs on one GPU",
                    fallback=f"a wait of {length:g} us on the device twice a layer, modelled",
                    fix="measure them on two GPUs: python -m workbench.decode.rungs.collective_bench",
                ),
            )
    for name, missing in run.missing.items():
        run.writer.append("limits", [_limit(name, row) for row in missing])


def _engine_name(variant: Variant) -> str:
    return variant.engine.rung if variant.engine.kind == "workbench" else variant.engine.kind


def _limit(variant: str | None, row: Missing) -> dict[str, Any]:
    return {"variant": variant, **asdict(row)}

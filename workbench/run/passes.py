"""The passes of a run, in the order in which they disturb: clean, sampled from outside, laned, traced.

Clean passes of all variants come first, interleaved. ``sampled`` switches nothing on within the process but NVML's slow
poll; ``laned`` runs a kernel compiled with stamps; ``traced`` loads the profiler, after which a process can stay slower
(pytorch#146604), so it is last.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from workbench.decode.clock import CudaClock
from workbench.decode.engine import Engine, SequenceRecord
from workbench.decode.pipeline import Pipeline
from workbench.decode.rungs.forward import Forward
from workbench.decode.rungs.plan import PLANS
from workbench.engines.trace_probe import EngineTraceProbe
from workbench.probes.host import HostProbe
from workbench.probes.kernels import KernelsProbe
from workbench.probes.lanes import LaneSource, LanesProbe
from workbench.probes.nvml import NvmlProbe
from workbench.probes.protocol import Capture, Missing, Probe
from workbench.probes.static import StaticProbe
from workbench.run.bench import CudaBench, Pulsed, aligned
from workbench.run.guard import START_SECONDS, ProbeError, guarded
from workbench.run.recording import Recording, failure
from workbench.run.sampling_window import interval_us
from workbench.run.sequence import NumberedStep, decode_sequence
from workbench.run.state import Run
from workbench.trace.manifest import ClockSource

Ends = tuple[Pulsed | None, Pulsed | None]

LANED_LAUNCHES = 4
"""Launches whose stamps are kept: one of gpt-oss-20b has 45,000 spans."""

STEPWISE = "the laned pass waits for every step, and its cost includes that"

MARGIN_NS = 1_000_000
"""Counter samples kept before the first step and after the last."""


def clean_pass(run: Run, pipeline: Pipeline) -> None:
    """Decode every prompt with no instrument on."""
    name = pipeline.variant.name
    for index, prompt in enumerate(pipeline.prompts):
        run.progress(f"{name}: clean", index, len(pipeline.prompts))
        steps = decode_sequence(run, pipeline, prompt, "clean", lambda _: nullcontext())
        warm = pipeline.variant.measure.warmup_steps
        run.measured.setdefault(name, []).extend(step for _, step in steps[warm:])
    run.progress(f"{name}: clean", len(pipeline.prompts), len(pipeline.prompts))
    run.writer.flush()


def sampled_pass(run: Run, pipeline: Pipeline, bench: CudaBench, *, sets: int | None = None) -> None:
    """Decode again while another process samples counters and NVML is polled, once for each counter set; for the first
    ``sets`` of them, where that is given."""
    variant = pipeline.variant
    if variant.instruments.sampled_steps == 0:
        run.miss(variant.name, Missing("pm_sampler", "HBM throughput, CTA occupancy", "instruments.sampled_steps is 0"))
        return
    for number, counters in enumerate(variant.instruments.pm_sets[:sets]):
        if number == 0 or variant.instruments.pm:
            _sampled_set(run, pipeline, bench, counters, first=number == 0)


def _sampled_set(run: Run, pipeline: Pipeline, bench: CudaBench, counters: str, *, first: bool) -> None:
    variant, limit = pipeline.variant, pipeline.variant.instruments.sampled_steps
    wanted = variant.instruments.pm_interval_us
    clean = variant.name, "clean"
    rate = interval_us(wanted, run.walls.get(clean, {}), limit, run.prefills.get(clean, []))
    if rate != wanted and variant.instruments.pm:
        why = f"{limit} steps this long would fill the hardware buffer"
        what = f"counter samples every {wanted} us"
        run.miss(variant.name, Missing("pm_sampler", what, why, f"samples every {rate} us", "fewer sampled_steps"))
    probes = bench.sampling_probes(variant.instruments.model_copy(update={"pm_interval_us": rate}), counters)
    recording = Recording(run, variant.name, probes)
    done: list[NumberedStep] = []
    try:
        if not recording.start():
            return
        sampling = any(probe.name == "pm_sampler" for probe in recording.running)
        begin = _pulses(run, variant.name, bench) if sampling else None
        end: Pulsed | None = None
        try:
            done = _decode(run, pipeline, "sampled", recording, limit)
            end = _pulses(run, variant.name, bench) if sampling else None
        finally:
            finished = recording.stop()
    finally:
        for probe in probes:
            if isinstance(probe, NvmlProbe):
                probe.close()
    finished = [
        (
            probe,
            _on_our_clock(run, variant.name, capture, (begin, end), done) if probe.name == "pm_sampler" else capture,
        )
        for probe, capture in finished
    ]
    written = recording.write(finished, done)
    if first:  # what one set costs, the others do
        _cost(run, variant.name, "sampled", written)
    run.writer.flush()


def _pulses(run: Run, variant: str, bench: CudaBench) -> Pulsed | None:
    try:
        return guarded("marker: pulses", bench.pulse, START_SECONDS)
    except ProbeError as error:
        run.miss(variant, failure("marker", error))
        return None


def _on_our_clock(run: Run, variant: str, capture: Capture, ends: Ends, steps: list[NumberedStep]) -> Capture:
    """Return the sampler's capture where the pulses say it was, cut to the steps; unmoved where that fails."""
    try:
        return _within(guarded("pm_sampler: align", lambda: aligned(capture, *ends), START_SECONDS), steps)
    except ProbeError as error:
        run.miss(variant, failure("pm_sampler", error))
        return _within(aligned(capture, None, None), steps)


def _within(capture: Capture, steps: list[NumberedStep]) -> Capture:
    """Keep the samples of the steps, first to last: prefill and pulses would be most of the rows."""
    counters: pa.Table | None = capture.columns.get("counters")
    if counters is None or not steps:
        return capture
    first, last = steps[0][1].start_ns - MARGIN_NS, steps[-1][1].end_ns + MARGIN_NS
    kept = pc.and_(pc.greater(counters.column("end_ns"), first), pc.less(counters.column("start_ns"), last))
    return replace(capture, columns={**capture.columns, "counters": counters.filter(kept)})


def laned_pass(run: Run, pipeline: Pipeline, bench: CudaBench) -> None:
    """Decode again with a kernel that stamps its phases; for the persistent rung alone."""
    variant = pipeline.variant
    what, limit = "spans of each CTA within a kernel", variant.instruments.sampled_steps
    if not isinstance(pipeline.engine, Engine) or not PLANS[variant.engine.rung].persistent:
        whose = "SGLang" if variant.engine.kind == "sglang" else f"the {variant.engine.rung} rung"
        why = f"{whose}'s kernels take no stamps"
        run.miss(variant.name, Missing("lanes", what, why, fallback="durations of whole kernels in the traced pass"))
        return
    if not variant.instruments.lanes or limit == 0:
        why = "instruments.sampled_steps is 0" if variant.instruments.lanes else "instruments.lanes is false"
        run.miss(variant.name, Missing("lanes", what, why, fix=f"set {why.split()[0]}"))
        return
    from workbench.decode.rungs.persistent import PersistentForward  # needs the CUDA toolchain
    from workbench.decode.rungs.persistent_wide import WideForward

    forward = pipeline.engine.forward
    if not isinstance(forward, (PersistentForward, WideForward)):
        run.miss(variant.name, Missing("lanes", what, "faults are planted around the kernel", fix="engine.faults = []"))
        return
    try:
        compile_laned: Callable[[], Forward] = forward.laned
        laned = guarded("lanes: compile", compile_laned, START_SECONDS)
    except ProbeError as error:
        run.miss(variant.name, failure("lanes", error))
        return
    probe = LanesProbe(lane_source(laned), bench.marker, keep=LANED_LAUNCHES)
    recording = Recording(run, variant.name, [probe])
    if not recording.start():
        return
    ahead = pipeline.engine.run_ahead
    if ahead:  # stamps are read between steps: nothing may be under way
        run.miss(variant.name, Missing("lanes", "steps that run ahead", "stamps are read between two steps", STEPWISE))
    pipeline.engine.forward, pipeline.engine.run_ahead = laned, False
    try:
        done = _decode(run, pipeline, "laned", recording, limit, after=probe.collect)
    finally:
        pipeline.engine.forward, pipeline.engine.run_ahead = forward, ahead
        finished = recording.stop()
    _cost(run, variant.name, "laned", recording.write(finished, done))
    run.writer.flush()


def lane_source(forward: Any) -> LaneSource:
    """Return how the stamps of a laned ``PersistentForward`` or ``WideForward`` are read and named."""
    engine, phases = forward.engine, forward.phases
    attention = phases.index("attention")
    kernel = engine.kernel
    return LaneSource(
        kernel=kernel.cubin.kernel,
        tasks=[*phases * engine.shape.layers, "head"],
        read=lambda: engine.buffers.lanes.cpu().numpy(),
        sms=lambda stamps: stamps[:, attention, 1],
        facts={
            "device": engine.device.index or 0,
            "grid_x": engine.plan.grid,
            "grid_y": 1,
            "grid_z": 1,
            "block_x": engine.plan.threads,
            "block_y": 1,
            "block_z": 1,
            "registers": kernel.registers,
            "shared_static_bytes": kernel.cubin.smem_bytes,
            "shared_dynamic_bytes": kernel.smem_bytes,
            "shared_bytes": kernel.cubin.smem_bytes + kernel.smem_bytes,
            "local_bytes_per_thread": kernel.local_bytes,
        },
    )


def traced_pass(run: Run, pipeline: Pipeline, bench: CudaBench | None, static: StaticProbe | None) -> None:
    """Decode again under the profiler, for ``measure.traced_steps`` steps."""
    variant = pipeline.variant
    probe, missing = _tracer(pipeline, bench)
    run.miss(variant.name, *missing)
    if probe is None:
        return
    recording = Recording(run, variant.name, [probe])
    if not recording.start():
        return
    try:  # an instrument left on would slow whatever this process does next
        done = _decode(run, pipeline, "traced", recording, variant.measure.traced_steps)
    finally:
        finished = recording.stop()
    written = recording.write(finished, done)
    for _, capture in written:
        if static is not None and (kernels := capture.columns.get("kernels")) is not None:
            static.see(kernels)
    _cost(run, variant.name, "traced", written)
    run.writer.flush()


def _tracer(pipeline: Pipeline, bench: CudaBench | None) -> tuple[Probe | None, list[Missing]]:
    """Return the instrument of the traced pass, and what is not recorded because it was not asked for."""
    wanted = pipeline.variant.instruments
    signals = [(name, what) for name, what in _TRACED if bench or name == "host"]
    if pipeline.variant.measure.traced_steps == 0:
        why = "measure.traced_steps is 0"
        return None, [Missing(name, what, why, fix="set measure.traced_steps") for name, what in signals]
    off = [
        Missing(name, what, f"instruments.{name} is false", fix=f"set instruments.{name}")
        for name, what in signals
        if not getattr(wanted, name)
    ]
    if not isinstance(pipeline.engine, Engine):
        return (EngineTraceProbe(pipeline.engine.session, host=wanted.host) if wanted.kernels else None), off
    if bench is not None and wanted.kernels:
        return KernelsProbe(bench.marker, host=wanted.host), off
    return (HostProbe() if wanted.host else None), off


_TRACED = (("host", "host operators"), ("kernels", "kernel times, launch gaps and waits"))


def _decode(
    run: Run,
    pipeline: Pipeline,
    run_pass: str,
    recording: Recording,
    limit: int,
    after: Callable[[], None] = lambda: None,
) -> list[NumberedStep]:
    """Decode prompt after prompt until ``limit`` steps are done."""
    what = f"{pipeline.variant.name}: {run_pass}"
    done: list[NumberedStep] = []
    for prompt in pipeline.prompts:
        left = limit - len(done)
        if left <= 0:
            break
        run.progress(what, len(done), limit)
        done += decode_sequence(run, pipeline, prompt, run_pass, recording.annotate, limit=left, after=after)
    run.progress(what, len(done), len(done))
    return done


def after_profiling(run: Run, pipeline: Pipeline, steps: int) -> None:
    """Time steps once more with everything off, and state what profiling left behind. These steps are not kept."""
    name = pipeline.variant.name
    clean = run.walls.get((name, "clean"), {})
    run.progress(f"{name}: clean again", 0, 1)
    before: list[float] = []
    after: list[int] = []
    for prompt in pipeline.prompts:
        if len(after) >= steps:
            break
        record = SequenceRecord(len(prompt.tokens))
        decoding = pipeline.engine.decode(prompt.tokens, pipeline.variant.prompts.new_tokens, record)
        for index, step in enumerate(decoding):
            if (known := clean.get((prompt.id, index))) and len(after) < steps:
                before.append(sum(known) / len(known))
                after.append(step.end_ns - step.start_ns)
            if len(after) >= steps:
                break
        decoding.close()  # type: ignore[attr-defined]  # a generator
    if after:
        run.state_cost(name, "none, after profiling", round(median(before)), round(median(after)))
    run.progress(f"{name}: clean again", 1, 1)


def _cost(run: Run, variant: str, run_pass: str, written: list[tuple[Probe, Capture]]) -> None:
    """State what the instruments of a pass cost: its steps against clean ones at the same places of the prompts."""
    run.recorded[variant, run_pass] = [probe.name for probe, _ in written]
    clean, on = run.walls.get((variant, "clean"), {}), run.walls.get((variant, run_pass), {})
    places = [place for place in on if place in clean]
    if places and written:
        names = ", ".join(probe.name for probe, _ in written)
        before = median(sum(clean[place]) / len(clean[place]) for place in places)
        after = median(wall for place in places for wall in on[place])
        run.state_cost(variant, names, round(before), round(after))


def step_clocks(run: Run, pipelines: list[Pipeline]) -> None:
    """Note how well steps are placed whose times are CUDA events."""
    for pipeline in pipelines:
        clock = pipeline.engine.clock
        if isinstance(clock, CudaClock):
            name = f"steps, CUDA events: {pipeline.variant.name}"
            source = ClockSource(name=name, offset_ns=0, drift_ppb=clock.drift_ppb, residual_ns=clock.residual_ns)
            run.clocks.append(source)

"""Scenario → run → bundle: the main path, top to bottom.

    load_scenario → build every variant → clean passes → traced pass → byte model → seal

Clean passes of all variants are interleaved and come before any instrument is switched on, because a process that has
profiled once may stay slower (pytorch#146604). Diagnosis and report read only the bundle.
"""

import hashlib
import sys
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from workbench.decode.engine import Annotate, SequenceRecord, StepRecord
from workbench.decode.pipeline import Pipeline, TokenPrompt, build_pipeline
from workbench.decode.rungs.fit import check_variants
from workbench.decode.rungs.store import WeightStore
from workbench.decode.tensor_rows import tensor_rows
from workbench.errors import InputError
from workbench.hardware import machine_fingerprint, measure_read_roof
from workbench.probes.host import HostProbe
from workbench.probes.missing import unmeasured
from workbench.probes.protocol import Capture, Missing, Probe
from workbench.scenario import Scenario, Variant
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""

STEPS_PER_APPEND = 16
"""Steps held back before they go to the bundle: what a killed process loses beside the last second."""


@dataclass(slots=True)
class Run:
    """What one run carries along: the open bundle, and counters for ids that are unique in it.

    ``measured``: by variant, the clean steps that are not warm-up.
    """

    writer: BundleWriter
    progress: Progress
    steps: int = 0
    sequences: int = 0
    host_rows: int = 0
    clocks: list[ClockSource] = field(default_factory=list)
    measured: dict[str, list[StepRecord]] = field(default_factory=dict)


def run_scenario(scenario: Scenario, out: Path, *, progress: Progress = lambda *_: None) -> Path:
    """Run ``scenario`` and write its bundle to the new folder ``out``; return ``out``.

    Raises UnfitError where this machine cannot run a variant and InputError where the scenario makes no sense, before
    anything is written. Whatever happens later, the bundle is readable: an exception leaves it failed, a killed process
    leaves it open for ``workbench check --salvage``.
    """
    variants = scenario.variants()
    threads = _threads(variants)
    check_variants(variants)
    store = WeightStore()
    progress("build", 0, len(variants))
    pipelines = []
    for index, variant in enumerate(variants):
        pipelines.append(build_pipeline(variant, store))
        progress("build", index + 1, len(variants))
    manifest = Manifest(
        scenario=scenario.to_json(),
        scenario_sha256=scenario.sha256,
        command=["workbench", *sys.argv[1:]],
        environment=machine_fingerprint(),
        device={"name": pipelines[0].device.type},
        variants=[VariantRecord(name=variant.name, settings=variant.settings()) for variant in variants],
        clock=Clock(name="monotonic (time.perf_counter_ns)", utc_offset_ns=time.time_ns() - time.perf_counter_ns()),
    )
    with BundleWriter.create(out, manifest) as writer:
        run = Run(writer, progress)
        _write_roofs(run, pipelines)  # with all threads: the roof is the machine's, whatever the engine uses of it
        with _cpu_threads(threads):
            for repetition in range(max(variant.measure.repetitions for variant in variants)):
                for pipeline in pipelines:
                    if repetition < pipeline.variant.measure.repetitions:
                        _clean_pass(run, pipeline)
            for pipeline in pipelines:
                _write_limits(run, pipeline, _traced_pass(run, pipeline))
                rows = tensor_rows(pipeline, run.measured[pipeline.variant.name])
                writer.append("tensors", [{"variant": pipeline.variant.name, **row} for row in rows])
        writer.update(clock=msgspec.structs.replace(manifest.clock, sources=run.clocks))
    return out


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


def _clean_pass(run: Run, pipeline: Pipeline) -> None:
    """Decode every prompt with no instrument on."""
    name = pipeline.variant.name
    for index, prompt in enumerate(pipeline.prompts):
        run.progress(f"{name}: clean", index, len(pipeline.prompts))
        steps = _sequence(run, pipeline, prompt, "clean", lambda _: nullcontext())
        run.measured.setdefault(name, []).extend(steps[pipeline.variant.measure.warmup_steps :])
    run.progress(f"{name}: clean", len(pipeline.prompts), len(pipeline.prompts))
    run.writer.flush()


def _traced_pass(run: Run, pipeline: Pipeline) -> list[Missing]:
    """Decode again with instruments on, for ``measure.traced_steps`` steps; return what could not be measured."""
    variant = pipeline.variant
    if variant.measure.traced_steps == 0:
        return [Missing("host", "host operators", "measure.traced_steps is 0", fix="set measure.traced_steps")]
    if not variant.instruments.host:
        return [Missing("host", "host operators", "instruments.host is false", fix="set instruments.host")]
    probe: Probe = HostProbe()
    if missing := probe.available():
        return [missing]
    done: list[tuple[int, StepRecord]] = []
    probe.start()
    try:
        for prompt in pipeline.prompts:
            left = variant.measure.traced_steps - len(done)
            if left <= 0:
                break
            run.progress(f"{variant.name}: traced", len(done), variant.measure.traced_steps)
            first = run.steps
            records = _sequence(run, pipeline, prompt, "traced", probe.annotate, limit=left)
            done.extend(enumerate(records, start=first))
    finally:  # an instrument left on would slow whatever this process does next
        capture = probe.stop()
    run.progress(f"{variant.name}: traced", len(done), len(done))
    run.clocks.append(
        ClockSource(name=f"{probe.name}: {variant.name}", offset_ns=capture.offset_ns, residual_ns=capture.residual_ns)
    )
    _write_capture(run, variant.name, capture, done)
    return list(capture.missing)


def _sequence(
    run: Run, pipeline: Pipeline, prompt: TokenPrompt, run_pass: str, annotate: Annotate, limit: int | None = None
) -> list[StepRecord]:
    """Decode one prompt for at most ``limit`` steps and return them.

    Steps reach the bundle while it runs, the sequence at its end. Where decoding fails, what it did until then is kept.
    """
    variant = pipeline.variant
    record = SequenceRecord(len(prompt.tokens))
    common = {"variant": variant.name, "run_pass": run_pass, "sequence_id": run.sequences}
    records: list[StepRecord] = []
    rows: list[dict[str, Any]] = []
    try:
        for step in islice(pipeline.engine.decode(prompt.tokens, variant.prompts.new_tokens, record, annotate), limit):
            warmup = len(records) < variant.measure.warmup_steps
            rows.append(common | _step_row(step, run.steps, len(records), warmup=warmup))
            records.append(step)
            run.steps += 1
            if len(rows) == STEPS_PER_APPEND:
                full, rows = rows, []  # first, so that no row is appended twice should the disk be full
                run.writer.append("steps", full)
    finally:
        run.writer.append("steps", rows)
        run.writer.append("sequences", [common | _sequence_row(record, prompt)])
        run.sequences += 1
    return records


def _write_capture(run: Run, variant: str, capture: Capture, steps: list[tuple[int, StepRecord]]) -> None:
    """Append what an instrument saw, with the step and phase that each row began in."""
    starts = [record.start_ns for _, record in steps]
    for table, rows in capture.tables.items():
        placed = []
        for row in rows:
            index = bisect_right(starts, row["start_ns"]) - 1
            step_id, phase = (steps[index][0], _phase(steps[index][1], row["start_ns"])) if index >= 0 else (None, None)
            placed.append(
                {
                    "variant": variant,
                    **row,
                    "step_id": step_id if phase else None,
                    "phase": phase,
                    "host_id": row["host_id"] + run.host_rows,
                    "parent_id": None if row["parent_id"] is None else row["parent_id"] + run.host_rows,
                }
            )
        run.writer.append(table, placed)
        run.host_rows += len(placed)


def _phase(step: StepRecord, moment: int) -> str | None:
    if moment >= step.end_ns:
        return None
    return "draft" if moment < step.draft_end_ns else "forward" if moment < step.forward_end_ns else "verify"


def _write_limits(run: Run, pipeline: Pipeline, missing: list[Missing]) -> None:
    """State what this run could not measure, and what stands in for it."""
    missing = [*missing, *unmeasured(pipeline.device.type, engine=pipeline.variant.engine.rung)]
    run.writer.append("limits", [{"variant": pipeline.variant.name, **asdict(row)} for row in missing])


def _step_row(step: StepRecord, step_id: int, index: int, *, warmup: bool) -> dict[str, Any]:
    return {
        "step_id": step_id,
        "index": index,
        "warmup": warmup,
        "start_ns": step.start_ns,
        "draft_end_ns": step.draft_end_ns,
        "forward_end_ns": step.forward_end_ns,
        "end_ns": step.end_ns,
        "context": step.context,
        "width": step.width,
        "drafted": step.drafted,
        "accepted": step.accepted,
        "committed": len(step.tokens),
        "experts": list(step.experts),
    }


def _sequence_row(record: SequenceRecord, prompt: TokenPrompt) -> dict[str, Any]:
    packed = array("i", record.tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return {
        "prompt_id": prompt.id,
        "prompt_tokens": record.prompt_tokens,
        "new_tokens": len(record.tokens),
        "prefill_start_ns": record.prefill_start_ns,
        "prefill_end_ns": record.prefill_end_ns,
        "finish": record.finish,
        "output_sha256": hashlib.sha256(packed.tobytes()).hexdigest(),
        "output_tokens": record.tokens,
    }

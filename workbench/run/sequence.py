"""Decode one prompt into the bundle's tables ``steps`` and ``sequences``."""

import hashlib
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

from workbench.decode.engine import Annotate, SequenceRecord, StepRecord
from workbench.decode.pipeline import Pipeline, TokenPrompt
from workbench.engines.sglang_engine import SglangEngine
from workbench.run.state import Run

HOLD_SECONDS = 0.5
"""How long steps are held back before they go to the bundle: what a killed process loses beside the last second. An
append takes about a millisecond between two steps, so it must be rare."""

NumberedStep = tuple[int, StepRecord]
"""A step and its ``step_id``."""


def decode_sequence(
    run: Run,
    pipeline: Pipeline,
    prompt: TokenPrompt,
    run_pass: str,
    annotate: Annotate,
    *,
    limit: int | None = None,
    after: Callable[[], None] = lambda: None,
) -> list[NumberedStep]:
    """Decode one prompt for at most ``limit`` steps and return them; ``after`` is called between steps.

    Steps reach the bundle while it runs, the sequence at its end. Where decoding fails, what it did until then is kept.
    An engine that decodes a request as a whole is asked for no more tokens than ``limit`` steps need.
    """
    variant, engine = pipeline.variant, pipeline.engine
    count = variant.prompts.new_tokens
    if limit is not None and isinstance(engine, SglangEngine):
        count = min(count, engine.tokens_for(limit))
    record = SequenceRecord(len(prompt.tokens))
    common = {"variant": variant.name, "run_pass": run_pass, "sequence_id": run.sequences}
    walls = run.walls.setdefault((variant.name, run_pass), {})
    warm = variant.measure.warmup_steps
    numbered: list[NumberedStep] = []
    kept = 0  # steps that are in the bundle

    def append() -> None:
        nonlocal kept
        first, kept = kept, len(numbered)  # first, so that no row is appended twice should the disk be full
        rows = [common | _step_row(*numbered[at], index=at, warmup=at < warm) for at in range(first, kept)]
        run.writer.append("steps", rows)

    # Little happens between two steps: it is time in which a user waits and no step's time holds.
    due = time.monotonic() + HOLD_SECONDS
    try:
        for step in islice(engine.decode(prompt.tokens, count, record, annotate), limit):
            numbered.append((run.steps, step))
            run.steps += 1
            after()
            if time.monotonic() > due:
                append()
                due = time.monotonic() + HOLD_SECONDS
    finally:
        append()
        run.writer.append("sequences", [common | _sequence_row(record, prompt)])
        run.sequences += 1
        took = record.prefill_end_ns - record.prefill_start_ns
        run.prefills.setdefault((variant.name, run_pass), []).append(took)
        for index, (_, step) in enumerate(numbered[warm:], start=warm):
            walls.setdefault((prompt.id, index), []).append(step.end_ns - step.start_ns)
    return numbered


def _step_row(step_id: int, step: StepRecord, *, index: int, warmup: bool) -> dict[str, Any]:
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
        **(asdict(step.host) if step.host is not None else {}),
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

"""One variant under some modes, one after the other, in a process of its own: JSON on stdin, JSON on its last line.

In: ``{"variant": settings, "folder": …, "modes": ["none" | "sampled" | "laned" | "traced", …]}``, a pass each. Out:
``{"passes": […]}`` in that order, each ``{"mode", "walls": [[prompt, index, ns], …], "instruments": [names]}``, walls
of the steps that are not warm-up, or ``{"mode", "error": one line}``; ``{"error": …}`` alone where none could be run.
"""

import json
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from workbench.decode.engine import SequenceRecord
from workbench.decode.pipeline import Pipeline, build_pipeline
from workbench.errors import InputError, WorkbenchError
from workbench.run.bench import CudaBench
from workbench.run.passes import laned_pass, sampled_pass, traced_pass
from workbench.run.sequence import decode_sequence
from workbench.run.state import Place, Run
from workbench.scenario import Variant
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest

STEPS = 64
"""Steps a mode without a limit of its own decodes at most."""


def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Run the question's passes in their order and return the answer. Raises WorkbenchError where none can be run."""
    variant = Variant.model_validate({**question["variant"], "folder": question["folder"]})
    torch.set_num_threads(variant.engine.threads or torch.get_num_threads())
    pipeline = build_pipeline(variant)
    # Once without counting: kernels compile, caches fill.
    prompt = pipeline.prompts[0]
    for _ in pipeline.engine.decode(prompt.tokens, variant.prompts.new_tokens, SequenceRecord(len(prompt.tokens))):
        pass
    passes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="workbench-cost-") as folder, ExitStack() as stack:
        # The passes write a bundle; it goes away with the folder.
        writer = stack.enter_context(BundleWriter.create(Path(folder) / "bundle", Manifest()))
        run = Run(writer, lambda *_: None)
        bench = stack.enter_context(CudaBench(run, pipeline.device)) if pipeline.device.type == "cuda" else None
        for mode in question["modes"]:
            try:
                passes.append({"mode": mode, **_measure(mode, run, pipeline, bench)})
            except WorkbenchError as error:
                passes.append({"mode": mode, "error": str(error)})
    return {"passes": passes}


def _measure(mode: str, run: Run, pipeline: Pipeline, bench: CudaBench | None) -> dict[str, Any]:
    variant = pipeline.variant
    known = len(run.missing.get(variant.name, []))
    run_pass = "clean" if mode == "none" else mode
    places: dict[Place, list[int]] = {}
    run.walls[variant.name, run_pass] = places
    if mode == "none":
        limit = max(variant.instruments.sampled_steps, variant.measure.traced_steps) or STEPS
        done = 0
        for prompt in pipeline.prompts:
            if done < limit:
                done += len(
                    decode_sequence(run, pipeline, prompt, "clean", lambda _: nullcontext(), limit=limit - done)
                )
    elif mode == "traced":
        traced_pass(run, pipeline, bench, None)
    elif bench is not None and mode == "sampled":
        sampled_pass(run, pipeline, bench, sets=1)
    elif bench is not None and mode == "laned":
        laned_pass(run, pipeline, bench)
    else:
        raise InputError(f"mode {mode!r}: not on {pipeline.device.type}")
    walls = [[prompt, index, wall] for (prompt, index), found in places.items() for wall in found]
    if not walls:
        reasons = [missing.why for missing in run.missing.get(variant.name, [])[known:]] or ["no step was decoded"]
        raise InputError(f"mode {mode!r}: {reasons[0]}")
    return {"walls": walls, "instruments": run.recorded.get((variant.name, run_pass), [])}


def main() -> int:
    """Answer the question on stdin; returns 0 whatever the answer is."""
    try:
        answer = measure(json.load(sys.stdin))
    except WorkbenchError as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Decode a few steps of one variant to be profiled from outside: ``deep_child.py QUESTION.json``.

In: ``{"variant": settings, "folder": …, "warmup": steps, "steps": steps, "answer": path, "nsight": null or {"prefix":
…, "metrics": […], "cache": …}}``. The warm-up steps compile kernels, capture graphs and fill caches; cudaProfilerStart
and cudaProfilerStop then enclose the steps that count. It writes ``{"steps": n, "device": name}`` or ``{"error": one
line}`` to the answer's path. nsight-python starts this file again under ncu, hence a script and not a pipe.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.errors import InputError, WorkbenchError
from workbench.probes.nsight_python import collect

Annotate = Callable[[str], AbstractContextManager[Any]]


def decode(question: dict[str, Any], annotate: Annotate = nullcontext) -> dict[str, Any]:
    """Decode the question's steps, the counted ones within ``annotate``, and return the answer.

    Raises WorkbenchError as a run does, InputError where the prompt ends before the first counted step.
    """
    import torch

    from workbench.decode.engine import SequenceRecord
    from workbench.decode.pipeline import build_pipeline
    from workbench.scenario import Variant

    variant = Variant.model_validate({**question["variant"], "folder": question["folder"]})
    torch.set_num_threads(variant.engine.threads or torch.get_num_threads())
    pipeline = build_pipeline(variant)
    if pipeline.device.type != "cuda":
        raise InputError(f"variant {variant.name!r}: runs on {pipeline.device.type}, ncu profiles CUDA kernels")
    prompt = pipeline.prompts[0]
    steps = pipeline.engine.decode(prompt.tokens, variant.prompts.new_tokens, SequenceRecord(len(prompt.tokens)))
    warm = sum(1 for _ in islice(steps, question["warmup"]))
    profiler: Any = torch.cuda.profiler  # it has no types
    torch.cuda.synchronize()
    profiler.start()
    with annotate("decode"):
        counted = sum(1 for _ in islice(steps, question["steps"]))
        torch.cuda.synchronize()
    profiler.stop()
    if not counted:
        raise InputError(f"variant {variant.name!r}: its first prompt ends after {warm} steps of warm-up")
    return {"steps": counted, "device": torch.cuda.get_device_name(pipeline.device)}


def main(path: Path) -> int:
    """Answer the question in ``path``; returns 1 where there is no answer but an error."""
    question = json.loads(path.read_text(encoding="utf-8"))

    def work(annotate: Annotate) -> None:
        answer(decode(question, annotate))

    def answer(what: dict[str, Any]) -> None:
        Path(question["answer"]).write_text(json.dumps(what), encoding="utf-8")

    nsight = question["nsight"]
    try:
        if nsight:
            collect(work, nsight["metrics"], nsight["prefix"], nsight["cache"])
        else:
            work(nullcontext)
    except WorkbenchError as error:
        answer({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

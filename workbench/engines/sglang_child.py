"""The program that holds an SGLang engine: run by the engine's own interpreter, it imports nothing of the workbench.

    PYTHON sglang_child.py < commands > answers

One JSON object a line each way; the log goes to stderr. Commands:

    {"do": "start", "engine": {…}}                keyword arguments of ``sglang.Engine``
    {"do": "generate", "tokens": [...], "count": N}   one greedy request of exactly N tokens, batch 1
    {"do": "profile", "folder": PATH}             the engine's own profiler (Kineto), stacks and shapes off
    {"do": "profiled"}                            end it; the trace is then in the folder
    {"do": "quit"}

Every answer has ``ok``; where it is false, ``why`` holds the error. ``generate`` answers with ``times_ns``
(``time.perf_counter_ns`` of each chunk's arrival), ``counts`` (tokens known by then) and the engine's ``meta``.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def answer(**fields: Any) -> None:
    """Print one answer."""
    print(json.dumps(fields), file=_ANSWERS, flush=True)


def generate(engine: Any, tokens: Any, count: int) -> Any:
    """Stream one request; a chunk is what one decode step committed."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count}
    times: list[int] = []
    counts: list[int] = []
    meta: Any = {}
    tokens_out: Any = []
    begin = time.perf_counter_ns()
    for chunk in engine.generate(input_ids=tokens, sampling_params=sampling, stream=True):
        now = time.perf_counter_ns()
        meta = chunk["meta_info"]
        known = meta["completion_tokens"]
        if counts and known == counts[-1]:
            continue  # the closing chunk repeats the last
        times.append(now)
        counts.append(known)
        tokens_out = chunk.get("output_ids") or tokens_out
    plain = {key: value for key, value in meta.items() if isinstance(value, (int, float, str, list, dict, type(None)))}
    return {"begin_ns": begin, "times_ns": times, "counts": counts, "meta": plain, "tokens": tokens_out}


def main() -> None:
    """Obey until told to quit, or until the other side is gone."""
    engine: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            what = command["do"]
            if what == "start":
                begin = time.perf_counter()
                import sglang

                engine = sglang.Engine(**command["engine"])
                import torch

                answer(
                    ok=True,
                    sglang=sglang.__version__,
                    torch=torch.__version__,
                    python=sys.version.split()[0],
                    seconds=time.perf_counter() - begin,
                )
            elif what == "generate":
                answer(ok=True, **generate(engine, command["tokens"], command["count"]))
            elif what == "profile":
                engine.start_profile(
                    output_dir=command["folder"], activities=["CPU", "GPU"], with_stack=False, record_shapes=False
                )
                answer(ok=True)
            elif what == "profiled":
                engine.stop_profile()
                answer(ok=True)
            elif what == "quit":
                if engine is not None:
                    engine.shutdown()
                answer(ok=True)
                break
            else:
                answer(ok=False, why=f"no command {what!r}")
        except BaseException as error:
            traceback.print_exc()
            answer(ok=False, why=f"{type(error).__name__}: {error}"[:2000])
    os._exit(0)  # an engine's helper threads may never end


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # nothing beside this file may shadow the engine's
    # Whatever the engine and its children print must not mix with the answers.
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()

"""What the loop adds to a step: ``python -m workbench.decode.rungs.loop_bench --seconds 40``.

Every case decodes one prompt twice, greedily. The first time is the loop as it is: ``step`` is the median time of its
steps, by its own clock, ``draft`` and ``commit`` those of their first and last phase, ``between`` what lies between the
end of one step and the start of the next. The second time the device waits ahead of drafting and of the forward until
the host has enqueued either: ``device`` is the sum of both, what the step takes where the host is never late. ``host``
is the difference. ``kernel`` is the persistent kernel alone, launched back to back. ``tok/s`` is over the steps' time,
``wall`` over all time from the start of the first step to the end of the last.

Cases with ``ahead`` in their name run one step ahead of what the host has read: their steps abut, and what the host
takes shows in ``step`` only where the device waited for it. They are held and timed step by step.

gpt-oss-20b has random weights, so its text is arbitrary, but the same ahead as step by step; nano's must be the same
whatever drafts it, up to near ties of widths (``text``). The table comes last; ``$OUT/loop_bench.json`` holds every
number.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from workbench.decode.drafters.protocol import Drafter, Proposal, TargetFeatures
from workbench.decode.engine import Engine, SequenceRecord, StepRecord
from workbench.decode.model import Scores
from workbench.decode.pipeline import Pipeline, build_pipeline
from workbench.decode.rungs.fit import check_variants
from workbench.decode.rungs.forward import Forward
from workbench.decode.rungs.store import WeightStore
from workbench.decode.rungs.wrapped import WrappedForward
from workbench.errors import InputError, UnfitError
from workbench.kernels.budget import Budget, save
from workbench.kernels.persistent import PersistentEngine
from workbench.kernels.persistent_latent import LatentEngine
from workbench.scenario import Variant, parse_scenario

WARMUP = 8
"""Steps at the start of a text that do not count."""

HOLD_CYCLES = 3_000_000
"""How long the device waits for the host, in its cycles: about 1.6 ms."""

LAUNCHES = 40

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Case:
    """One engine configuration: ``settings`` are lines of a scenario."""

    name: str
    settings: str


CASES = (
    Case("gpt-oss-20b persistent", 'preset = "gpt-oss-20b"\nrung = "persistent"'),
    Case("gpt-oss-20b splitk", 'preset = "gpt-oss-20b"\nrung = "splitk"'),
    Case("nano none", 'preset = "nano"\nrung = "splitk"'),
    Case("nano mtp-3", 'preset = "nano"\nrung = "splitk"\ndrafter = { kind = "mtp", depth = 3 }'),
    Case("nano dflash-7", 'preset = "nano"\nrung = "splitk"\ndrafter = { kind = "dflash", depth = 7 }'),
    Case("nano ngram-4", 'preset = "nano"\nrung = "splitk"\ndrafter = { kind = "ngram", depth = 4, order = 3 }'),
    Case("nano graph mtp-3", 'preset = "nano"\nrung = "graph"\ndrafter = { kind = "mtp", depth = 3 }'),
    Case(
        "gpt-oss-20b persistent-4",
        'preset = "gpt-oss-20b"\nrung = "persistent"\ndrafter = { kind = "simulated", depth = 3, accept_length = 2.5 }',
    ),
)

AHEAD = tuple(
    Case(f"{case.name}-ahead", f"{case.settings}\nrun_ahead = true")
    for case in CASES
    if case.name in ("gpt-oss-20b persistent", "gpt-oss-20b splitk", "nano none", "gpt-oss-20b persistent-4")
)


def variant_of(case: Case, device: str, new_tokens: int) -> Variant:
    """Return the case as a scenario's variant."""
    model, other = list[str](), list[str]()
    engine = [f'device = "{device}"']
    for line in case.settings.splitlines():
        (model if line.startswith("preset") else engine if line.startswith(("rung", "run_")) else other).append(line)
    weights = "trained" if 'preset = "nano"' in model else "random"
    text = "\n".join(
        [
            f'name = "{case.name.replace(" ", "-")}"',
            *other,
            "[model]",
            *model,
            f'weights = "{weights}"',
            "[engine]",
            *engine,
            "[sampling]",
            'method = "greedy"',
            "[prompts]",
            'file = "held_out"',
            "count = 1",
            "max_prompt_tokens = 128",
            f"new_tokens = {new_tokens}",
        ]
    )
    return parse_scenario(text, source=case.name, folder=Path()).variants()[0]


class Stopwatch:
    """Times pieces of enqueued work. On a GPU the device is held ahead of each, so that the host is never late."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._start: Any = None

    def begin(self) -> None:
        """Hold the device, then start."""
        if self._cuda:
            sleep: Any = torch.cuda._sleep
            sleep(HOLD_CYCLES)
        self._start = self._now()

    def end(self) -> None:
        """Stop."""
        self._marks.append((self._start, self._now()))

    def times_us(self) -> list[float]:
        """Wait, and return the time of every piece since the last call."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return [(end - start) / 1e3 for start, end in marks]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in marks]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        make: Any = torch.cuda.Event  # untyped in torch
        event = make(enable_timing=True)
        event.record()
        return event


class TimedDrafter:
    """Passes everything on to ``drafter`` and times its steps."""

    def __init__(self, drafter: Drafter, watch: Stopwatch) -> None:
        self._drafter, self._watch = drafter, watch
        self.name, self.max_draft = drafter.name, drafter.max_draft

    def reset(self) -> None:
        """Forget the sequence."""
        self._drafter.reset()

    def observe(self, tokens: Tensor, features: TargetFeatures | None) -> None:
        """Start the watch and pass on."""
        self._watch.begin()
        self._drafter.observe(tokens, features)

    def propose(self, temperature: float, generator: torch.Generator | None) -> Proposal:
        """Pass on and stop the watch."""
        proposal = self._drafter.propose(temperature, generator)
        self._watch.end()
        return proposal


class TimedForward(WrappedForward):
    """Passes everything on to ``forward`` and times its steps."""

    def __init__(self, forward: Forward, watch: Stopwatch) -> None:
        super().__init__(forward)
        self._watch = watch

    def assemble(self, last: Tensor, drafts: Tensor) -> Tensor:
        """Start the watch and pass on."""
        self._watch.begin()
        return self._forward.assemble(last, drafts)

    def score(self, tokens: Tensor) -> Scores:
        """Pass on and stop the watch."""
        scores = self._forward.score(tokens)
        self._watch.end()
        return scores


def decode(pipeline: Pipeline, engine: Engine) -> tuple[list[StepRecord], list[int]]:
    """Decode the one prompt; return the steps and the text."""
    prompt = pipeline.prompts[0]
    record = SequenceRecord(len(prompt.tokens))
    steps = list(engine.decode(prompt.tokens, pipeline.variant.prompts.new_tokens, record))
    return steps, record.tokens


def run_case(case: Case, variant: Variant, store: WeightStore) -> dict[str, Any]:
    """Build, decode twice, and return the times in microseconds."""
    begun = time.monotonic()
    pipeline = build_pipeline(variant, store)
    engine = pipeline.engine
    if not isinstance(engine, Engine):
        raise InputError(f"{case.name}: engine.kind must be 'workbench'")
    decode(pipeline, engine)  # what is made at first use is made now
    built = time.monotonic() - begun
    steps, text = decode(pipeline, engine)
    forward, drafter, watch, other = engine.forward, engine.drafter, *(Stopwatch(pipeline.device) for _ in range(2))
    drafts = drafter.name in ("mtp", "dflash")  # the others launch nothing
    engine.forward = TimedForward(forward, watch)
    engine.drafter = TimedDrafter(drafter, other) if drafts else drafter
    ahead, engine.run_ahead = engine.run_ahead, False
    try:
        decode(pipeline, engine)
    finally:
        engine.forward, engine.drafter, engine.run_ahead = forward, drafter, ahead
    counted = _warm(steps)
    device = _middle(_warm(watch.times_us())) + (_middle(_warm(other.times_us())) if drafts else 0.0)
    step = _middle([(one.end_ns - one.start_ns) / 1e3 for one in counted])
    between = [(after.start_ns - one.end_ns) / 1e3 for one, after in pairwise(counted)]
    tokens = sum(len(one.tokens) for one in counted)
    return {
        "case": case.name,
        **asdict(case),
        "kernel_us": _kernel_us(forward),
        "device_us": device,
        "step_us": step,
        "host_us": step - device,
        "draft_us": _middle([(one.draft_end_ns - one.start_ns) / 1e3 for one in counted]),
        "commit_us": _middle([(one.end_ns - one.forward_end_ns) / 1e3 for one in counted]),
        "between_us": _middle(between) if between else None,
        "tokens_per_step": statistics.fmean(len(one.tokens) for one in counted),
        "tok_s": tokens / sum(one.end_ns - one.start_ns for one in counted) * 1e9,
        "wall_tok_s": tokens / (counted[-1].end_ns - counted[0].start_ns) * 1e9,
        "steps": len(steps),
        "text": text,
        "built_s": built,
    }


def _warm(values: Sequence[Value]) -> Sequence[Value]:
    """Leave the first steps out, if there are more."""
    return values[WARMUP:] or values


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def _kernel_us(forward: Forward) -> float | None:
    """Return the persistent kernel's time, launched back to back from where the sequence ended."""
    engine = getattr(forward, "engine", None)
    if not isinstance(engine, (PersistentEngine, LatentEngine)):
        return None
    first = forward.length - LAUNCHES
    engine.start(0, first)
    watch = Stopwatch(engine.device)
    watch.begin()
    for _ in range(LAUNCHES):
        engine.step()
    watch.end()
    (whole,) = watch.times_us()
    engine.check()
    return whole / LAUNCHES


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as text; a text is compared with the first that must be the same."""
    heads = ("kernel", "device", "step", "host", "draft", "commit", "between", "tok/s", "wall", "tok/step")
    lines = [f"{'us a step':32}" + "".join(f"{head:>9}" for head in heads) + "  text"]
    texts: dict[str, list[int]] = {}
    for row in rows:
        if "error_text" in row:
            lines.append(f"{row['case']:32} {row['error_text']}")
            continue
        values = (*(row[f"{head}_us"] for head in heads[:7]), row["tok_s"], row["wall_tok_s"])
        cells = "".join(f"{'':>9}" if value is None else f"{value:9.1f}" for value in values)
        name = row["case"].removesuffix("-ahead")
        first = texts.setdefault("nano" if name.startswith("nano") else name, row["text"])
        same = next((at for at, (one, two) in enumerate(zip(first, row["text"], strict=False)) if one != two), None)
        said = "" if first is row["text"] else "same" if same is None else f"parts at token {same}"
        lines.append(f"{row['case']:32}{cells}{row['tokens_per_step']:9.2f}  {said}")
    return "\n".join(lines)


def main(
    arguments: list[str] | None = None, *, device: torch.device | None = None, cases: Sequence[Case] = (*CASES, *AHEAD)
) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workbench.decode.rungs.loop_bench", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="part of the names of the cases to run")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=40)
    options = parser.parse_args(arguments)
    if device is None and not torch.cuda.is_available():
        raise UnfitError("the benchmark of the decode loop needs an NVIDIA GPU and torch sees none")
    kind = "cuda" if device is None else device.type
    chosen = [case for case in cases if not options.only or any(part in case.name for part in options.only)]
    if not chosen:
        raise InputError(f"--only: no case has {' or '.join(options.only)} in its name")
    budget = Budget(options.seconds)
    rows: list[dict[str, Any]] = []
    store = WeightStore()
    try:
        for case in chosen:
            if budget.left < 3:
                rows.append({"case": case.name, "error_text": "left out: the time was up"})
                continue
            rows.append(_attempt(case, lambda case=case: _run(case, kind, options.new_tokens, store)))  # type: ignore[misc]
            budget.note(f"{case.name}: {rows[-1].get('error_text') or _line(rows[-1])}")
            save({"rows": rows}, "loop_bench.json")
    finally:
        budget.finish()
    print(table(rows), flush=True)
    return int(any("error_text" in row and "left out" not in row["error_text"] for row in rows))


def _run(case: Case, device: str, new_tokens: int, store: WeightStore) -> dict[str, Any]:
    variant = variant_of(case, device, new_tokens)
    check_variants([variant])
    return run_case(case, variant, store)


def _attempt(case: Case, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run one case; an error of the toolchain or the device becomes its row, so that the others are still seen."""
    try:
        return run()
    except Exception as error:
        text = str(error).splitlines() or [type(error).__name__]
        return {"case": case.name, "error_text": f"{type(error).__name__}: {text[0][:300]}"}


def _line(row: dict[str, Any]) -> str:
    return f"{row['step_us']:.1f} us a step, device {row['device_us']:.1f}, ready after {row['built_s']:.1f} s"


if __name__ == "__main__":
    sys.exit(main())

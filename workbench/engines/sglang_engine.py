"""SGLang as the engine of a variant: what a client sees of it, step by step.

It takes the place of ``workbench.decode.engine.Engine`` in a pipeline, so that the same passes run over it. A step's
edges are the arrivals of streamed chunks: the engine's message path adds jitter to single steps, not to their mean.
"""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from workbench.decode.engine import Annotate, SequenceRecord, StepRecord
from workbench.decode.spec import ModelSpec
from workbench.engines.hf_config import dflash_config, hf_config, write_config
from workbench.engines.sglang_session import SglangSession, Stream
from workbench.errors import InputError
from workbench.probes.protocol import Missing
from workbench.scenario import Variant

PYTHON = "WORKBENCH_SGLANG_PYTHON"
"""Environment variable: the interpreter that has SGLang, where the scenario names none."""

MEMORY_SHARE = 0.4
"""Of the GPU's memory for weights and KV cache: enough for the models here, and other variants need theirs."""

UNKNOWN_TOKEN = -1


class SglangEngine:
    """One engine process: it runs within the context of this object alone, so that one at a time holds the device."""

    clock = None  # its steps are on the host's clock already

    def __init__(self, variant: Variant, spec: ModelSpec) -> None:
        """Write the model's config.json; nothing is started. Raises UnfitError where the interpreter has no SGLang."""
        self._width = variant.drafter.width
        self._tokens_a_step = variant.drafter.accept_length or 1.0
        self._folder = tempfile.TemporaryDirectory(prefix="workbench-sglang-")
        root = Path(self._folder.name)
        arguments, environment = settings(variant, spec, root)
        self.session = SglangSession(
            arguments,
            log=root / "engine.log",
            python=variant.engine.python or os.environ.get(PYTHON, ""),
            environment=environment,
        )
        self.split_chunks = 0
        self.reported: dict[str, Any] = {}
        self.session.check()

    def __enter__(self) -> Self:
        """Start the engine. Raises UnfitError."""
        try:
            self.session.__enter__()
            self.session.generate([1, 2, 3, 4], 2 * self._width + 2)  # compiles and warms what a first request does
        except BaseException:
            self.session.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def tokens_for(self, steps: int) -> int:
        """Return how many tokens about ``steps`` steps commit, the prefill's first token included."""
        return math.ceil(steps * self._tokens_a_step) + 1

    def decode(
        self, prompt: list[int], new_tokens: int, record: SequenceRecord, annotate: Annotate = lambda _: nullcontext()
    ) -> Iterator[StepRecord]:
        """Decode one request whole, then yield its steps: chunk after chunk, the first being the prefill's token."""
        with annotate("forward"):
            stream = self.session.generate(prompt, new_tokens)
        self.reported = dict(stream.meta)
        record.prefill_start_ns, record.prefill_end_ns = stream.begin_ns, stream.times_ns[0]
        tokens = list(stream.tokens) or [UNKNOWN_TOKEN] * stream.counts[-1]
        record.tokens.extend(tokens[: stream.counts[0]])
        for start, end, first, last in self._steps(stream):
            record.tokens.extend(tokens[first:last])
            yield StepRecord(
                start,
                start,
                end,
                end,
                context=len(prompt) + first - 1,
                width=self._width,
                drafted=self._width - 1,
                accepted=min(last - first - 1, self._width - 1),
                tokens=tuple(tokens[first:last]),
                experts=(),
            )
        record.finish = "length"

    def _steps(self, stream: Stream) -> Iterator[tuple[int, int, int, int]]:
        """Yield (start, end, tokens before, tokens after) of each step; a chunk that holds several is cut evenly."""
        chunks = zip(stream.times_ns, stream.times_ns[1:], stream.counts, stream.counts[1:], strict=False)
        for start, end, first, last in chunks:
            most = self._width
            count = -(-(last - first) // most)
            self.split_chunks += count - 1
            for part in range(count):
                edges = [start + (end - start) * at // count for at in (part, part + 1)]
                yield edges[0], edges[1], first + part * most, min(last, first + (part + 1) * most)

    def missing(self) -> list[Missing]:
        """Return what cannot be known of an engine that is only a client's stream."""
        found = [
            Missing(
                "steps",
                "drafting, verification and commit within a step, and the experts it touched",
                "SGLang's client sees a step's tokens arrive, nothing within it",
                "the whole step is one phase; experts by the uniform-routing bound, tagged modelled",
            )
        ]
        if self.split_chunks:
            why = f"{self.split_chunks} chunks held the tokens of several steps"
            found.append(Missing("steps", "edges of some steps", why, "the chunk's time, cut evenly"))
        return found

    def close(self) -> None:
        """End the engine and remove its files."""
        self.session.close()
        self._folder.cleanup()


def check(variant: Variant, spec: ModelSpec) -> None:
    """Raise InputError where SGLang cannot run ``variant``; nothing is started."""
    where = f"variant {variant.name!r}"
    if variant.model.weights != "random":
        raise InputError(f"{where}: model.weights: SGLang is run with random weights", hint="weights = 'random'")
    if variant.model.tp != 1:
        raise InputError(f"{where}: model.tp: SGLang is run on one GPU", hint="tp = 1")
    if variant.sampling.method != "greedy":
        raise InputError(f"{where}: sampling.method: SGLang is run greedily", hint="method = 'greedy'")
    if variant.drafter.kind not in ("none", "simulated"):
        raise InputError(
            f"{where}: drafter.kind: with random weights SGLang drafts by DFlash and acceptance is simulated",
            hint="kind = 'none' or 'simulated'",
        )
    if variant.engine.run_ahead:
        raise InputError(f"{where}: engine.run_ahead: SGLang runs ahead unless told not to", hint="leave it out")
    if variant.engine.faults:
        raise InputError(f"{where}: engine.faults: they are planted in this project's rungs only", hint="faults = []")
    try:
        hf_config(spec)
    except InputError as error:
        raise InputError(f"{where}: {error.message}", hint="model.preset = 'gpt-oss-20b' or a qwen3") from None


def settings(variant: Variant, spec: ModelSpec, root: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keyword arguments of ``sglang.Engine`` and the environment variables that ``variant`` asks for.

    The scenario's ``engine.arguments`` come last, so they win.
    """
    drafter = variant.drafter
    room = variant.prompts.max_prompt_tokens + variant.prompts.new_tokens + drafter.width
    arguments: dict[str, Any] = {
        "model_path": str(write_config(root / "target", hf_config(spec))),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "random_seed": variant.model.seed,
        "disable_radix_cache": True,
        "log_level": "info",
        "mem_fraction_static": MEMORY_SHARE,
        "max_running_requests": 2,
        "max_total_tokens": max(4096, 4 * room),
    }
    environment: dict[str, str] = {}
    if drafter.kind == "simulated":
        taps = tuple(sorted({1, spec.layers // 2, spec.layers - 2}))
        draft = dflash_config(spec, block=drafter.width, taps=taps)
        arguments |= {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(write_config(root / "draft", draft)),
            "speculative_draft_load_format": "dummy",
            "speculative_num_draft_tokens": drafter.width,
        }
        assert drafter.accept_length is not None  # noqa: S101 - guaranteed by the scenario's validator
        environment["SGLANG_SIMULATE_ACC_LEN"] = f"{drafter.accept_length:g}"
        methods = {"fixed": "match-expected", "multinomial": "multinomial"}
        environment["SGLANG_SIMULATE_ACC_METHOD"] = methods[drafter.pattern]
    return arguments | dict(variant.engine.arguments), environment

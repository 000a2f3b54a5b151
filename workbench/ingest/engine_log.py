"""Read the lines of an engine's log that say how decoding goes, as counters over time.

SGLang: ``Decode batch`` (every ``--decode-log-interval`` forwards). vLLM: throughput and ``SpecDecoding metrics``
(every ten seconds). A line's numbers are over the time since the line before of its kind and rank, so a counter's
interval ends at its line. Accept length counts the bonus token in both.

Lines are written once a second at best and state whole seconds: intervals are exact to a second.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workbench.errors import InputError
from workbench.ingest.bounded import Limits, read_blocks
from workbench.ingest.log_times import LogClock
from workbench.ingest.losses import Losses
from workbench.ingest.part import CleanStep, Part, Row, limit

PROBE = "log"
MAX_LINE = 1 << 16

Engine = Literal["sglang", "vllm"]

GENERATED = "generation_throughput"
ACCEPT_LENGTH = "accept_length"
GRAPH = "cuda_graph"
RUNNING = "running_requests"
READ_RATE = "estimated_read_rate"
"""What the engine works out from its shapes, not what memory does."""

_SGLANG = re.compile(r"Decode batch[.,]?(?: \[\d+\])?[.,]? (#running-req: .*)")
_SGLANG_FIELDS: dict[str, tuple[str, str, float]] = {
    "#running-req": (RUNNING, "sequences", 1),
    "#token": ("tokens_in_cache", "tokens", 1),
    "#full token": ("tokens_in_cache", "tokens", 1),
    "token usage": ("cache_usage", "share", 1),
    "full token usage": ("cache_usage", "share", 1),
    "accept len": (ACCEPT_LENGTH, "tokens", 1),
    "accept rate": ("accept_rate", "share", 1),
    "cap len": ("cap_length", "tokens", 1),
    "block accept len": ("block_accept_length", "tokens", 1),
    "cuda graph": (GRAPH, "share", 1),
    "gen throughput (token/s)": (GENERATED, "tok/s", 1),
    "#queue-req": ("queued_requests", "sequences", 1),
    "est. decode TFLOPS/s (per GPU)": ("estimated_flop_rate", "FLOP/s", 1e12),
    "est. read BW (GB/s per GPU)": (READ_RATE, "B/s", 1e9),
    "est. write BW (GB/s per GPU)": ("estimated_write_rate", "B/s", 1e9),
    "fwd occupancy": ("forward_share", "share", 1),
    "fwd+idle occupancy": ("forward_and_idle_share", "share", 1),
}
"""Field of a line: counter, unit, factor. ``fwd occupancy`` is time in forwards, not occupancy of SMs."""

_RANK = re.compile(r"\[[^\]]*?((?: (?:DP|TP|PP|EP)\d+)+)\]")
_VLLM_ENGINE = re.compile(r"Engine (\d{1,4}): (Avg prompt throughput: .*)")
_VLLM_SPEC = re.compile(r"SpecDecoding metrics: (.*)")
_VLLM_FIELDS: dict[str, tuple[str, str, float]] = {
    "Avg prompt throughput": ("prompt_throughput", "tok/s", 1),
    "Avg generation throughput": (GENERATED, "tok/s", 1),
    "Running": (RUNNING, "sequences", 1),
    "Waiting": ("queued_requests", "sequences", 1),
    "GPU KV cache usage": ("cache_usage", "share", 0.01),
    "Mean acceptance length": (ACCEPT_LENGTH, "tokens", 1),
    "Accepted throughput": ("accepted_throughput", "tok/s", 1),
    "Drafted throughput": ("drafted_throughput", "tok/s", 1),
    "Accepted": ("accepted_tokens", "tokens", 1),
    "Drafted": ("drafted_tokens", "tokens", 1),
    "Draft acceptance rate": ("accept_rate", "share", 0.01),
    "Avg Draft acceptance rate": ("accept_rate", "share", 0.01),
}
_POSITIONS = re.compile(r"Per-position acceptance rate: ([\d.]+(?:, [\d.]+)*)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(slots=True)
class _Log:
    """Rows so far, and the last moment of each series."""

    clock: LogClock = field(default_factory=LogClock)
    rows: list[Row] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    undated: int = 0
    steps: list[CleanStep] = field(default_factory=list)


def read_log(path: Path, engine: Engine, limits: Limits = Limits()) -> Part:  # noqa: B008
    """Read the log in ``path``. Raises InputError where no line of it can be used."""
    losses = Losses(PROBE)
    log = _Log()
    add: Callable[[_Log, str], None] = _add_sglang if engine == "sglang" else _add_vllm
    for line in _lines(path, losses, limits):
        add(log, line)
    losses.add("line-without-time", "data_loss", "lines without a time: left out", count=log.undated)
    if not log.rows:
        raise InputError(f"{path}: nothing to read (no line with its time says how decoding goes)", hint=_hint(engine))
    log.rows.sort(key=lambda row: (row["start_ns"], row["end_ns"]))
    part = Part("log", f"a log of {'SGLang' if engine == 'sglang' else 'vLLM'}", losses, records=log.lines)
    part.tables = {"counters": log.rows}
    part.local_time = log.clock.dated
    names = {row["name"] for row in log.rows}
    part.clean_steps = log.steps
    part.notes = [f"{log.lines} lines of {part.what} say how decoding goes; their times are whole seconds"]
    part.limits = list(_limits(engine, names, dated=log.clock.dated))
    return part


def _add_sglang(log: _Log, line: str) -> None:
    found = _SGLANG.search(line)
    if found is None:
        return
    values = dict(_pairs(found[1], _SGLANG_FIELDS))
    rank = _RANK.search(line[:200])
    place = rank[1].strip() if rank else ""
    numbers = {name: value for name, (value, _) in values.items()}
    if _append(log, line, place, values) and numbers.get(GENERATED) and numbers.get(RUNNING):
        batch = round(numbers[RUNNING])
        step = batch * numbers.get(ACCEPT_LENGTH, 1.0) / numbers[GENERATED] * 1e9
        log.steps.append(CleanStep(step, batch, log.last[place]))


def _add_vllm(log: _Log, line: str) -> None:
    if found := _VLLM_ENGINE.search(line):
        _append(log, line, f"engine {found[1]}", dict(_pairs(found[2], _VLLM_FIELDS)))
    elif found := _VLLM_SPEC.search(line):
        values = dict(_pairs(_POSITIONS.sub("", found[1]), _VLLM_FIELDS))
        if positions := _POSITIONS.search(found[1]):
            for number, text in enumerate(positions[1].split(", ")[:64], 1):
                values[f"accept_rate_at_{number}"] = (float(text), "share")
        _append(log, line, "speculation", values)


def _pairs(text: str, fields: dict[str, tuple[str, str, float]]) -> Iterator[tuple[str, tuple[float, str]]]:
    for piece in text.split(", "):
        key, _, value = piece.partition(": ")
        known = fields.get(key.strip().removesuffix(","))
        if known is None:
            continue
        name, unit, factor = known
        plain = value.strip().rstrip(",")
        if plain in ("True", "False"):
            yield name, (float(plain == "True"), unit)
        elif (number := _NUMBER.match(plain)) and len(number[0]) < 40:
            yield name, (float(number[0]) * factor, unit)


def _append(log: _Log, line: str, place: str, values: dict[str, tuple[float, str]]) -> bool:
    """Add a line's counters; False where it gives none."""
    moment = log.clock.read(line)
    log.undated += moment is None and bool(values)
    if moment is None or not values:
        return False
    log.lines += 1
    begin = log.last.get(place)
    log.last[place] = moment
    # The first line's interval began at an unknown time, and idle time before it counts in its throughput.
    for name, (value, unit) in values.items():
        row = {"source": PROBE, "name": f"{name} {place}" if _is_rank(place) else name, "value": value, "unit": unit}
        log.rows.append(row | {"start_ns": moment if begin is None else min(begin, moment), "end_ns": moment})
    return begin is not None


def _is_rank(place: str) -> bool:
    """Return whether a series needs the rank in its name: rank 0 of one server speaks for it."""
    return place not in ("", "TP0", "engine 000", "engine 0", "speculation", "DP0 TP0")


def _limits(engine: Engine, names: set[str], *, dated: bool) -> Iterator[dict[str, str]]:
    why = "a log holds means over seconds"
    yield limit("steps", "single steps, kernels, gaps", why, "means over an interval", "trace a few steps")
    yield limit("pm_sampler", "HBM throughput", "a log does not hold it", "", "workbench attach")
    if READ_RATE in names:
        what = "est. read BW is arithmetic of the engine's: no measurement"
        yield limit("pm_sampler", "bytes read", what, "the engine's estimate", "workbench attach")
    if ACCEPT_LENGTH not in names:
        yield limit("steps", "accept length", "no line states it: no speculation, or an older version", "", "")
    else:
        yield limit("steps", "accept length of a step", why, "its mean over an interval", "workbench attach")
    if engine == "vllm":
        yield limit("log", "CUDA graphs in use", "vLLM's log does not say", "", "trace a few steps")
    if not dated:
        yield limit("log", "the year, or the date", "lines do not state it", "times from the first line on", "")


def _hint(engine: Engine) -> str:
    return "start the server with --decode-log-interval 40" if engine == "sglang" else "leave its statistics on"


def _lines(path: Path, losses: Losses, limits: Limits) -> Iterator[str]:
    rest = b""
    for block in read_blocks(path, losses, limits):
        *whole, rest = (rest + block).split(b"\n")
        yield from (line[:MAX_LINE].decode("utf-8", "replace").rstrip("\r") for line in whole)
        rest = rest[:MAX_LINE] if len(rest) > 16 * MAX_LINE else rest
    if rest:
        yield rest[:MAX_LINE].decode("utf-8", "replace")

"""Read results of load generators: AIPerf's summary, and what sglang.benchmark writes.

Each number sums up a whole run as a client saw it: it becomes one counter without a time.
AIPerf: docs.nvidia.com/aiperf, profile_export_aiperf.json. SGLang: python -m sglang.benchmark.one_batch,
one_batch_server, serving; a line a result.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from workbench.errors import InputError
from workbench.ingest.bounded import Limits, read_blocks
from workbench.ingest.losses import Losses
from workbench.ingest.part import CleanStep, Part, Row, counter, limit

PROBE = "benchmark"
AIPERF, SGLANG = "aiperf", "sglang.benchmark"
MAX_BYTES = 256 << 20
MAX_RESULTS = 10_000

_STATISTICS = ("avg", "p50", "p90", "p99", "min", "max", "std")
_UNITS = (
    (re.compile(r"_ms$"), "ms"),
    (re.compile(r"request_throughput|request_rate"), "requests/s"),
    (re.compile(r"throughput"), "tok/s"),
    (re.compile(r"(accept|acc)_length|_len$|_tokens"), "tokens"),
    (re.compile(r"batch_size|concurrency|completed"), "sequences"),
    (re.compile(r"latency|ttft|duration"), "s"),
)
"""Units by what a key says: the first that fits."""

ACCEPT_LENGTH = "accept_length"


def read_aiperf(path: Path, limits: Limits = Limits()) -> Part:  # noqa: B008
    """Read AIPerf's summary in ``path``. Raises InputError where it is damaged or holds no metric."""
    losses = Losses(PROBE)
    try:
        document = msgspec.json.decode(_read(path, losses, limits))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{path}: damaged JSON ({str(error)[:120]})", hint="run the benchmark again") from None
    rows, env = [], []
    for key, value in document.items() if isinstance(document, dict) else ():
        if isinstance(value, dict) and isinstance(value.get("unit"), str):
            name = ACCEPT_LENGTH if re.search(r"accept\w*_length", key) else key
            for statistic in _STATISTICS:
                if _is_number(value.get(statistic)):
                    suffix = "" if statistic == "avg" else f" {statistic}"
                    rows.append(counter(AIPERF, name + suffix, value[statistic], value["unit"]))
        elif isinstance(value, str | int | float | bool):
            env.append({"key": f"aiperf.{key}"[:400], "value": str(value)[:400]})
    if not rows:
        raise InputError(f"{path}: nothing to read (no metric of AIPerf in it)", hint="profile_export_aiperf.json")
    if document.get("was_cancelled") is True:
        losses.add("cancelled", "data_loss", "the benchmark was cancelled: its numbers are of a part")
    return _part("AIPerf's summary", losses, rows, env)


def read_sglang_benchmark(path: Path, limits: Limits = Limits()) -> Part:  # noqa: B008
    """Read results of sglang.benchmark in ``path``: one JSON object, or one a line. Raises InputError where none is."""
    losses = Losses(PROBE)
    rows: list[Row] = []
    results = list(_results(_read(path, losses, limits), losses))
    for number, result in enumerate(results[:MAX_RESULTS]):
        place = f" [{number}]" if len(results) > 1 else ""
        for key, value in result.items():
            if _is_number(value):
                name = ACCEPT_LENGTH if key in ("accept_length", "acc_length") else key
                rows.append(counter(SGLANG, name + place, value, _unit(key)))
    if not rows:
        raise InputError(f"{path}: nothing to read (no result of sglang.benchmark in it)", hint="--result-filename")
    losses.add("results-cut", "data_loss", f"results beyond {MAX_RESULTS}", count=len(results) - MAX_RESULTS)
    part = _part("results of sglang.benchmark", losses, rows, [])
    part.clean_steps = [step for result in results if (step := _step(result))]
    return part


def _part(what: str, losses: Losses, rows: list[Row], env: list[Row]) -> Part:
    part = Part("benchmark", what, losses, {"counters": rows, "env": env}, records=len(rows))
    part.notes = [f"{what}: {len(rows)} numbers of a whole run as its client saw it"]
    why = "a benchmark sums up a run from outside"
    part.limits = [
        limit("steps", "steps, kernels, gaps", why, "", "trace a few steps"),
        limit("pm_sampler", "HBM throughput", why, "", "workbench attach"),
        limit("steps", "when anything happened", why, "counters without a time", ""),
    ]
    if not any(row["name"].startswith(ACCEPT_LENGTH) for row in rows):
        part.limits.append(limit("steps", "accept length", "the results do not state it", "", "the engine's log"))
    return part


def _results(text: bytes, losses: Losses) -> Iterator[dict[str, Any]]:
    try:
        whole = msgspec.json.decode(text)
        found = whole if isinstance(whole, list) else [whole]
        yield from (one for one in found if isinstance(one, dict))
        return
    except (msgspec.MsgspecError, RecursionError):
        pass  # not one document: a line each
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            one = msgspec.json.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            losses.add("line-damaged", "data_loss", "lines that are no JSON: left out")
            continue
        if isinstance(one, dict):
            yield one


def _step(result: dict[str, Any]) -> CleanStep | None:
    """Return a step's time: as stated, or from the throughput at a batch and an accept length; None for neither."""
    batch = result.get("batch_size")
    if type(batch) is not int or batch < 1:
        return None
    latency = result.get("median_decode_latency")
    if _is_number(latency) and latency > 0:
        return CleanStep(latency * 1e9, batch)
    rate, length = result.get("last_gen_throughput"), result.get("acc_length")
    if _is_number(rate) and rate > 0:
        # Without speculation the server states an accept length of -1 or none: a token a step.
        committed = length if _is_number(length) and length > 0 else 1.0
        return CleanStep(batch * committed / rate * 1e9, batch)
    return None


def _unit(key: str) -> str:
    return next((unit for pattern, unit in _UNITS if pattern.search(key)), "")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _read(path: Path, losses: Losses, limits: Limits) -> bytes:
    allowed = Limits(min(limits.max_bytes, MAX_BYTES), limits.max_ratio)
    return b"".join(read_blocks(path, losses, allowed))

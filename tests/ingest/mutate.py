"""Mutate small traces N times and read them: ``python -m tests.ingest.mutate [N] [--first SEED]``.

Whatever comes: no exception but InputError with one line, nothing that takes more than ten seconds, tables that fit
their schema, and no silent loss. That is, every event that was read is kept or counted in the losses, and where damage
left fewer events than the trace had, a row of the losses says so. Every twentieth trace becomes a bundle that is
checked, accounted for, judged and exported.

A mutation is named by its seed; a failing one prints the seed and keeps the trace.
"""

import argparse
import copy
import gzip
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.errors import InputError
from workbench.ingest import environment
from workbench.ingest.bundle import ingest_kineto
from workbench.ingest.kineto import KinetoTrace, read_kineto
from workbench.ingest.launches import match_launches
from workbench.ingest.steps import find_steps
from workbench.ingest.tables import Tables, counter_rows, step_rows
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle
from workbench.trace.rows import conform, from_rows

GOLDEN = Path(__file__).parent / "golden"
LIMIT_SECONDS = 10
BUNDLE_EVERY = 20

HOSTILE = (
    "", "\x00", "a\nb\r\t", '"', "\\", "},{", '},{"ph":"X"', "]", "</script><script>alert(1)</script>", "=cmd|' /C'!A0",
    "\u202e\u2066", "\x1b[2J", "x" * 100_000, "../../etc/passwd", "%s%n{0}", "😀" * 50, "\ufeff", "step[DECODE bs=1]",
    "ProfilerStep#1", "cudaGraphLaunch", "step[DECODE bs=99999999999999999999]", "execute_context_0(0)_generation_0(0)",
)  # fmt: skip
VALUES = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, 5e-324, 1.5e15, "", "7", "x", "NaN",
    [], [1], [1, 2, 3], [[[]]], {}, {"a": {"b": [1]}}, [None] * 50,
)  # fmt: skip
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "-nan",
    "1e999",
    "0x10",
    "1_000",
    "01",
    "'x'",
    "undefined",
    "{",
    "]",
    "1.",
    "--1",
)


class BrokenPromiseError(Exception):
    """What a mutation broke."""


@contextmanager
def time_limit() -> Iterator[None]:
    def expire(*_: object) -> None:
        raise BrokenPromiseError(f"took more than {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mutate(text: bytes, rng: random.Random) -> tuple[bytes, str, int | None]:
    """Return a mutated trace, the kind of mutation, and how many events it has; None where that cannot be known."""
    kind = rng.choice([*BYTES, *DOCUMENT])
    if kind in DOCUMENT:
        document = json.loads(text)
        changed = DOCUMENT[kind](document, rng)
        events = changed.get("traceEvents") if isinstance(changed, dict) else None
        count = sum(isinstance(event, dict) for event in events) if isinstance(events, list) else None
        return json.dumps(changed, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode(), kind, count
    return BYTES[kind](text, rng), kind, None


def _truncate(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def _flip(text: bytes, rng: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice([1, 1, 2, 16])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(text: bytes, rng: random.Random) -> bytes:
    """Overwrite a run with what a lost block of a file or a bad memory leaves."""
    at, size = rng.randrange(len(text)), rng.choice([1, 8, 300])
    return text[:at] + rng.choice([bytes(size), rng.randbytes(size), b"\xff" * size]) + text[at + size :]


def _overwrite_text(text: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(text)), rng.choice([1, 8, 300])
    return text[:at] + rng.choice([b'"', b"{", b"}", b"]", b"a", b" ", b"\\"]) * size + text[at + size :]


def _insert(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    piece = rng.choice(
        [b"\x00", b"\n[W1107 profiler.cpp:1] warning\n", b'"', b"\\", b"}", b"]", b",", b"[" * 5000, b"\x80"]
    )
    return text[:at] + piece + text[at:]


def _cut_out(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    return text[:at] + text[at + rng.randrange(1, 400) :]


def _repeat(text: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(text)), rng.randrange(1, 600)
    return text[: at + size] + text[at : at + size] + text[at + size :]


def _raw_value(text: bytes, rng: random.Random) -> bytes:
    """Replace a number by something that is no JSON."""
    places = [at for at in range(len(text) - 2) if text[at : at + 2] == b": " and text[at + 2 : at + 3].isdigit()]
    at = rng.choice(places) + 2
    end = at
    while text[end : end + 1] in b"0123456789.":
        end += 1
    return text[:at] + rng.choice(RAW).encode() + text[end:]


def _gzip(text: bytes, rng: random.Random) -> bytes:
    """Compress, then damage what was compressed."""
    packed = gzip.compress(text, rng.choice([1, 9]), mtime=0)
    return rng.choice([_truncate, _flip, _overwrite, _cut_out, _repeat])(packed, rng)


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncate": _truncate,
    "flip": _flip,
    "overwrite": _overwrite,
    "overwrite by text": _overwrite_text,
    "insert": _insert,
    "cut out": _cut_out,
    "repeat": _repeat,
    "raw value": _raw_value,
    "gzip": _gzip,
}
MAY_JOIN = {"cut out", "repeat", "overwrite by text"}
"""Kinds that can leave valid JSON in which two events are one, or none is there: nobody can tell."""


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in a document."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _swap_type(document: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice([1, 1, 3])):
        container, key = rng.choice(list(_places(document["traceEvents"])) or [(document, "schemaVersion")])
        container[key] = copy.deepcopy(rng.choice(VALUES))
    return document


def _swap_everywhere(document: Any, rng: random.Random) -> Any:
    """Swap one field of all events: a writer with another idea of its type."""
    field, value = rng.choice(["ts", "dur", "name", "cat", "ph", "pid", "tid", "args"]), rng.choice(VALUES)
    for event in document["traceEvents"]:
        event[field] = copy.deepcopy(value)
    return document


def _swap_header(document: Any, rng: random.Random) -> Any:
    container, key = rng.choice([place for place in _places(document) if place[0] is not document["traceEvents"]])
    container[key] = copy.deepcopy(rng.choice(VALUES))
    return document


def _hostile_name(document: Any, rng: random.Random) -> Any:
    for event in document["traceEvents"]:
        if rng.random() < 0.3:
            event["name"] = rng.choice(HOSTILE)
    return document


def _hostile_key(document: Any, rng: random.Random) -> Any:
    container, _ = rng.choice(list(_places(document["traceEvents"])))
    if isinstance(container, dict):
        container[rng.choice(HOSTILE)] = rng.choice(VALUES)
    return document


def _drop_key(document: Any, rng: random.Random) -> Any:
    field = rng.choice(["ts", "dur", "name", "cat", "ph", "pid", "tid", "args"])
    for event in document["traceEvents"]:
        if rng.random() < 0.4:
            event.pop(field, None)
    return document


def _drop_arguments(document: Any, rng: random.Random) -> Any:
    for event in document["traceEvents"]:
        if isinstance(event.get("args"), dict) and event["args"] and rng.random() < 0.4:
            event["args"].pop(rng.choice(list(event["args"])))
    return document


def _times(document: Any, rng: random.Random) -> Any:
    for event in document["traceEvents"]:
        if rng.random() < 0.3:
            event[rng.choice(["ts", "dur"])] = rng.choice([0, -1, 1e15, 1e18, -1e15, 3e9, 0.0001, 1 << 62, "5", 1e-9])
    return document


def _correlations(document: Any, rng: random.Random) -> Any:
    for event in document["traceEvents"]:
        if isinstance(event.get("args"), dict) and rng.random() < 0.5:
            event["args"]["correlation"] = rng.choice([0, 1, -1, 2, 2**62, 7])
    return document


def _shuffle(document: Any, rng: random.Random) -> Any:
    rng.shuffle(document["traceEvents"])
    return document


def _multiply(document: Any, rng: random.Random) -> Any:
    document["traceEvents"] *= rng.choice([2, 10])
    return document


def _drop_events(document: Any, rng: random.Random) -> Any:
    share = rng.random()
    document["traceEvents"] = [event for event in document["traceEvents"] if rng.random() < share]
    return document


def _other_shape(document: Any, rng: random.Random) -> Any:
    return rng.choice([document["traceEvents"], {"traceEvents": {"a": document}}, [document], {"a": document}, 7, {}])


DOCUMENT: dict[str, Callable[[Any, random.Random], Any]] = {
    "swap type": _swap_type,
    "swap everywhere": _swap_everywhere,
    "swap header": _swap_header,
    "hostile name": _hostile_name,
    "hostile key": _hostile_key,
    "drop key": _drop_key,
    "drop arguments": _drop_arguments,
    "times": _times,
    "correlations": _correlations,
    "shuffle": _shuffle,
    "multiply": _multiply,
    "drop events": _drop_events,
    "other shape": _other_shape,
}


def examine(path: Path, kind: str, expected: int | None, original: int) -> str:
    """Read the trace in ``path`` and return the outcome; raises BrokenPromiseError where a promise is broken."""
    try:
        trace = read_kineto(path)
    except InputError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            raise BrokenPromiseError(f"not one line: {error!r}") from None
        return "refused"
    _require_no_silent_loss(trace, kind, expected, original)
    found = find_steps(trace, match_launches(trace))
    tables = Tables(trace, found, environment.rank(trace.header), {0: 2048})
    for name, slices in (("host", tables.host()), ("kernels", tables.kernels()), ("syncs", tables.syncs())):
        for piece in slices:
            conform(name, piece)
    from_rows("steps", step_rows(found))
    from_rows("counters", counter_rows(trace))
    from_rows("env", environment.facts(trace.header, trace.threads, trace.losses))
    from_rows("losses", [{"variant": None, **row} for row in trace.losses.rows()])
    return "lossy" if any(row["severity"] != "info" for row in trace.losses.rows()) else "read"


def _require_no_silent_loss(trace: KinetoTrace, kind: str, expected: int | None, original: int) -> None:
    rows = trace.losses.rows()
    dropped = ("not-kept-", "unknown-", "no-start", "no-device", "unusable-counter")
    counted = sum(row["count"] for row in rows if row["kind"].startswith(dropped))
    kept = sum(len(table["start"]) for table in (trace.device, trace.host, trace.syncs)) + len(trace.counters)
    if kept + counted < trace.events:
        raise BrokenPromiseError(f"{trace.events} events read, {kept} rows kept and {counted} counted as left out")
    serious = [row for row in rows if row["severity"] != "info"]
    if expected is not None and trace.events != expected and not serious:
        raise BrokenPromiseError(f"{trace.events} events read of {expected}, and no loss stated")
    if expected is None and kind not in (MAY_JOIN | {"other shape"}) and trace.events < original and not serious:
        raise BrokenPromiseError(f"{trace.events} events read of {original}, and no loss stated")


def examine_bundle(path: Path, folder: Path) -> None:
    """Make a bundle of the trace and use it; raises BrokenPromiseError where it is not like any other."""
    from workbench.diagnose.busy import activities, busy, busy_by_step
    from workbench.diagnose.gaps import explain, gaps
    from workbench.trace.perfetto import write_perfetto
    from workbench.trace.validity import verdict

    try:
        ingest_kineto(path, folder)
    except InputError:
        return
    report = check_bundle(folder)
    if not report.ok:
        raise BrokenPromiseError(f"the bundle is not sound: {report.problems[:2]}")
    with Bundle.open(folder) as bundle:
        for device in (
            *busy(bundle, "trace"),
            *(one for many in busy_by_step(bundle, "trace").values() for one in many),
        ):
            if sum(device.by_category) != device.window_ns or min(device.by_category) < 0:
                raise BrokenPromiseError(f"categories do not add up: {device}")
        for activity in activities(bundle, "trace"):
            for gap in gaps(activity, 2):
                explain(bundle, "trace", gap).sentence()
        verdict(bundle).to_json()
        write_perfetto(bundle, folder / "t.pftrace")


def run(count: int, first: int = 0, *, keep: Path | None = None) -> Counter[str]:
    """Run mutations ``first`` to ``first + count`` and return the outcomes; raises BrokenPromiseError at the first."""
    seeds = [path.read_bytes() for path in sorted(GOLDEN.glob("*.trace.json"))]
    whole = [text for text in seeds if _is_json(text)]
    outcomes: Counter[str] = Counter()
    slowest, slow_seed = 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        for seed in range(first, first + count):
            rng = random.Random(seed)  # noqa: S311
            original = rng.choice(whole)
            events = len(json.loads(original)["traceEvents"])
            text, kind, expected = mutate(original, rng)
            path = Path(name) / "t.json"
            path.write_bytes(text)
            begin = time.perf_counter()
            try:
                with time_limit():
                    outcomes[examine(path, kind, expected, events)] += 1
                    if seed % BUNDLE_EVERY == 0:
                        examine_bundle(path, Path(name) / f"bundle{seed}")
            except Exception as error:
                kept = (keep or Path(tempfile.gettempdir())) / f"mutation-{seed}.json"
                kept.write_bytes(text)
                raise BrokenPromiseError(
                    f"mutation {seed} ({kind}), kept in {kept}: {type(error).__name__}: {error}"
                ) from error
            if (took := time.perf_counter() - begin) > slowest:
                slowest, slow_seed = took, seed
    outcomes[f"slowest: {slowest * 1000:.0f} ms, mutation {slow_seed}"] = 1
    return outcomes


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutate traces and read them.")
    parser.add_argument("count", type=int, nargs="?", default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first mutation")
    options = parser.parse_args()
    begin = time.perf_counter()
    try:
        outcomes = run(options.count, options.first)
    except BrokenPromiseError as failure:
        sys.exit(f"failed: {failure}")
    print(f"{options.count} mutations in {time.perf_counter() - begin:.1f} s: {dict(outcomes)}")


if __name__ == "__main__":
    main()

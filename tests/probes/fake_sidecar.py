"""A sidecar without a GPU: speaks the protocol of pm_sidecar.py and misbehaves as its first argument says.

fake_sidecar.py MODE --device UUID --spool FOLDER --interval-ns N --buffer-bytes N
"""

import argparse
import json
import os
import signal
import struct
import sys
import time
from pathlib import Path

DRIFT_PPB = 5_000
UNIX_NS = 1_700_000_000_000_000_000
READ_BYTES = 44_000_000


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def source(own_ns: int) -> int:
    """Return this fake's source clock at ``own_ns`` of the monotonic clock."""
    return UNIX_NS + own_ns + own_ns % 1_000_000_000_000 * DRIFT_PPB // 1_000_000_000


def anchors(mode: str) -> dict[str, list[list[int]]]:
    rows = []
    for _ in range(3):
        before = time.perf_counter_ns()
        rows.append([source(before + 100), before, before + 200])
    found = {"unix": rows, "cupti": [[value - UNIX_NS // 2, low, high] for value, low, high in rows]}
    return {"unix": found["unix"]} if mode == "unix-only" else found


def write(mode: str, spool: Path, readings: list[str], interval: int, first: int, last: int) -> int:
    """Write samples from ``first`` to ``last`` of the monotonic clock; return how many."""
    shift = -UNIX_NS // 2 if mode == "cupti-clock" else 0
    spans = [(first + index * interval, first + (index + 1) * interval) for index in range((last - first) // interval)]
    if mode == "late":
        spans = spans[2000:]
    if mode == "early":
        spans = spans[:100]
    if mode == "stale":
        spans[1:1] = [
            (first - 10_000_000 + index * interval, first - 9_990_000 + index * interval) for index in range(5)
        ]
    if mode == "gap":
        spans = spans[:50] + spans[60:]
    if mode == "long":
        spans = [*spans[:50], (spans[50][0], spans[59][1]), *spans[60:]]
    rows = [(source(start) + shift, source(end) + shift) for start, end in spans]
    values = {"sm_cycles": 18_000.0, "dram_read_bytes": READ_BYTES / 32, "dram_write_bytes": 1.0}
    values |= {"ctas_per_sm": 36_000.0, "sm_active": 9_000.0, "warps_active": 2 * 18_000.0 * 16}
    matrix = [[values.get(name, 1.0) for name in readings] for _ in rows]
    rows[0], matrix[0] = (12345, rows[0][1]), [1e18] * len(readings)  # the garbage of every session's first sample
    if mode == "damaged":
        rows[20], rows[30], rows[40] = (0, 0), (rows[30][1], rows[30][0]), (2**62, 2**62)
        matrix[50][readings.index("dram_write_bytes")] = float("nan")
    if mode == "strange-clock":
        rows = [(start // 7, end // 7) for start, end in rows]
    (spool / "times.i64").write_bytes(b"".join(struct.pack("<qq", *row) for row in rows))
    (spool / "values.f64").write_bytes(b"".join(struct.pack(f"<{len(readings)}d", *row) for row in matrix))
    return len(rows) + (1000 if mode == "truncated" else 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--device")
    parser.add_argument("--spool", type=Path)
    parser.add_argument("--interval-ns", type=int)
    parser.add_argument("--buffer-bytes", type=int)
    options = parser.parse_args()
    mode = options.mode
    if mode == "crash":
        print("Fatal Python error: Segmentation fault", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "exits":
        print("ModuleNotFoundError: No module named 'numpy'", file=sys.stderr)
        return 1
    if mode == "hang":
        time.sleep(60)
    if mode == "babble":
        print("Warning: not JSON", flush=True)
    plan = json.loads(sys.stdin.readline())
    readings = [reading["name"] for reading in plan["readings"]]
    if mode == "no-permission":
        say("failed", why="counters are for administrators only here (ERR_NVGPUCTRPERM)", fix="load the driver with …")
        return 3
    refused = {}
    if mode == "refuses":
        refused = {name: "needs 2 passes beside the others" for name in readings if name.startswith("pcie")}
        readings = [name for name in readings if name not in refused]
    facts = {
        "set": plan["set"],
        "metrics": {r["name"]: r["metrics"][0] for r in plan["readings"] if r["name"] in readings},
        "refused": refused,
        "interval_ns": options.interval_ns,
        "device": {"uuid": options.device, "warps_per_sm": 64},
    }
    if mode == "empty" or (mode == "empty-with-pcie" and any(name.startswith("pcie") for name in readings)):
        say("empty", **facts)
        return 0
    if mode == "unfit-with-pcie" and any(name.startswith("pcie") for name in readings):
        say("empty", set=plan["set"], why="CUPTI refuses the set: not supported")
        return 0
    say("ready", **facts)
    first, begin = 0, {}
    for line in sys.stdin:
        if line.strip() == "start":
            begin, first = anchors(mode), time.perf_counter_ns()
            say("started")
        elif line.strip() == "stop":
            if mode == "hang-at-stop":
                time.sleep(60)
            if mode == "crash-at-stop":
                os.abort()
            span = first, time.perf_counter_ns()
            samples = 0 if mode == "zero" else write(mode, options.spool, readings, options.interval_ns, *span)
            if mode == "zero":
                for name in ("times.i64", "values.f64"):
                    (options.spool / name).touch()
            stopped = {"samples": samples, "anchors": [begin, anchors(mode), anchors(mode)], "decode_s": 0.1}
            full = [{"seen_ns": first + 1000, "after_samples": 5}] if mode == "overflow" else []
            failure = "the hardware buffer stayed full" if mode == "overflow" else ""
            say("stopped", **stopped, overflows=full, failure=failure)
        elif line.strip() == "quit":
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

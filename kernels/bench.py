"""Check, then time every Triton kernel at true shapes on this GPU: ``python -m workbench.kernels.bench``.

Times are of launches inside one CUDA graph over rotating inputs larger than L2 (launch gaps included: what a step
would see), the median of several replays. The roof is the read bandwidth measured first in the same run; ``roof %``
is the kernel's floor bytes over the time, over that roof. Cases marked hot reuse small inputs, as a step does, and
have no meaningful share of it. ``overlap`` is the best configuration with programmatic dependent launch (overlap.py),
``torch`` the library's way. The default configuration of a case is always run; the rest of its space as far as the
time budget goes. Nothing that fails its check is timed, and a failed check makes the exit status 1.

The table comes last on stdout; ``--json PATH`` (or ``$OUT/kernels_bench.json``) gets every number.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench.errors import InputError, UnfitError, WorkbenchError
from workbench.kernels.bench_case import Case
from workbench.kernels.bench_cases import builders
from workbench.kernels.graph_capture import capturing
from workbench.kernels.roof import SPACE as ROOF_SPACE
from workbench.kernels.roof import read_roof

ROOF_BYTES = 8 << 30
REPLAYS = 7


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph_us(launches: Sequence[Callable[[], object]], replays: int = REPLAYS) -> tuple[float, float]:
    """Capture the callables in one graph; return the median time a launch in µs and the spread (max - min) / median."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for launch in launches:
            launch()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def measure_roof() -> dict[str, Any]:
    """Return the best read bandwidth over the roof kernel's space, bytes per second, and every configuration's."""
    free = torch.cuda.mem_get_info()[0]
    words = min(ROOF_BYTES, free // 4) // 4
    buffer = torch.empty(words, dtype=torch.int32, device="cuda").random_()
    rows: list[dict[str, Any]] = []
    for config in ROOF_SPACE:
        out = torch.empty(config.programs, dtype=torch.int32, device="cuda")
        read_roof(buffer, out, config)
        us, spread = graph_us([partial(read_roof, buffer, out, config)] * 2, 3)
        rows.append({"config": asdict(config), "us": us, "spread": spread, "bytes_per_s": words * 4 / us * 1e6})
    return {"bytes": words * 4, "best": max(row["bytes_per_s"] for row in rows), "rows": rows}


def plain(config: Any) -> Any:
    """Return a configuration as JSON-ready data."""
    if isinstance(config, tuple):
        return [plain(part) for part in config]
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else config


def run_case(case: Case, roof: float, until: float) -> dict[str, Any]:
    """Check and time the default, then the space until the clock passes ``until``."""
    from triton.runtime.errors import TritonError

    repeats = max(1, -(-48 // case.copies))
    rows: list[dict[str, Any]] = []
    for index, config in enumerate(case.configs):
        if index and time.monotonic() > until:
            break
        row: dict[str, Any] = {"config": plain(config), "default": index == 0}
        rows.append(row)
        try:
            row["error"] = case.check(config)
        except (InputError, RuntimeError, TritonError) as problem:  # a configuration this shape or card cannot take
            row["refused"] = str(problem).splitlines()[0]
            continue
        row["passed"] = bool(row["error"] <= case.tolerance)
        if not row["passed"]:
            continue
        launches = [partial(case.launch, copy, config) for copy in range(case.copies)] * repeats
        for launch in launches[: case.copies]:
            launch()
        row["us"], row["spread"] = graph_us(launches)
        row["bytes_per_s"] = case.floor.bytes_moved / row["us"] * 1e6
        row["share_of_roof"] = row["bytes_per_s"] / roof
    result = {
        "name": case.name,
        "shape": case.shape,
        "note": case.note,
        "copies": case.copies,
        "tolerance": case.tolerance,
        "floor": asdict(case.floor),
        "floor_us": case.floor.memory_us(roof),
        "space": len(case.configs),
        "rows": rows,
    }
    timed = [(row["us"], config) for row, config in zip(rows, case.configs, strict=False) if "us" in row]
    if case.overlapped is not None and timed:
        best = min(timed, key=lambda pair: pair[0])[1]
        launches = [partial(case.overlapped, copy, best) for copy in range(case.copies)] * repeats
        launches[0]()
        result["overlap_us"] = graph_us(launches)[0]
    if case.baseline is not None:
        launches = [partial(case.baseline, copy) for copy in range(case.copies)] * repeats
        launches[0]()
        result["baseline_us"] = graph_us(launches)[0]
    return result


def went_wrong(case: dict[str, Any]) -> bool:
    """Whether a case failed, its default was refused, or any configuration failed its check."""
    if "failed" in case or "refused" in case["rows"][0]:
        return True
    return any(row.get("passed") is False for row in case["rows"])


def table(report: dict[str, Any]) -> list[str]:
    """Return the printed lines."""
    roof = report["roof"]["best"]
    lines = [
        f"{report['device']}, torch {report['torch']}, triton {report['triton']}, {report['wall_s']:.0f} s",
        f"read roof {roof / 1e12:.3f} TB/s (measured)",
        f"{'kernel':24} {'shape':26} {'MB':>7} {'floor':>7} {'default':>8} {'best':>8} {'roof':>6} {'overlap':>8}"
        f" {'torch':>7} {'err':>8} {'tried':>6}  best configuration",
    ]
    for case in report["cases"]:
        timed = [row for row in case["rows"] if "us" in row]
        failed = [row for row in case["rows"] if row.get("passed") is False]
        head = f"{case['name']:24.24} {case['shape']:26.26}"
        if "failed" in case:
            lines.append(f"{head} {case['failed']}")
            continue
        if not timed:
            lines.append(f"{head} none ran: {case['rows'][0]}")
            continue
        best = min(timed, key=lambda row: row["us"])
        first = case["rows"][0].get("us")
        moved = case["floor"]["bytes_read"] + case["floor"]["bytes_written"]
        default = f"{first:8.2f}" if first else f"{'-':>8}"
        baseline = f"{case['baseline_us']:7.2f}" if "baseline_us" in case else f"{'-':>7}"
        overlap = f"{case['overlap_us']:8.2f}" if "overlap_us" in case else f"{'-':>8}"
        share = f"{best['share_of_roof']:6.1%}" if not case["note"] else f"{'hot':>6}"
        wrong = f"  {len(failed)} WRONG" if failed else ""
        lines.append(
            f"{head} {moved / 1e6:7.2f} {case['floor_us']:7.2f} {default} {best['us']:8.2f} {share} {overlap}"
            f" {baseline} {best['error']:8.1e} {len(case['rows']):>3}/{case['space']:<2}"
            f"  {_short(best['config'])}{wrong}"
        )
    return lines


def _short(config: Any) -> str:
    if isinstance(config, str):
        return config
    if isinstance(config, list):
        return " + ".join(_short(part) for part in config)
    return "rule" if config is None else ",".join(f"{key}={value}" for key, value in config.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if any check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a group: mxfp4, attention, mla, skinny, …")
    parser.add_argument("--seconds", type=float, default=140.0, help="time budget; defaults run whatever it is")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise UnfitError("kernels bench: needs an NVIDIA GPU, torch.cuda finds none")
    import triton

    began = time.monotonic()
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "roof": measure_roof(),
        "cases": [],
    }
    todo = [builder for group, builder in builders() if not options.only or group in options.only]
    for index, builder in enumerate(todo):
        gc.collect()
        torch.cuda.empty_cache()
        now = time.monotonic()
        share = max(0.0, options.seconds - (now - began)) / (len(todo) - index)
        case = builder()
        try:
            result = run_case(case, report["roof"]["best"], now + share)
        except torch.cuda.OutOfMemoryError as problem:
            result = {"name": case.name, "shape": case.shape, "failed": str(problem).splitlines()[0], "rows": []}
        report["cases"].append(result)
        done = time.monotonic() - now
        sys.stderr.write(f"[{index + 1}/{len(todo)}] {case.name} {case.shape}: {done:.1f} s\n")
        del case
    report["wall_s"] = time.monotonic() - began
    target = options.json or (Path(os.environ["OUT"]) / "kernels_bench.json" if "OUT" in os.environ else None)
    if target is not None:
        target.write_text(json.dumps(report, indent=1))
    sys.stdout.write("\n".join(table(report)) + "\n")
    return 1 if any(went_wrong(case) for case in report["cases"]) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(int(error.exit_code))

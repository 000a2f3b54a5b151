"""What instructions cost on this GPU, for the instruction floors of the CUDA kernels: ``python3 -m
workbench.kernels.instruction_bench``.

Three questions, each asked of every multiprocessor at once, in clocks (medians over them):

- how long an instruction takes in a loop of so much code (an instruction cache holds 128 KB; a persistent step's layer
  is a loop of about that much);
- how long the instructions that decode and multiply four- and eight-bit weights keep a scheduler busy;
- how long the warp groups' MMA takes for FP8 weights against few columns, checked against float64.
"""

import argparse
import ctypes
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.kernels import nvrtc
from workbench.kernels.bench_jobs import Job, compile_together, end, new_report, run_jobs
from workbench.kernels.budget import Budget, wait
from workbench.kernels.hopper import require_hopper

CACHE_SIZES = range(1, 7)
"""In 32 KB of code."""

CACHE_WARPS = (1, 4, 8)
RATE_WARPS = (4, 8)
SCHEDULERS = 4
KINDS = {
    "FFMA": "kFfma",
    "IMAD": "kImad",
    "HFMA2": "kHfma2",
    "LOP3": "kLop3",
    "PRMT": "kPrmt",
    "SHF": "kShf",
    "two e4m3 to f16x2": "kE4m3ToF16",
    "HMMA m16n8k16": "kMmaF16",
}
"""Instructions by the name in the table; what instruction_rates.cu calls them."""

EACH = 64
"""Instructions a round of instruction_rates.cu, and blocks in 32 KB of instruction_cache.cu."""

BLOCK_FMAS = 32
LOOPS = [(size, branch) for branch in (False, True) for size in CACHE_SIZES]
PRODUCTS = [(quads, groups) for quads in (4, 12, 15) for groups in (1, 2, 3)]
"""Blocks of 64 x 128 weights, and warp groups that share them."""

ERROR_BOUND = 1e-3
"""Of the products' norm. The tensor cores sum FP8 products in fewer bits than fp32 has."""

Build = tuple[str, str, dict[str, nvrtc.Macro]]


def cache_build(size: int, branch: bool, warps: int) -> Build:
    """What to compile for a loop of ``size`` times 32 KB."""
    return "instruction_cache.cu", "instruction_cache", {"SIZE": size, "BRANCH": int(branch), "WARPS": warps}


def rate_build(name: str) -> Build:
    """What to compile for one of KINDS."""
    return "instruction_rates.cu", "instruction_rates", {"KIND": KINDS[name]}


def wgmma_build(quads: int, groups: int) -> Build:
    """What to compile for ``quads`` blocks of 64 x 128 weights by ``groups`` warp groups."""
    return "e4m3_wgmma.cu", "e4m3_wgmma", {"QUADS": quads, "GROUPS": groups}


def builds() -> list[Build]:
    """Everything that is measured."""
    caches = [cache_build(*loop, warps) for loop in LOOPS for warps in CACHE_WARPS]
    return [*caches, *(rate_build(name) for name in KINDS), *(wgmma_build(*pair) for pair in PRODUCTS)]


def loop_name(size: int, branch: bool) -> str:
    """How the table calls a loop."""
    return f"{32 * size} KB{', branches' if branch else ''}"


def product_name(quads: int, groups: int) -> str:
    """How the table calls products."""
    return f"{quads} blocks, {groups} groups"


def swizzled(rows: torch.Tensor) -> torch.Tensor:
    """Bytes [..., rows, 128] as a 128-byte swizzle lays them: chunk c of 16 bytes of row r lies where chunk c ^ (r % 8)
    would."""
    chunks = rows.reshape(*rows.shape[:-1], 8, 16)
    count = rows.shape[-2]
    place = torch.arange(8)[None, :] ^ (torch.arange(count)[:, None] % 8)
    index = place.to(rows.device)[:, :, None].expand(count, 8, 16).expand(chunks.shape)
    return torch.gather(chunks, -2, index).flatten(-2)


def _clocks(build: Build, threads: int, arguments: Sequence[nvrtc.Argument], smem_bytes: int = 0) -> float:
    """Launch one CTA a multiprocessor, twice; return what the kernel counted the second time, a median."""
    kernel = nvrtc.Kernel(nvrtc.compile_kernel(*build), smem_bytes=smem_bytes)
    ctas = torch.cuda.get_device_properties(0).multi_processor_count
    clocks = torch.zeros(ctas, dtype=torch.int64, device="cuda")
    for _ in range(2):
        kernel.launch(ctas, threads, torch.cuda.current_stream().cuda_stream, [*arguments, _pointer(clocks)])
        wait(build[1])
    return float(clocks.to(torch.float64).median())


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def time_cache(size: int, branch: bool) -> dict[str, Any]:
    """Clocks a warp takes for an FMA in a loop of ``size`` times 32 KB, by warps a multiprocessor."""
    sink = torch.zeros(1024, device="cuda")
    given: list[nvrtc.Argument] = [ctypes.c_uint(0xFFFFFFFF), ctypes.c_float(1.0), ctypes.c_float(0.5), _pointer(sink)]
    count = size * EACH * BLOCK_FMAS
    clocks = {warps: _clocks(cache_build(size, branch, warps), 32 * warps, given) / count for warps in CACHE_WARPS}
    return {"name": loop_name(size, branch), "table": "cache", "clocks": clocks}


def time_rate(name: str) -> dict[str, Any]:
    """Clocks an instruction keeps a scheduler busy, by warps a scheduler."""
    sink = torch.zeros(1024, dtype=torch.int32, device="cuda")
    clocks = {}
    for warps in RATE_WARPS:
        each = warps // SCHEDULERS
        clocks[each] = _clocks(rate_build(name), 32 * warps, [ctypes.c_uint(3), _pointer(sink)]) / EACH / each
    return {"name": name, "table": "rates", "clocks": clocks}


def multiply(quads: int, groups: int) -> dict[str, Any]:
    """Check FP8 products of the warp groups' MMA against float64, and time them: clocks a block of 64 x 128 weights."""
    weights = torch.randn(quads, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    columns = (60 * torch.randn(quads, 16, 128, device="cuda")).to(torch.float8_e4m3fn)
    got = torch.full((quads, 64, 16), float("nan"), device="cuda")
    laid = [swizzled(side.view(torch.uint8)).contiguous() for side in (weights, columns)]
    smem = 1024 + sum(side.numel() for side in laid)
    clocks = _clocks(wgmma_build(quads, groups), 128 * groups, [*map(_pointer, laid), _pointer(got)], smem)
    expected = weights.double() @ columns.double().transpose(1, 2)
    error = float((got.double() - expected).norm() / expected.norm())
    return {
        "name": product_name(quads, groups),
        "ok": error < ERROR_BOUND,
        "error_norm": error,
        "clocks": clocks / quads,
    }


def compile_all() -> int:
    """Compile every kernel, several at a time; needs no GPU. Returns how many."""
    jobs: list[Callable[[], nvrtc.Cubin]] = [functools.partial(nvrtc.compile_kernel, *build) for build in builds()]
    return compile_together(jobs)


def table_lines(report: dict[str, Any]) -> list[str]:
    """The tables: loops, instructions, products."""
    lines = [f"{report['device']}, torch {report['torch']}, {report['wall_s']:.0f} s; clocks"]
    tables = (
        ("cache", "an FMA of each warp in a loop of", CACHE_WARPS, "warps"),
        ("rates", "an instruction on its scheduler", [warps // SCHEDULERS for warps in RATE_WARPS], "a scheduler"),
    )
    for table, title, counts, what in tables:
        lines.append(f"{title:34}" + "".join(f" {f'{count} {what}':>13}" for count in counts))
        for row in report["timings"]:
            if "error" in row:
                if table == "cache":
                    lines.append(f"{row['name']:34} {row['error'][:100]}")
            elif row["table"] == table:
                lines.append(f"{row['name']:34}" + "".join(f" {row['clocks'][count]:13.2f}" for count in counts))
    lines.append(f"{'e4m3 wgmma m64n16k32':34} {'64 x 128':>13} {'error':>13}")
    for row in report["checks"]:
        values = row.get("error") or f"{row['clocks']:13.1f} {row['error_norm']:13.1e}"
        lines.append(f"{row['name']:34} {values} {'' if row['ok'] else 'FAIL'}".rstrip())
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measure, print; returns 1 if a check fails or the device hangs, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m workbench.kernels.instruction_bench", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop starting jobs when this is used up")
    parser.add_argument("--compile-only", metavar="FOLDER", help="compile every kernel into FOLDER and stop; no GPU")
    parser.add_argument("--json", action="store_true", help="print the whole report as one line, no tables")
    options = parser.parse_args(arguments)
    if options.compile_only:
        count = compile_all()
        print(f"{count} kernels compiled, {nvrtc.export(Path(options.compile_only))} cubins exported")
        return 0
    require_hopper("instruction_bench", "cuda")
    budget = Budget(options.seconds)
    torch.manual_seed(1)
    report = new_report(budget, compile_all())
    jobs: list[Job] = [
        *(("checks", product_name(*pair), functools.partial(multiply, *pair)) for pair in PRODUCTS),
        *(("timings", name, functools.partial(time_rate, name)) for name in KINDS),
        *(("timings", loop_name(*loop), functools.partial(time_cache, *loop)) for loop in LOOPS),
    ]
    hung = run_jobs(jobs, report, budget, "instruction_bench.json", ())
    print(json.dumps(report) if options.json else "\n".join(table_lines(report)))
    return end(report, budget, hung=hung)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbenchError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(int(error.exit_code))

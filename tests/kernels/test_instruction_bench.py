"""The bench of instructions: what it compiles, how it lays bytes, what it prints. Its figures need a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.kernels import instruction_bench, nvrtc


def test_a_swizzle_moves_chunks_within_their_row() -> None:
    rows = torch.arange(24 * 128, dtype=torch.int32).view(24, 128)
    laid = instruction_bench.swizzled(rows).view(24, 128)
    for row in range(24):
        for place in range(128):
            source = (place // 16 ^ row % 8) * 16 + place % 16
            assert laid[row, place] == rows[row, source]


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize(
    "build",
    [
        instruction_bench.cache_build(1, True, 8),
        *(instruction_bench.rate_build(name) for name in instruction_bench.KINDS),
        instruction_bench.wgmma_build(4, 2),
    ],
    ids=lambda build: "-".join(map(str, (build[1], *build[2].values()))),
)
def test_every_kernel_compiles_without_a_spill(build: instruction_bench.Build) -> None:
    cubin = nvrtc.compile_kernel(*build)
    assert cubin.arch == "sm_90a"
    assert cubin.spill_bytes == 0


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_a_loop_has_the_code_that_it_is_named_for() -> None:
    one, two = (len(nvrtc.compile_kernel(*instruction_bench.cache_build(size, False, 8)).image) for size in (1, 2))
    assert 32 * 1024 <= two - one < 33 * 1024


def report(**changes: Any) -> dict[str, Any]:
    return {
        "device": "NVIDIA Abacus",
        "torch": "2.11.0",
        "wall_s": 12.3,
        "checks": [{"name": "4 blocks, 2 groups", "ok": True, "error_norm": 1.3e-4, "clocks": 170.0}],
        "timings": [
            {"name": "LOP3", "table": "rates", "clocks": {1: 2.4, 2: 2.1}},
            {"name": "160 KB", "table": "cache", "clocks": {1: 5.86, 4: 5.9, 8: 6.06}},
        ],
        **changes,
    }


def test_every_row_stands_in_its_own_table() -> None:
    lines = instruction_bench.table_lines(report())
    assert lines[0] == "NVIDIA Abacus, torch 2.11.0, 12 s; clocks"
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "an FMA of each warp in a loop of 1 warps 4 warps 8 warps",
        "160 KB 5.86 5.90 6.06",
        "an instruction on its scheduler 1 a scheduler 2 a scheduler",
        "LOP3 2.40 2.10",
        "e4m3 wgmma m64n16k32 64 x 128 error",
        "4 blocks, 2 groups 170.0 1.3e-04",
    ]


def test_what_failed_says_so() -> None:
    failed = {"name": "LOP3", "ok": False, "error": "UnfitError: no driver"}
    wrong = {"name": "4 blocks, 1 groups", "ok": False, "error_norm": 0.5, "clocks": 1.0}
    lines = instruction_bench.table_lines(report(timings=[failed], checks=[wrong, failed]))
    assert sum("UnfitError: no driver" in line for line in lines) == 2
    assert any(line.startswith("4 blocks, 1 groups") and line.endswith("FAIL") for line in lines)


@pytest.mark.gpu
def test_it_measures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench.kernels.instruction_bench", "--seconds", "100", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "instruction_bench.json").read_text())
    assert all(row["ok"] for row in saved["checks"])
    clocks = {row["name"]: row["clocks"] for row in saved["timings"]}
    assert clocks["192 KB"]["8"] > clocks["64 KB"]["8"] > 1.5
    assert json.loads(done.stdout.splitlines()[-1])["timings"]

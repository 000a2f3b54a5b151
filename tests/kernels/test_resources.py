"""Every kernel cross-compiles for Hopper and Blackwell without a GPU, and none spills on Hopper unexplained."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.kernels.catalogue import ENTRIES
from workbench.kernels.contract import INTERPRETED
from workbench.kernels.resources import TARGETS, Resources, compile_resources

NAMES = [entry.name for entry in ENTRIES]


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, dict[str, Any]]]:
    """Compile in processes of their own, because this one may run the interpreter; Triton's cache keeps the cubins."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "workbench.kernels.resources", "--arch"]
    running = [
        subprocess.Popen([*command, str(target)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        for target in TARGETS
    ]
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for process in running:
        out, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors.decode()[-2000:]
        merged |= json.loads(out)
    return merged


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(report: dict[str, dict[str, dict[str, Any]]], target: int) -> None:
    rows = report[str(target)]
    assert sorted(rows) == sorted(NAMES)
    for name, row in rows.items():
        assert 8 <= row["registers"] <= 255, name
        assert row["programs_per_sm"] >= 1, f"{name} does not fit an SM of target {target}"


@pytest.mark.parametrize("name", NAMES)
def test_no_unexplained_spill_on_hopper(report: dict[str, dict[str, dict[str, Any]]], name: str) -> None:
    row = report["90"][name]
    assert row["stack_bytes"] == 0 or row["spills"], f"{name} spills {row['stack_bytes']} bytes a thread, unexplained"


def test_names_are_unique_and_signatures_complete() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for entry in ENTRIES:
        names = set(entry.kernel.arg_names)
        assert set(entry.types) | set(entry.constants) == names, entry.name
        assert not set(entry.types) & set(entry.constants), entry.name
        assert set(entry.divisible) <= set(entry.types), entry.name


def test_residency_follows_the_scarcest_resource() -> None:
    assert Resources(registers=64, stack_bytes=0, shared_bytes=0, num_warps=8).programs_per_sm == 4
    assert Resources(registers=16, stack_bytes=0, shared_bytes=0, num_warps=1).programs_per_sm == 32
    assert Resources(registers=32, stack_bytes=0, shared_bytes=100 * 1024, num_warps=4).programs_per_sm == 2


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_refuses_to_compile_under_the_interpreter() -> None:
    with pytest.raises(InputError, match="TRITON_INTERPRET is set"):
        compile_resources(ENTRIES[0], 90)


def test_the_documentation_lists_every_kernel() -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    missing = [name for name in NAMES if f"| {name} |" not in text]
    assert not missing, f"docs/kernels.md lacks {missing}; run python -m workbench.kernels.resources --markdown"

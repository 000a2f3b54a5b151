"""The frame of the CUDA kernels' benches: checks, the read roof, timings, one job after the other, each kept at once.

A job that fails costs its own row. A device that hangs, or a context that is lost, ends the run: what was measured
until then has been written.
"""

import json
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from workbench.kernels import nvrtc
from workbench.kernels.budget import Budget, DeviceHangError, leave, save

Job = tuple[str, str, Callable[[], dict[str, Any]]]
"""Kind (``checks``, ``roof`` or ``timings``), name, and what returns the row; a check's row has ``ok``."""

Report = dict[str, Any]

SMS = 132
"""Multiprocessors of an H200: plans and what is compiled ahead are for one card."""


def compile_together(jobs: Sequence[Callable[[], nvrtc.Cubin]]) -> int:
    """Run the compilations, several at a time; needs no GPU. Returns how many there were."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return len(list(pool.map(lambda job: job(), jobs)))


def new_report(budget: Budget, kernels: int) -> Report:
    """Return a report without rows, of the current device; note it, and how many ``kernels`` were compiled."""
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checks": [],
        "timings": [],
        "roof": {},
    }
    budget.note(f"{report['device']}, torch {report['torch']}")
    budget.note(f"{kernels} kernels compiled")
    return report


def run_jobs(jobs: Sequence[Job], report: Report, budget: Budget, file: str, unnoted: Collection[str]) -> bool:
    """Run ``jobs`` while the budget lasts, add their rows to ``report`` and save it as ``file`` after each.

    ``unnoted``: keys of rows too long to print. Returns whether the device hung.
    """
    hung = False
    for kind, name, job in jobs:
        if budget.left < 2 or hung:
            budget.note(f"not run: {name}")
            continue
        try:
            row = job()
        except DeviceHangError as error:
            row, hung = _failed(name, str(error)), True
        except Exception as error:  # one failure must not hide the others
            row, hung = _failed(name, f"{type(error).__name__}: {error}"), "CUDA error" in str(error)
        if kind == "roof":
            report["roof"] = row
        else:
            report[kind].append(row)
        budget.note(f"{kind} {json.dumps({key: item for key, item in row.items() if key not in unnoted})}")
        report["wall_s"] = budget.elapsed
        save(report, file)
    return hung


def end(report: Report, budget: Budget, *, hung: bool) -> int:
    """Return the exit status: 1 where a check failed; where the device hung the process ends here, with 1."""
    if hung:
        leave(1)
    budget.finish()
    return 0 if all(row["ok"] for row in report["checks"]) else 1


def _failed(name: str, error: str) -> dict[str, Any]:
    return {"name": name, "variant": name, "plan": name, "ok": False, "error": error}

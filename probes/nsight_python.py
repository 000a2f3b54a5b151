"""Nsight Compute through NVIDIA's nsight-python, where it is installed and fits the ncu beside it.

It profiles all kernels within an annotation of a function, and leaves a report behind. Its own table has one row an
annotation, which is a whole step here: the report is read instead, launch by launch. Versions before 1 start ncu on the
script again, later ones attach it to the process.
Source: NVIDIA/nsight-python, 0.9.6 and 1.1.0.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workbench.probes.ncu_command import Cache, Ncu, Reason

NEEDS = {1: (2026, 2, 1)}
"""Oldest ncu by nsight-python's major version; version 0.9 takes any."""


def nsight_version() -> str | None:
    """Return the installed version of nsight-python; None where there is none."""
    try:
        return version("nsight-python")
    except PackageNotFoundError:
        return None


def misfit(ncu: Ncu, installed: str | None) -> Reason | None:
    """Return why nsight-python ``installed`` cannot be used with ``ncu``; None where it can."""
    if installed is None:
        return Reason("nsight-python is not installed", "pip install nsight-python")
    major = int(found[0]) if (found := re.findall(r"\d+", installed)) else 0
    oldest = NEEDS.get(min(major, max(NEEDS)))
    if oldest and ncu.numbers < oldest:
        wanted = ".".join(map(str, oldest))
        why = f"nsight-python {installed} needs ncu {wanted} or later, here is {ncu.version}"
        return Reason(why, "update Nsight Compute, or pip install 'nsight-python<1'")
    return None


def reader_missing() -> Reason | None:
    """Return why the reports that it leaves cannot be read here; None where they can."""
    if find_spec("ncu_report") is None:
        return Reason("reports of nsight-python are read by the package ncu-report", "pip install ncu-report")
    return None


def collect(work: Callable[[Callable[[str], Any]], None], metrics: Sequence[str], prefix: str, cache: Cache) -> None:
    """Profile what ``work`` does within the annotation that it is handed; the report's name begins with ``prefix``.

    Call it before CUDA starts, from a script that may be run again. Raises what nsight-python raises.
    """
    nsight = importlib.import_module("nsight")

    def decode_steps(_: int) -> None:
        work(nsight.annotate)

    profiled = nsight.analyze.kernel(
        configs=[0],
        runs=1,
        metrics=list(metrics),
        clock_control="none",
        cache_control=cache,
        replay_mode="kernel",
        thermal_mode="off",
        combine_kernel_metrics=lambda first, second: first + second,
        output_prefix=prefix,
    )(decode_steps)
    profiled()


def report(prefix: Path) -> Path | None:
    """Return the newest report whose name begins with ``prefix``; None where there is none."""
    found = sorted(prefix.parent.glob(f"{prefix.name}*.ncu-rep"), key=lambda path: path.stat().st_mtime_ns)
    return found[-1] if found else None

"""The program ``ncu`` (Nsight Compute): where it is, how it is called, what it says when it fails.

Written for ncu 2025.3.1; options and messages are those of docs.nvidia.com/nsight-compute, NsightComputeCli.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workbench.probes.counter_access import OPEN_COUNTERS

Cache = Literal["none", "all"]

OLDEST = (2023, 1)
"""From here on ncu tells the nodes of a graph from the graph (``--graph-profiling``)."""

INSTALL = "install Nsight Compute and put ncu on PATH"
VERSION_SECONDS = 20

STALLS = (
    "long_scoreboard", "short_scoreboard", "lg_throttle", "mio_throttle", "math_pipe_throttle", "barrier", "membar",
    "wait", "not_selected", "no_instruction",
)  # fmt: skip

METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__maximum_warps_per_active_cycle_pct",
    "smsp__inst_executed_op_local_ld.sum",
    "smsp__inst_executed_op_local_st.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    *(f"smsp__average_warps_issue_stalled_{stall}_per_issue_active.ratio" for stall in STALLS),
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_static",
    "launch__shared_mem_per_block_dynamic",
    "launch__waves_per_multiprocessor",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
    "launch__occupancy_limit_blocks",
)
"""What is asked for: time, DRAM bytes, resident warps and their limit, local loads and stores, why warps wait."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something does not work, and the fix, each without a full stop."""

    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class Ncu:
    """The program and its version, such as 2025.3.1.0."""

    path: str
    version: str

    @property
    def numbers(self) -> tuple[int, ...]:
        """The first three numbers of the version."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])


def find_ncu(run: Callable[..., "subprocess.CompletedProcess[str]"] = subprocess.run) -> Ncu | Reason:
    """Return the ncu on PATH, or why it cannot be used."""
    path = shutil.which("ncu")
    if path is None:
        return Reason("ncu is not on PATH", INSTALL)
    again = "install Nsight Compute again"
    try:
        # The path is the user's own ncu.
        text = run([path, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        return Reason(f"{path} does not start: {line}", again)
    found = re.search(r"Version (\d+(?:\.\d+)+)", text)
    if found is None:
        return Reason(f"{path} names no version", again)
    ncu = Ncu(path, found[1])
    if ncu.numbers < OLDEST:
        return Reason(
            f"ncu {ncu.version} cannot profile the nodes of a graph", "update Nsight Compute to 2023.1 or later"
        )
    return ncu


def ncu_command(
    ncu: Ncu,
    child: Sequence[str],
    log: Path,
    *,
    metrics: Sequence[str] = METRICS,
    kernels: Sequence[str] = (),
    launches: int,
    cache: Cache = "none",
) -> list[str]:
    """Return the command that profiles ``child`` and writes its CSV, with all that ncu says, to ``log``.

    Only launches between cudaProfilerStart and cudaProfilerStop are profiled, at most ``launches`` of them, and where
    ``kernels`` (names as a trace has them) are given only those. Clocks are left as they are.
    """
    command = [
        ncu.path, "--log-file", str(log), "--csv", "--page", "raw", "--print-units", "base",
        "--print-kernel-base", "demangled", "--profile-from-start", "off", "--target-processes", "application-only",
        "--graph-profiling", "node", "--replay-mode", "kernel", "--clock-control", "none", "--cache-control", cache,
        "--launch-count", str(launches), "--metrics", ",".join(metrics),
    ]  # fmt: skip
    if kernels:
        command += ["--kernel-name-base", "function", "--kernel-name", f"regex:{name_pattern(kernels)}"]
    return [*command, *child]


def name_pattern(kernels: Sequence[str]) -> str:
    """Return a regular expression for the functions of ``kernels``, whether or not they are printed with namespaces."""
    names = sorted({re.escape(function_name(kernel)) for kernel in kernels})
    return f"(^|::|[ ])({'|'.join(names)})$"


def function_name(kernel: str) -> str:
    """Return the bare function of a demangled name: no return type, namespace, template arguments or parameters."""
    text, depth, kept = kernel.replace("(anonymous namespace)::", ""), 0, []
    for place, letter in enumerate(text):
        if letter == "<":
            depth += 1
        elif letter == ">" and depth and text[place - 1] != "-":
            depth -= 1
        elif letter == "(" and not depth:
            break
        elif not depth:
            kept.append(letter)
    words = "".join(kept).strip().split(" ")
    return words[-1].rsplit("::", 1)[-1] or kernel


_FAILURES = (
    (r"ERR_NVGPUCTRPERM", "this process may not read GPU counters (ERR_NVGPUCTRPERM)", OPEN_COUNTERS),
    (
        r"driver resource was unavailable|no other tool",
        "another tool holds the GPU's counters",
        "end other profilers; DCGM: dcgmi profile --pause",
    ),
    (
        r"InterprocessLockFailed|lock file",
        "ncu cannot take its lock file: another user's ncu runs, or left it behind",
        "wait for it, or set TMPDIR to a folder of your own",
    ),
    (
        r"not supported on (this|the) (device|platform|system)|Profiling is not supported",
        "ncu does not support this GPU",
        "update Nsight Compute",
    ),
    (
        r"driver is not compatible|incompatible driver",
        "ncu and the NVIDIA driver do not fit each other",
        "update the older of the two",
    ),
    (r"[Oo]ut of memory", "ncu ran out of memory saving what kernels write", "a smaller model, or fewer --kernels"),
    (r"unrecogni[sz]ed option|[Uu]nknown option", "ncu does not know an option it was given", "update Nsight Compute"),
)
_NO_METRIC = re.compile(r"^==(?:ERROR|WARNING)==.*(?:find|unknown|invalid|unavailable)\b.*metric", re.IGNORECASE)


def failure(log: str) -> Reason | None:
    """Return the reason that ncu's own lines in ``log`` give for profiling nothing; None where they give none."""
    said = [line for line in log.splitlines() if re.match(r"==(ERROR|WARNING)==", line)]
    for pattern, why, fix in _FAILURES:
        if any(re.search(pattern, line) for line in said):
            return Reason(why, fix)
    errors = [re.sub(r"^==ERROR==\s*", "", line) for line in said if line.startswith("==ERROR==")]
    if errors:
        return Reason(f"ncu: {errors[0][:200]}", "see ncu's documentation")
    if "No kernels were profiled" in log:
        return Reason("ncu saw no kernel that it was to profile", "profile all kernels: leave out --into")
    return None


def unknown_metrics(log: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Return those of ``asked`` that ncu says it does not have for this GPU, however it writes them."""
    lines = [line.replace("\\", "") for line in log.splitlines() if _NO_METRIC.search(line)]
    return tuple(
        name for name in asked if any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", line) for line in lines)
    )

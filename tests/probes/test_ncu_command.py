import re
from itertools import pairwise
from pathlib import Path

import pytest

from workbench.probes.ncu_command import (
    METRICS,
    Ncu,
    Reason,
    failure,
    find_ncu,
    function_name,
    name_pattern,
    ncu_command,
    unknown_metrics,
)
from workbench.probes.nsight_python import misfit

NAMES = {
    "expert_pass": "expert_pass",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, array<char*, 3ul> >(int)":
        "vectorized_elementwise_kernel",
    "void (anonymous namespace)::softmax_warp_forward<float, 8, false>(float*, float const*, int)":
        "softmax_warp_forward",
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT": "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT",
    "std::enable_if<!false, void>::type internal::gemvx::kernel<int, 6>(P)": "kernel",
}  # fmt: skip


@pytest.mark.parametrize(("name", "function"), NAMES.items())
def test_the_function_of_a_demangled_name(name: str, function: str) -> None:
    assert function_name(name) == function


def test_the_pattern_finds_a_function_with_and_without_its_namespace() -> None:
    pattern = name_pattern(["at::native::add<float>(int)", "expert_pass", "odd.name"])
    for printed in ("add", "at::native::add", "void at::native::add", "expert_pass", "odd.name"):
        assert re.search(pattern, printed), printed
    for printed in ("add_more", "badd", "expert_pass_down", "oddxname"):
        assert not re.search(pattern, printed), printed


def test_clocks_and_caches_are_left_alone_and_graphs_profiled_by_node() -> None:
    command = ncu_command(Ncu("ncu", "2025.3.1.0"), ["python", "x.py"], Path("log"), kernels=["k"], launches=9)
    options = dict(pairwise(command))
    assert options["--clock-control"] == options["--cache-control"] == "none"
    assert options["--graph-profiling"] == "node"
    assert options["--profile-from-start"] == "off"
    assert options["--launch-count"] == "9"
    assert options["--metrics"].split(",") == list(METRICS)
    assert command[-2:] == ["python", "x.py"]
    without = ncu_command(Ncu("ncu", "2025.3.1.0"), ["x"], Path("log"), launches=1, cache="all")
    assert "--kernel-name" not in without
    assert without[without.index("--cache-control") + 1] == "all"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "may not read GPU counters"),
        ("==ERROR== Profiling failed because a driver resource was unavailable. Ensure", "another tool holds"),
        ("==ERROR== Error: InterprocessLockFailed", "lock file"),
        ("==ERROR== Profiling is not supported on this device", "does not support this GPU"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute", "do not fit each other"),
        ("==ERROR== unrecognised option '--graph-profiling'", "does not know an option"),
        ("==ERROR== Something else\n==WARNING== No kernels were profiled.", "ncu: Something else"),
        ("==WARNING== No kernels were profiled.", "saw no kernel"),
    ],
)
def test_what_ncu_says_becomes_a_reason_and_a_fix(log: str, why: str) -> None:
    reason = failure(f"==PROF== Connected\nthe program's own ERR_NVGPUCTRPERM out of memory\n{log}\n")
    assert reason is not None
    assert why in reason.why
    assert reason.fix
    assert failure("==PROF== Connected\n") is None


def test_metrics_that_ncu_does_not_have_however_it_writes_them() -> None:
    asked = ("dram__bytes_read.sum", "dram__bytes_read.sum.per_second", "sm__warps_active.avg", "launch__waves")
    log = (
        "==PROF== no metric here: launch__waves\n==ERROR== Failed to find metric dram__bytes_read.sum\n"
        "==ERROR== Failed to find metric regex:^sm__warps_active\\.avg$\nFailed to find metric launch__waves\n"
    )
    assert unknown_metrics(log, asked) == ("dram__bytes_read.sum", "sm__warps_active.avg")


@pytest.mark.parametrize(("version", "why"), [("2022.4.0.0", "nodes of a graph"), ("none", "names no version")])
def test_an_ncu_that_cannot_be_used(fake_ncu: object, version: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCU_VERSION", version)
    found = find_ncu()
    assert isinstance(found, Reason)
    assert why in found.why
    monkeypatch.setenv("FAKE_NCU_VERSION", "2025.3.1.0")
    assert isinstance(good := find_ncu(), Ncu)
    assert good.numbers == (2025, 3, 1)


@pytest.mark.parametrize(
    ("ncu", "nsight", "fits"),
    [
        ("2025.3.1.0", "0.9.6", True),
        ("2025.3.1.0", "1.1.0", False),
        ("2026.2.1.0", "1.1.0", True),
        ("2026.3.0.0", "2.0", True),
        ("2026.3.0.0", None, False),
    ],
)
def test_which_nsight_python_fits_which_ncu(ncu: str, nsight: str | None, fits: bool) -> None:
    reason = misfit(Ncu("ncu", ncu), nsight)
    assert (reason is None) == fits
    if reason:
        assert reason.fix.startswith(("pip install nsight-python", "update Nsight Compute"))

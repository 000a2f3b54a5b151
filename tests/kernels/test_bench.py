"""The benchmark's cases are right where they can be run small, and its table reads what its JSON holds."""

from collections.abc import Callable

import pytest
import torch

from workbench.errors import UnfitError
from workbench.kernels import bench, bench_case, bench_cases, bench_dense, bench_experts, bench_sequence
from workbench.kernels.bench_case import Case
from workbench.kernels.bench_experts import Experts

TINY = Experts("tiny", 4, 2, 128, 64, True)

SMALL: list[Callable[[], Case]] = [
    lambda: bench_experts.gate_up_case(TINY, 1),
    lambda: bench_experts.down_case(TINY, 2),
    lambda: bench_experts.expert_pass_case(TINY, 1),
    lambda: bench_dense.skinny_bf16_case("small", 2, 32, 128),
    lambda: bench_dense.skinny_fp8_case("small", 1, 32, 256),
    lambda: bench_dense.live_quant_case("fused", "small", 1, 64, 256),
    lambda: bench_sequence.gqa_case("small", 2, 4, 2, 16, 16, 40, None),
    lambda: bench_sequence.gqa_case("small", 1, 4, 2, 16, 16, 40, 16),
    lambda: bench_sequence.rms_norm_case(1, 256, True),
    lambda: bench_dense.router_case("small", 2, 16, 128, 2),
]


@pytest.mark.parametrize("index", range(len(SMALL)))
def test_default_configuration_passes_its_own_check(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    monkeypatch.setattr(bench_case, "DEVICE", str(device))
    monkeypatch.setattr(bench_case, "ROTATION_BYTES", 1)
    torch.manual_seed(index)
    case = SMALL[index]()
    error = case.check(case.configs[0])
    assert error <= 2 * case.tolerance  # the interpreter truncates to bf16, a GPU rounds
    assert case.floor.bytes_moved > 0
    assert len(set(case.configs)) == len(case.configs)


def test_builders_cover_every_group() -> None:
    groups = {group for group, _ in bench_cases.builders()}
    assert groups >= {"mxfp4", "attention", "mla", "rms_norm", "rope", "router", "lm_head", "nucleus", "skinny"}
    assert {"live_quant", "verify"} <= groups


def test_table_reads_the_report() -> None:
    row = {"config": {"kw": 8}, "us": 10.0, "share_of_roof": 0.5, "error": 1e-3, "passed": True}
    case = {
        "name": "k",
        "shape": "s",
        "note": "",
        "floor": {"bytes_read": 22_500_000, "bytes_written": 0},
        "floor_us": 5.0,
        "space": 3,
        "rows": [row | {"us": 12.0, "config": {"kw": 4}}, row, {"config": {"kw": 2}, "error": 1.0, "passed": False}],
    }
    report = {"device": "d", "torch": "t", "triton": "v", "wall_s": 1.0, "roof": {"best": 4.5e12}, "cases": [case]}
    line = bench.table(report)[-1]
    assert "12.00    10.00  50.0%" in line
    assert "kw=8" in line
    assert line.endswith("1 WRONG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        bench.main([])


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(sum(1 for _ in bench_cases.builders())))
def test_true_shapes(index: int) -> None:
    """Every case of the benchmark, default configuration, against float64 on the device."""
    _, builder = list(bench_cases.builders())[index]
    case = builder()
    assert case.check(case.configs[0]) <= case.tolerance, case.name

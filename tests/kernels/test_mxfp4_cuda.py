"""The MXFP4 expert pass in CUDA C++: plans and refusals everywhere, static facts where NVRTC is, numbers on a GPU."""

import dataclasses

import pytest
import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import mxfp4_cases, mxfp4_cuda, mxfp4_stream, nvrtc
from workbench.kernels.mxfp4_cuda import ExpertShape

SHAPES = list(mxfp4_cases.NAMES)


needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


def test_floor_of_gpt_oss_120b_is_52_9_mb() -> None:
    assert mxfp4_cases.GPT_OSS.bytes_floor(4) == pytest.approx(52.9e6, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: mxfp4_cases.NAMES[shape])
def test_plan_covers_k_and_fits(shape: ExpertShape, tokens: int) -> None:
    plan = mxfp4_cuda.make_plan(shape, tokens)
    assert mxfp4_cuda.shared_bytes(shape, tokens, plan) <= mxfp4_cuda.SHARED_BYTES
    for units, wk, per_stage, per_sum in (
        (shape.hidden // 64, plan.gate_up_wk, plan.gate_up_tps, plan.gate_up_pt),
        (shape.inter // 64, plan.down_wk, plan.down_tps, plan.down_pt),
    ):
        slice_units = -(-units // wk)
        assert (wk - 1) * slice_units < units <= wk * slice_units
        assert per_stage * units * 544 <= plan.stage_bytes
        assert per_sum % per_stage == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden": 2900}, "hidden"), ({"inter": 100}, "inter"), ({"top_k": 0}, "top_k"), ({"top_k": 129}, "top_k")],
)
def test_shapes_are_refused_before_anything_runs(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(mxfp4_cases.GPT_OSS, **change)


@pytest.mark.parametrize("tokens", [0, 9])
def test_token_counts_are_refused(tokens: int) -> None:
    with pytest.raises(InputError, match="tokens"):
        mxfp4_cuda.make_plan(mxfp4_cases.GPT_OSS, tokens)


def test_weights_are_checked_by_name() -> None:
    shape = ExpertShape(64, 64, 2, 1)
    weights = mxfp4_cases.packed(shape, mxfp4_cases.checkpoint(shape, 2, torch.Generator().manual_seed(0)))
    mxfp4_cuda.check_weights(shape, weights, torch.device("cpu"))
    with pytest.raises(InputError, match="down must be"):
        mxfp4_cuda.check_weights(shape, dataclasses.replace(weights, down=weights.down[:1]), torch.device("cpu"))
    with pytest.raises(InputError, match="gate_up_bias is missing"):
        mxfp4_cuda.check_weights(dataclasses.replace(shape, bias=True), weights, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_pass_says_so() -> None:
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        mxfp4_cuda.ExpertPass(mxfp4_cases.GPT_OSS, 1)


@needs_nvrtc
@pytest.mark.parametrize("tokens", [1, 4])
def test_gpt_oss_compiles_without_spills(tokens: int) -> None:
    cubin = mxfp4_cuda.compile_pass(mxfp4_cases.GPT_OSS, tokens, mxfp4_cuda.make_plan(mxfp4_cases.GPT_OSS, tokens))
    assert cubin.spill_bytes == 0
    assert 0 < cubin.registers <= 128


@needs_nvrtc
@pytest.mark.parametrize(
    "options", [{"lanes": True}, {"decode": 0, "lean": False, "lanes": True}, {"stages": 6, "in_flight": 3}], ids=str
)
def test_every_option_compiles_and_fits_its_multiprocessor(options: dict[str, int]) -> None:
    shape = mxfp4_cases.GPT_OSS
    plan = dataclasses.replace(mxfp4_cuda.make_plan(shape, 1), **options)  # type: ignore[arg-type]
    cubin = mxfp4_cuda.compile_pass(shape, 1, plan)
    assert cubin.registers * plan.threads <= 65536
    assert cubin.spill_bytes == 0
    assert mxfp4_cuda.shared_bytes(shape, 1, plan) <= mxfp4_cuda.SHARED_BYTES


def test_options_that_do_not_go_together_are_refused() -> None:
    plan = mxfp4_cuda.make_plan(mxfp4_cases.GPT_OSS, 1)
    with pytest.raises(InputError, match="in_flight"):
        dataclasses.replace(plan, in_flight=plan.stages)
    with pytest.raises(InputError, match="marks"):
        dataclasses.replace(plan, combine="atomic")
    with pytest.raises(InputError, match="probe"):
        dataclasses.replace(plan, probe=5)
    with pytest.raises(InputError, match="chunk"):
        mxfp4_stream.compile_stream(mxfp4_cases.GPT_OSS, mxfp4_stream.StreamPlan(True, 4096, 4, 64, 1))


@needs_nvrtc
def test_a_compile_error_is_one_line() -> None:
    with pytest.raises(InputError, match="error") as caught:
        nvrtc.compile_kernel("mxfp4_experts.cu", "mxfp4_experts", {"TOKENS": 1})
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: mxfp4_cases.NAMES[shape])
def test_pass_equals_float64(shape: ExpertShape, tokens: int) -> None:
    row = mxfp4_cases.check(shape, tokens, seed=100 + tokens)
    assert row["ok"], row
    assert row["repeatable"], row


@pytest.mark.gpu
@needs_gpu
def test_two_launches_equal_one() -> None:
    row = mxfp4_cases.check(mxfp4_cases.GPT_OSS, 2, seed=3, split=True)
    assert row["ok"], row


@pytest.mark.gpu
@needs_gpu
def test_a_bad_expert_id_is_flagged() -> None:
    shape = dataclasses.replace(mxfp4_cases.QWEN, experts=4, top_k=2)
    source = mxfp4_cases.checkpoint(shape, 4, torch.Generator("cuda").manual_seed(0))
    run = mxfp4_cuda.ExpertPass(shape, 1)
    x = torch.randn(1, shape.hidden, device="cuda").to(torch.bfloat16)
    out = torch.empty(1, shape.hidden, device="cuda")
    ids = torch.tensor([[1, 4]], dtype=torch.int32, device="cuda")
    run.run(x, ids, torch.ones(1, 2, device="cuda"), mxfp4_cases.packed(shape, source), out)
    with pytest.raises(UnfitError, match="expert id"):
        run.check()

"""The expert pass of one token with down by columns: plans and refusals, static facts where NVRTC is, numbers on a GPU.
Its source runs on the CPU in simt/test_mxfp4_experts.py."""

import dataclasses

import pytest
import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import mxfp4_cases, mxfp4_one_token, nvrtc
from workbench.kernels.bench_jobs import SMS
from workbench.kernels.mxfp4_cuda import SHARED_BYTES, ExpertShape
from workbench.kernels.mxfp4_one_token import Combine

SHAPES = (mxfp4_cases.GPT_OSS, mxfp4_cases.GPT_OSS_20B, mxfp4_cases.QWEN)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: mxfp4_cases.NAMES[shape])
def test_plan_fits(shape: ExpertShape) -> None:
    plan = mxfp4_one_token.make_plan(shape, SMS)
    assert mxfp4_one_token.shared_bytes(shape, SMS, plan) <= SHARED_BYTES
    assert shape.hidden // 64 % plan.warps == 0
    assert plan.threads <= 1024


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (ExpertShape(17 * 64, 128, 8, 2), "no number of warps"),
        (ExpertShape(192, 1024, 8, 2), "more than four blocks"),
        (ExpertShape(192, 64, 8, 4), "two experts"),
    ],
)
def test_shapes_that_it_does_not_take_are_refused(shape: ExpertShape, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mxfp4_one_token.make_plan(shape, 3)


def test_plans_that_do_not_go_together_are_refused() -> None:
    plan = mxfp4_one_token.make_plan(mxfp4_cases.GPT_OSS, SMS)
    with pytest.raises(InputError, match="in_flight"):
        dataclasses.replace(plan, in_flight=plan.stages)
    with pytest.raises(InputError, match="spread"):
        dataclasses.replace(plan, spread=-1)
    with pytest.raises(InputError, match="10 stages"):
        mxfp4_one_token.make_plan(mxfp4_cases.GPT_OSS, SMS, stages=10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_pass_says_so() -> None:
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        mxfp4_one_token.OneTokenPass(mxfp4_cases.GPT_OSS)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("combine", ["ordered", "atomic"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: mxfp4_cases.NAMES[shape])
def test_it_compiles_without_spills(shape: ExpertShape, combine: Combine) -> None:
    plan = dataclasses.replace(mxfp4_one_token.make_plan(shape, SMS), combine=combine)
    for lanes in (False, True):
        cubin = mxfp4_one_token.compile_pass(shape, SMS, dataclasses.replace(plan, lanes=lanes))
        assert cubin.spill_bytes == 0
        assert cubin.registers * plan.threads <= 65536


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("combine", ["ordered", "atomic"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: mxfp4_cases.NAMES[shape])
def test_pass_equals_float64(shape: ExpertShape, combine: Combine) -> None:
    plan = dataclasses.replace(mxfp4_one_token.make_plan(shape, SMS), combine=combine)
    for seed in range(3):
        row = mxfp4_cases.check(shape, 1, plan, seed=100 + seed)
        assert row["ok"], row

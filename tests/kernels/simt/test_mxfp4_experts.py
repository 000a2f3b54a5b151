"""kernels/cuda/mxfp4_experts.cu, its own source, run on the CPU and held to float64."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from workbench.kernels import mxfp4_bench, mxfp4_cuda, nvrtc

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_source_on_the_cpu_equals_float64(build_kernel: Build, tokens: int) -> None:
    """Every padded token count; some with row tiles claimed, and down cut for two owners of a row tile."""
    shape = mxfp4_cuda.ExpertShape(192, 128, 8, 2, clamp=True, bias=True)
    generator = torch.Generator().manual_seed(2)
    source = mxfp4_bench.checkpoint(shape, shape.experts, generator)
    weights = mxfp4_bench.packed(shape, source)
    plans = [mxfp4_cuda.make_plan(shape, tokens, warps=3)]
    if tokens in (1, 3):
        plans.append(replace(plans[0], copy_bytes=176, claim=True, in_flight=1, early_ids=True, fences=True))
    if tokens == 1:
        owners = replace(plans[0], combine="owners", gate_up_tps=1, down_tps=1, down_pt=12)
        mxfp4_cuda.check_owners(shape, 1, owners, 5)
        plans.append(owners)
    outs: list[torch.Tensor] = []
    for plan in plans:
        generator.manual_seed(tokens)
        macros = mxfp4_cuda.macros(shape, tokens, plan, "both")
        library = build_kernel("mxfp4_experts.cu", "mxfp4_experts.cpp", macros)
        x = torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16)
        ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(tokens)]).to(torch.int32)
        routing = torch.rand(tokens, 2, generator=generator) + 0.1
        slots = min(2 * tokens, 8)
        inter = torch.zeros(slots, tokens, shape.inter, dtype=torch.bfloat16)
        parts = torch.full((slots, 2, tokens, shape.hidden), float("nan"))
        counters = torch.zeros(shape.hidden // 16 + 2, dtype=torch.int32)
        grid = 5 if plan.combine == "owners" else 3
        out, error = torch.full((tokens, shape.hidden), float("nan")), torch.zeros(1, dtype=torch.int32)
        tensors = [x, ids, routing, weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias, inter]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in [*tensors, parts, counters, out, error] if t is not None]
        words = (ctypes.c_uint64 * len(pointers))(*(pointer.value or 0 for pointer in pointers))
        for seed in range(2):
            assert library.run_experts(words, grid, seed) == 0, "the pass deadlocked"
        expected = torch.zeros(tokens, shape.hidden, dtype=torch.float64)
        for slot, expert in enumerate(mxfp4_cuda.slot_order(ids)):
            full = mxfp4_cuda.dequantise(source["gate_up"][expert], source["gate_up_scales"][expert])
            bias = source["gate_up_bias"][expert]
            hidden = mxfp4_cuda.reference_inter(shape, x, full[0::2], full[1::2], bias[0::2], bias[1::2])
            assert mxfp4_bench.relative(inter[slot], hidden) < 3e-3
            down = mxfp4_cuda.dequantise(source["down"][expert], source["down_scales"][expert])
            y = inter[slot].to(torch.float64) @ down.T + source["down_bias"][expert].to(torch.float64)
            expected += ((ids == expert) * routing.to(torch.float64)).sum(dim=1)[:, None] * y
        assert mxfp4_bench.relative(out, expected) < 2e-6
        assert not counters[: shape.hidden // 16].any()
        outs.append(out)
        assert torch.equal(outs[0], out) or plan.combine == "owners"  # who computes a tile changes no bit
        assert not error.any()

"""kernels/cuda/mxfp4_experts.cu, its own source, run on the CPU and held to float64."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from workbench.kernels import mxfp4_bench, mxfp4_cuda, mxfp4_lanes, nvrtc

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_source_on_the_cpu_equals_float64(build_kernel: Build, tokens: int) -> None:
    """Every padded token count; with a barrier and counters, and with marks: the same bits."""
    shape = mxfp4_cuda.ExpertShape(192, 128, 8, 2, clamp=True, bias=True)
    generator = torch.Generator().manual_seed(2)
    source = mxfp4_bench.checkpoint(shape, shape.experts, generator)
    weights = mxfp4_bench.packed(shape, source)
    plan = mxfp4_cuda.make_plan(shape, tokens, warps=3)
    plans = [replace(plan, exchange="counters"), plan]
    if tokens == 1:
        plans += [replace(plan, decode=1, lean=True) for plan in plans]
        plans += [replace(plan, lanes=True) for plan in plans]
    if tokens == 8:
        plans.append(replace(plans[0], decode=0))
    if tokens == 3:  # padded to four
        plans.append(replace(plans[1], copy_bytes=176, in_flight=1, lanes=True))
    outs: list[torch.Tensor] = []
    for plan in plans:
        generator.manual_seed(tokens)
        macros = mxfp4_cuda.macros(shape, tokens, plan, "both")
        library = build_kernel("mxfp4_experts.cu", "mxfp4_experts.cpp", macros)
        x = torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16)
        ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(tokens)]).to(torch.int32)
        routing = torch.rand(tokens, 2, generator=generator) + 0.1
        slots = min(2 * tokens, 8)
        marks = plan.exchange == "marks"
        words = torch.full((2, slots, tokens, shape.inter // 2), -1, dtype=torch.int32)
        inter = words.view(torch.bfloat16)
        parts = torch.full((slots, 2, tokens, shape.hidden), -1, dtype=torch.int32).view(torch.float32)
        counters = torch.zeros(shape.hidden // 16 + 1, dtype=torch.int32)
        grid, launches = 3, 3
        lanes = torch.zeros(launches, grid, len(mxfp4_lanes.LANES), mxfp4_lanes.STAMPS, dtype=torch.int64)
        out, error = torch.full((tokens, shape.hidden), float("nan")), torch.zeros(1, dtype=torch.int32)
        tensors = [x, ids, routing, weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias, inter]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in [*tensors, parts, counters, out, error] if t is not None]
        for seed in range(launches):
            out.fill_(float("nan"))
            addresses = [*(pointer.value or 0 for pointer in pointers), lanes[seed].data_ptr()]
            arguments = (ctypes.c_uint64 * len(addresses))(*addresses)
            assert library.run_experts(arguments, grid, seed) == 0, "the pass deadlocked"
        assert counters.tolist() == [0] * (shape.hidden // 16) + [launches % 2 * grid]
        if marks:  # ready for the next launch
            assert (words[1] == -1).all()
            assert (parts.view(torch.int32) == -1).all()
        expected = torch.zeros(tokens, shape.hidden, dtype=torch.float64)
        for slot, expert in enumerate(mxfp4_cuda.slot_order(ids)):
            full = mxfp4_cuda.dequantise(source["gate_up"][expert], source["gate_up_scales"][expert])
            bias = source["gate_up_bias"][expert]
            hidden = mxfp4_cuda.reference_inter(shape, x, full[0::2], full[1::2], bias[0::2], bias[1::2])
            assert mxfp4_bench.relative(inter[0, slot], hidden) < 3e-3
            down = mxfp4_cuda.dequantise(source["down"][expert], source["down_scales"][expert])
            y = inter[0, slot].to(torch.float64) @ down.T + source["down_bias"][expert].to(torch.float64)
            expected += ((ids == expert) * routing.to(torch.float64)).sum(dim=1)[:, None] * y
        assert mxfp4_bench.relative(out, expected) < 2e-6
        outs.append(out)
        assert torch.equal(outs[0], out)  # who waits for whom changes no bit
        assert not error.any()
        if plan.lanes:
            check_stamps(lanes)
        else:
            assert not lanes.any()


def check_stamps(lanes: torch.Tensor) -> None:
    """Every event is there, after the one before it; waits lie within the phase that they are of."""
    word = {**mxfp4_lanes.CONSUMER, **mxfp4_lanes.CONSUMER_WAITS}
    consumers = lanes[:, :, :2]
    may_start = "down: first product may start"  # where a CTA has one stage of down, that is full before
    for chain in (
        [name for name in mxfp4_lanes.CONSUMER if name != may_start],
        ["down: first stage full", may_start, "down: last product"],
    ):
        events = consumers[..., [word[name] for name in chain]]
        assert (events > 0).all()
        assert (events.diff() >= 0).all(), events
    assert (consumers[..., word["combined"]] > consumers[..., word["entry"]]).all()
    copies = lanes[:, :, 2, list(mxfp4_lanes.PRODUCER.values())]
    assert (copies > 0).all()
    assert (copies.diff() > 0).all(), copies
    assert (lanes[..., 1] > lanes[..., 0]).all()
    for wait, begin, end in (
        ("waits: gate-up stages after the first", "first stage full", "gate-up: last stage full"),
        ("waits: activations", "gate-up: published", "down: last product"),
        ("waits: down stages after the first", "down: first stage full", "down: last stage full"),
    ):
        longest = consumers[..., word[end]] - consumers[..., word[begin]]
        assert (consumers[..., word[wait]] <= longest).all()
    assert (consumers[..., word["waits: activations"]] > 0).all()

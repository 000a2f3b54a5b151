"""kernels/cuda/mxfp4_experts.cu and mxfp4_one_token.cu, their own source, run on the CPU and held to float64."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from workbench.kernels import mxfp4_cases, mxfp4_cuda, mxfp4_lanes, mxfp4_one_token, nvrtc

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]


class Case:
    """One call of a small layer, its float64 result, and what a launch leaves."""

    def __init__(self, shape: mxfp4_cuda.ExpertShape, tokens: int, grid: int) -> None:
        self.shape, self.tokens, self.grid = shape, tokens, grid
        generator = torch.Generator().manual_seed(2)
        self.source = mxfp4_cases.checkpoint(shape, shape.experts, generator)
        self.weights = mxfp4_cases.packed(shape, self.source)
        generator.manual_seed(tokens)
        self.x = torch.randn(tokens, shape.hidden, generator=generator).to(torch.bfloat16)
        picks = [torch.randperm(shape.experts, generator=generator)[: shape.top_k] for _ in range(tokens)]
        self.ids = torch.stack(picks).to(torch.int32)
        self.routing = torch.rand(tokens, shape.top_k, generator=generator) + 0.1

    def run(self, build: Build, plan: mxfp4_cuda.Plan, launches: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
        """Checks what ``launches`` leave; returns the last one's activation and output."""
        shape, tokens, grid = self.shape, self.tokens, self.grid
        library = build("mxfp4_experts.cu", "mxfp4_experts.cpp", mxfp4_cuda.macros(shape, tokens, plan, "both"))
        assert library.shared_bytes() <= mxfp4_cuda.shared_bytes(shape, tokens, plan)
        slots = min(shape.top_k * tokens, shape.experts)
        words = torch.full((2, slots, tokens, shape.inter // 2), -1, dtype=torch.int32)
        inter = words.view(torch.bfloat16)
        parts = torch.full((slots, 2, tokens, shape.hidden), -1, dtype=torch.int32).view(torch.float32)
        counters = torch.zeros(shape.hidden // 16 + 1, dtype=torch.int32)
        lanes = torch.zeros(launches, grid, len(mxfp4_lanes.LANES), mxfp4_lanes.STAMPS, dtype=torch.int64)
        out, error = torch.full((tokens, shape.hidden), float("nan")), torch.zeros(1, dtype=torch.int32)
        outs: list[torch.Tensor] = []
        w = self.weights
        tensors = [self.x, self.ids, self.routing, w.gate_up, w.down, w.gate_up_bias, w.down_bias, inter, parts]
        tensors += [counters, out, error]
        for seed in range(launches):
            out.fill_(float("nan"))
            addresses = [0 if t is None else t.data_ptr() for t in tensors] + [lanes[seed].data_ptr()]
            arguments = (ctypes.c_uint64 * len(addresses))(*addresses)
            assert library.run_experts(arguments, grid, seed) == 0, "the pass deadlocked"
            outs.append(out.clone())
            assert torch.equal(outs[0], out)
        half = (launches - 1) % 2
        assert counters.tolist() == [0] * (shape.hidden // 16) + [launches % 2 * grid]
        if plan.exchange == "marks":  # ready for the next launch
            assert (words[1 - half] == -1).all()
            assert (parts.view(torch.int32) == -1).all()
        assert not error.any()
        if plan.lanes:
            check_stamps(lanes)
        else:
            assert not lanes.any()
        self.hold(inter[half], out)
        return inter[half], out

    def run_columns(self, build: Build, plan: mxfp4_one_token.OneTokenPlan, launches: int = 3) -> torch.Tensor:
        """The same of the pass of one token with down by columns; returns the last launch's output."""
        shape, grid = self.shape, self.grid
        library = build("mxfp4_one_token.cu", "mxfp4_one_token.cpp", mxfp4_one_token.macros(shape, grid, plan))
        assert library.shared_bytes() <= mxfp4_one_token.shared_bytes(shape, grid, plan)
        inter = torch.full((shape.top_k, 1, shape.inter), float("nan"), dtype=torch.bfloat16)
        parts = torch.full((grid, shape.hidden), -1, dtype=torch.int32)
        passed, error = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        lanes = torch.zeros(launches, grid, len(mxfp4_lanes.LANES), mxfp4_lanes.STAMPS, dtype=torch.int64)
        w = mxfp4_cases.packed(shape, self.source, plan)
        outs: list[torch.Tensor] = []
        for seed in range(launches):
            out = torch.full((1, shape.hidden), float("nan"))
            tensors = [self.x, self.ids, self.routing, w.gate_up, w.down, w.gate_up_bias, w.down_bias, inter, parts]
            addresses = [0 if t is None else t.data_ptr() for t in (*tensors, passed, out, error, lanes[seed])]
            arguments = (ctypes.c_uint64 * len(addresses))(*addresses)
            assert library.run_experts(arguments, grid, seed) == 0, "the pass deadlocked"
            ordered = plan.combine == "ordered"
            assert ((parts & 1) == (seed % 2 if ordered else 1)).all()
            assert passed.item() == (seed + 1) % 2 * grid
            self.hold(inter, out)
            outs.append(out.clone())
        assert not error.any()
        self.ids[0, 0] += shape.experts  # out of range: flagged, and no address is made of it
        assert library.run_experts(arguments, grid, launches) == 0
        assert error.item() == 2
        self.ids[0, 0] -= shape.experts
        assert mxfp4_cases.relative(outs[0], outs[-1].double()) < 1e-6  # a turn is a bit of every part
        assert torch.equal(outs[0], outs[2]) or not ordered
        if plan.lanes:
            check_stamps(lanes, exchanged=False)
        else:
            assert not lanes.any()
        return outs[-1]

    def hold(self, inter: torch.Tensor, out: torch.Tensor) -> None:
        """Both against float64, the output given the activation."""
        source, shape = self.source, self.shape
        expected = torch.zeros(self.tokens, shape.hidden, dtype=torch.float64)
        pick = (
            (slice(0, None, 2), slice(1, None, 2)) if shape.clamp else (slice(0, shape.inter), slice(shape.inter, None))
        )
        for slot, expert in enumerate(mxfp4_cuda.slot_order(self.ids)):
            full = mxfp4_cuda.dequantise(source["gate_up"][expert], source["gate_up_scales"][expert])
            bias = source["gate_up_bias"][expert] if shape.bias else None
            biases = (None, None) if bias is None else (bias[pick[0]], bias[pick[1]])
            hidden = mxfp4_cuda.reference_inter(shape, self.x, full[pick[0]], full[pick[1]], *biases)
            assert mxfp4_cases.relative(inter[slot], hidden) < 3e-3
            down = mxfp4_cuda.dequantise(source["down"][expert], source["down_scales"][expert])
            y = inter[slot].to(torch.float64) @ down.T
            if shape.bias:
                y = y + source["down_bias"][expert].to(torch.float64)
            expected += ((self.ids == expert) * self.routing.to(torch.float64)).sum(dim=1)[:, None] * y
        assert mxfp4_cases.relative(out, expected) < 2e-6


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_source_on_the_cpu_equals_float64(build_kernel: Build, tokens: int) -> None:
    """Every padded token count; with a barrier and counters, and with marks: the same bits."""
    case = Case(mxfp4_cuda.ExpertShape(192, 128, 8, 2, clamp=True, bias=True), tokens, grid=3)
    plan = mxfp4_cuda.make_plan(case.shape, tokens, warps=3)
    plans = [replace(plan, exchange="counters"), plan]
    if tokens == 1:
        plans += [replace(plan, decode=0, lean=False) for plan in plans]
        plans += [replace(plan, lanes=True) for plan in plans]
    if tokens == 8:
        plans.append(replace(plans[0], decode=0))
    if tokens == 3:  # padded to four
        plans.append(replace(plans[1], copy_bytes=176, in_flight=1, lanes=True))
    outs = [case.run(build_kernel, plan)[1] for plan in plans]
    for out in outs:
        assert torch.equal(outs[0], out)  # who waits for whom changes no bit


COLUMNS = {
    "blocks cut anywhere, two experts in a CTA": (mxfp4_cuda.ExpertShape(192, 128, 8, 2, clamp=True, bias=True), 3),
    "equal shares": (mxfp4_cuda.ExpertShape(192, 128, 4, 4), 8),
    "one expert in several CTAs": (mxfp4_cuda.ExpertShape(256, 192, 4, 1, bias=True), 5),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_down_by_columns_equals_float64(build_kernel: Build, name: str) -> None:
    shape, grid = COLUMNS[name]
    case = Case(shape, 1, grid)
    plan = mxfp4_one_token.make_plan(shape, grid, stages=3)
    out = case.run_columns(build_kernel, plan)
    other = replace(plan, in_flight=1, spread=5, stages=5, lanes=True)
    assert torch.equal(out, case.run_columns(build_kernel, other))
    case.run_columns(build_kernel, replace(plan, combine="atomic", spread=0))


def check_stamps(lanes: torch.Tensor, *, exchanged: bool = True) -> None:
    """Every event is there, after the one before it; waits lie within the phase that they are of. ``exchanged``: down
    waits for other CTAs' activations."""
    word = {**mxfp4_lanes.CONSUMER, **mxfp4_lanes.CONSUMER_WAITS}
    consumers = lanes[:, :, :2]
    may_start = "down: first product may start"  # where a CTA has one stage of down, that is full before
    activated, full = [may_start], ["down: first stage full"]
    for chain in (
        [name for name in mxfp4_lanes.CONSUMER if name != may_start],
        [*(full + activated if exchanged else activated + full), "down: last product"],
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
    assert ((consumers[..., word["waits: activations"]] > 0) == exchanged).all()

"""kernels/cuda/persistent_wide.cu, its own source, run on the CPU and held to float64, phase by phase."""

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from workbench.kernels import (
    nvrtc,
    persistent_bench,
    persistent_reference,
    persistent_wide,
    persistent_wide_bench,
    persistent_wide_reference,
)
from workbench.kernels.persistent_shape import StepShape, rope_table
from workbench.kernels.persistent_wide import WidePlan

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]
TINY = persistent_bench.TINY
LONG = StepShape(2, 704, 6, 2, 128, 12, 3, 640, 272, (0, 3))  # head_dim 128, group 3, a window below the tokens
MANY = StepShape(1, 192, 8, 8, 64, 36, 4, 128, 2000, (0,))  # more than 32 experts, several sums of the head


def words(arguments: Sequence[nvrtc.Argument]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(arguments))(*(argument.value or 0 for argument in arguments))


def simulated(
    build: Build, shape: StepShape, plan: WidePlan, steps: list[tuple[int, int]], capacity: int
) -> list[torch.Tensor]:
    """Run the kernel on the CPU for (tokens, position) each, compare with float64, return the logits."""
    library = build("persistent_wide.cu", "decode_step_wide.cpp", persistent_wide.macros(shape, plan))
    assert library.shared_bytes() <= persistent_wide.shared_bytes(shape, plan)
    generator = torch.Generator().manual_seed(1)
    model = persistent_reference.random_model(shape, generator)
    weights = persistent_reference.pack_model(shape, model)
    rope = rope_table(capacity, shape.head_dim, 10000.0)
    device = torch.device("cpu")
    shared = persistent_wide.new_state(shape, capacity, rope, device)
    taps = list(range(shape.layers))[:1]
    buffers = persistent_wide.make_wide_buffers(shape, plan, device, taps)
    shared.keys.normal_(generator=generator)
    shared.values.normal_(generator=generator)
    keys, values = shared.keys.clone(), shared.values.clone()
    logits = []
    for seed, (count, position) in enumerate(steps):
        tokens = torch.randint(shape.vocab, (count,), generator=generator).tolist()
        state = torch.tensor([count, position, *tokens], dtype=torch.int32)
        buffers.state.fill_(-1)[: len(state)] = state
        for poisoned in (buffers.scratch, buffers.logits, buffers.trace, buffers.hidden, buffers.tapped):
            poisoned.fill_(float("nan"))
        buffers.best.fill_(-1)
        arguments = words(persistent_wide.wide_arguments(weights, shared, buffers, capacity))
        assert library.run_step(arguments, seed) == 0, "the step deadlocked"
        expected = persistent_wide_reference.reference_wide(shape, model, tokens, position, keys, values, rope)
        if plan.trace:
            trace = persistent_wide_reference.read_trace(shape, buffers.trace, plan.tokens, count)
            errors = persistent_wide_reference.compare_trace(trace, expected.trace)
            assert all(error < persistent_bench.TOLERANCE for _, error in errors), errors
        assert persistent_bench.relative(buffers.logits[:count], expected.logits) < persistent_bench.TOLERANCE
        assert torch.isnan(buffers.logits[count:]).all()
        last = "residual after experts"
        for found, right in (
            (buffers.hidden, expected.trace[-1][last]),
            (buffers.tapped[:, 0], expected.trace[0][last]),
        ):
            assert persistent_bench.relative(found[:count], right) < 2 * persistent_bench.TOLERANCE
        assert torch.equal(buffers.routing[:, :count].long(), expected.routing), expected.margin
        assert torch.equal(buffers.best[:count].long(), buffers.logits[:count].argmax(dim=1))
        assert persistent_bench.relative(shared.keys, keys.double()) < persistent_bench.TOLERANCE
        assert persistent_bench.relative(shared.values, values.double()) < persistent_bench.TOLERANCE
        assert not buffers.sync.any()  # ready for the next step, and no error
        logits.append(buffers.logits[:count].clone())
    return logits


@pytest.mark.parametrize(
    ("columns", "steps"),
    [
        (2, [(2, 0), (1, 5), (2, 19), (2, 45)]),
        (4, [(4, 0), (3, 17), (4, 44)]),
        (8, [(8, 0), (5, 18), (8, 40)]),
    ],
)
def test_source_on_the_cpu_equals_float64(build_kernel: Build, columns: int, steps: list[tuple[int, int]]) -> None:
    """Full steps and narrower ones; no position cached, the window's edge among the new ones, the last of the cache."""
    plan = persistent_wide_bench.plain(persistent_wide.make_wide_plan(TINY, columns, 3, warps=4, stages=4, trace=True))
    simulated(build_kernel, TINY, dataclasses.replace(plan, split_positions=16, narrow=True), steps, 48)


def test_source_on_the_cpu_with_long_rows_and_a_window_below_the_tokens(build_kernel: Build) -> None:
    """Uneven parts of rows for the warps, several blocks of the residual a CTA, new positions beyond the window."""
    plan = persistent_wide_bench.plain(persistent_wide.make_wide_plan(LONG, 4, 3, warps=3, stages=3, trace=True))
    simulated(build_kernel, LONG, dataclasses.replace(plan, in_flight=1, hold=False), [(4, 70)], 80)


def test_source_on_the_cpu_with_many_experts_and_splits(build_kernel: Build) -> None:
    """Two splits a token; lanes; the trace changes no bit."""
    plan = persistent_wide_bench.plain(persistent_wide.make_wide_plan(MANY, 2, 33, warps=4, stages=3, lanes=True))
    plan = dataclasses.replace(plan, split_positions=64)
    first = simulated(build_kernel, MANY, plan, [(2, 100)], 160)
    again = simulated(build_kernel, MANY, dataclasses.replace(plan, trace=True, lanes=False), [(2, 100)], 160)
    assert torch.equal(first[0], again[0])


@pytest.mark.parametrize(
    ("columns", "steps", "options"),
    [
        (2, [(2, 0), (1, 5), (2, 19)], {}),
        (4, [(3, 17), (4, 44)], {}),
        (4, [(4, 17)], {"marks": True, "free": 31}),
        (8, [(8, 0), (5, 18)], {}),
        (8, [(8, 0), (5, 18), (8, 40)], {"marks": True, "free": 31}),
    ],
)
def test_attention_of_all_tokens_together_equals_float64(
    build_kernel: Build, columns: int, steps: list[tuple[int, int]], options: dict[str, int]
) -> None:
    """The plans that are the default, and with words waited for. One split a KV head: of 3 CTAs two have a task; no
    cached position, a last stage that is not full."""
    plan = persistent_wide.make_wide_plan(TINY, columns, 3, warps=4, stages=4, trace=True)
    assert plan.joint
    simulated(build_kernel, TINY, dataclasses.replace(plan, **options), steps, 48)


@pytest.mark.parametrize("grid", [5, 9])
def test_splits_of_all_tokens_together_are_joined_by_every_cta(build_kernel: Build, grid: int) -> None:
    """Two and four splits; several stages a split, windows that cut cached positions and new ones."""
    plan = persistent_wide.make_wide_plan(TINY, 8, grid, warps=4, stages=4, trace=True)
    steps = [(8, 40), (7, 15)] if grid == 5 else [(3, 100)]
    simulated(build_kernel, TINY, dataclasses.replace(plan, split_positions=16), steps, 112)


def test_heads_of_128_dimensions_are_attended_to_together(build_kernel: Build) -> None:
    """Rows that do not fill a tile, a window below the tokens."""
    plan = persistent_wide.make_wide_plan(LONG, 4, 4, warps=3, stages=3, trace=True)
    simulated(build_kernel, LONG, plan, [(4, 70)], 80)


@pytest.mark.parametrize(
    ("columns", "options", "steps"),
    [
        (8, {"marks": True, "decode": 1}, [(8, 18), (5, 0)]),
        (4, {"marks": True, "free": 31, "wide_cost": 11}, [(4, 17), (3, 0)]),
    ],
)
def test_who_waits_for_whom_changes_no_bit(
    build_kernel: Build, columns: int, options: dict[str, int], steps: list[tuple[int, int]]
) -> None:
    """Words waited for instead of barriers, and other shares of the experts' tasks; stale words of the step before."""
    plan = persistent_wide.make_wide_plan(TINY, columns, 3, warps=4, stages=4, trace=True)
    plan = dataclasses.replace(persistent_wide_bench.plain(plan), split_positions=16, narrow=True)
    base = simulated(build_kernel, TINY, plan, steps, 48)
    other = simulated(build_kernel, TINY, dataclasses.replace(plan, **options), steps, 48)
    assert all(torch.equal(one, two) for one, two in zip(base, other, strict=True))


def test_bad_steps_are_flagged_and_nothing_runs(build_kernel: Build) -> None:
    plan = persistent_wide.make_wide_plan(TINY, 2, 3, warps=4, stages=4, trace=True)
    plan = dataclasses.replace(plan, split_positions=16)
    library = build_kernel("persistent_wide.cu", "decode_step_wide.cpp", persistent_wide.macros(TINY, plan))
    weights = persistent_reference.pack_model(
        TINY, persistent_reference.random_model(TINY, torch.Generator().manual_seed(0))
    )
    device = torch.device("cpu")
    shared = persistent_wide.new_state(TINY, 16, rope_table(16, 64, 10000.0), device)
    buffers = persistent_wide.make_wide_buffers(TINY, plan, device)
    for state, flag in (([2, 15, 5, 5], 2), ([2, 0, 5, 272], 4), ([3, 0, 5, 5], 8), ([0, 0, 5, 5], 8)):
        buffers.state.copy_(torch.tensor(state, dtype=torch.int32))
        buffers.sync.zero_()
        assert library.run_step(words(persistent_wide.wide_arguments(weights, shared, buffers, 16)), 0) == 0
        assert buffers.sync[2] == flag
        assert not buffers.logits.any()

"""kernels/cuda/persistent.cu, its own source, run on the CPU and held to float64."""

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from workbench.kernels import nvrtc, persistent, persistent_bench, persistent_reference
from workbench.kernels.persistent import StepPlan
from workbench.kernels.persistent_shape import StepShape, rope_table

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]
TINY = persistent_bench.TINY
WIDE = StepShape(2, 704, 6, 2, 128, 12, 3, 640, 272, (0, 20))  # rows longer than a stage, head_dim 128, group 3
MANY = StepShape(1, 192, 8, 8, 64, 36, 4, 128, 2000, (0,))  # more than 32 experts, several sums of the head

SMALL = dataclasses.replace(
    persistent.make_plan(TINY, 3, warps=3, stages=4, split_positions=16), in_flight=1, evict_first=False
)


def words(arguments: Sequence[nvrtc.Argument]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(arguments))(*(argument.value or 0 for argument in arguments))


def simulated(
    build: Build, shape: StepShape, plan: StepPlan, positions: list[int], capacity: int
) -> list[torch.Tensor]:
    """Run the kernel on the CPU at ``positions``, compare with float64, return the logits."""
    library = build("persistent.cu", "decode_step.cpp", persistent.macros(shape, plan))
    assert library.shared_bytes() <= persistent.shared_bytes(shape, plan)
    generator = torch.Generator().manual_seed(1)
    model = persistent_reference.random_model(shape, generator)
    weights = persistent_reference.pack_model(shape, model)
    rope = rope_table(capacity, shape.head_dim, 10000.0)
    buffers = persistent.make_buffers(shape, plan, capacity, rope, torch.device("cpu"))
    buffers.keys.normal_(generator=generator)
    buffers.values.normal_(generator=generator)
    keys, values = buffers.keys.clone(), buffers.values.clone()
    token, logits = 5, []
    for seed, position in enumerate(positions):
        buffers.state.copy_(torch.tensor([token, position], dtype=torch.int32))
        buffers.scratch.fill_(float("nan"))
        buffers.logits.fill_(float("nan"))
        arguments = words(persistent.step_arguments(weights, buffers, capacity))
        assert library.run_step(arguments, seed) == 0, "the step deadlocked"
        expected = persistent_reference.reference_step(shape, model, token, position, keys, values, rope)
        assert persistent_bench.relative(buffers.logits, expected.logits) < persistent_bench.TOLERANCE
        assert torch.equal(buffers.routing.long(), expected.routing), expected.margin
        assert persistent_bench.relative(buffers.keys, keys.double()) < persistent_bench.TOLERANCE
        assert persistent_bench.relative(buffers.values, values.double()) < persistent_bench.TOLERANCE
        token = int(buffers.logits.argmax())
        assert buffers.state.tolist() == [token, position + 1]
        assert not buffers.sync.any()  # ready for the next step, and no error
        if plan.lanes:
            stamps = buffers.lanes
            assert (stamps[:, :, 2] > stamps[:, :, 0]).all()
            assert stamps[:, 1, 1].tolist() == list(range(plan.grid))  # where each CTA runs
        logits.append(buffers.logits.clone())
    return logits


def test_source_on_the_cpu_equals_float64(build_kernel: Build) -> None:
    """The default plan (marks, head claimed, hold), and every one of its choices taken back: the same bits."""
    back = dataclasses.replace(SMALL, in_flight=0, claim_head=False, hold=False, marks=False)
    back = dataclasses.replace(back, small_prefetch="consumers", copy_bytes=528, prefetch_bytes=1024)
    assert (SMALL.claim_head, SMALL.hold, SMALL.marks) == (True, True, True)
    positions = [0, 1, 19, 21, 47]
    pairs = zip(*(simulated(build_kernel, TINY, each, positions, 48) for each in (SMALL, back)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_source_on_the_cpu_with_parts_joined_by_the_reader(build_kernel: Build) -> None:
    """One to five splits: a single one, up to four by the reader, more by the last to arrive."""
    plan = persistent.make_plan(TINY, 11, warps=3, stages=4, split_positions=8)
    simulated(build_kernel, TINY, dataclasses.replace(plan, join_parts=4), [7, 9, 20, 530], 536)


def test_source_on_the_cpu_with_long_rows_and_wide_heads(build_kernel: Build) -> None:
    plan = persistent.make_plan(WIDE, 5, warps=3, stages=3, pieces=40, split_positions=32)
    plan = dataclasses.replace(plan, in_flight=1)
    simulated(build_kernel, WIDE, plan, [150], 160)


def test_source_on_the_cpu_with_many_experts(build_kernel: Build) -> None:
    plan = persistent.make_plan(MANY, 7, warps=4, stages=3, split_positions=32, pieces=12, lanes=True)
    simulated(build_kernel, MANY, plan, [0, 65, 150], 160)


def test_a_bad_position_is_flagged_and_nothing_runs(build_kernel: Build) -> None:
    library = build_kernel("persistent.cu", "decode_step.cpp", persistent.macros(TINY, SMALL))
    weights = persistent_reference.pack_model(
        TINY, persistent_reference.random_model(TINY, torch.Generator().manual_seed(0))
    )
    buffers = persistent.make_buffers(TINY, SMALL, 16, rope_table(16, 64, 10000.0), torch.device("cpu"))
    for state, flag in (([5, 16], 2), ([272, 3], 4)):
        buffers.state.copy_(torch.tensor(state, dtype=torch.int32))
        buffers.sync.zero_()
        assert library.run_step(words(persistent.step_arguments(weights, buffers, 16)), 0) == 0
        assert buffers.sync[2] == flag
        assert not buffers.logits.any()

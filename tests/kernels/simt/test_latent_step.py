"""kernels/cuda/persistent_latent.cu, its own source, run on the CPU and held to float64."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from workbench.kernels import latent_reference, nvrtc, persistent_latent, persistent_latent_bench
from workbench.kernels.latent_shape import LatentShape
from workbench.kernels.persistent_latent import LatentPlan
from workbench.kernels.persistent_shape import rope_table
from workbench.kernels.step_engine import FLAGS_AT

Build = Callable[[str, str, Mapping[str, nvrtc.Macro]], ctypes.CDLL]
TINY, BARE = persistent_latent_bench.TINY, persistent_latent_bench.BARE
TILES = replace(BARE, layers=1, heads=8, v_dim=256, q_lora=2176)
CAPACITY = 48


def plan_for(shape: LatentShape, grid: int) -> LatentPlan:
    """Few warps and stages."""
    return persistent_latent.make_plan(shape, grid, warps=8, stages=4, in_flight=2)


def words(arguments: list[nvrtc.Argument]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(arguments))(*(argument.value or 0 for argument in arguments))


def simulated(
    build: Build,
    shape: LatentShape,
    plan: LatentPlan,
    positions: list[int],
    *,
    forced: bool = False,
    tied: bool = False,
    lanes: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Run the kernel on the CPU at ``positions``, one launch after the other on the same scratch memory; compare with
    float64, return the logits. ``tied``: all experts score the same. ``lanes`` gets what the last step recorded."""
    library = build("persistent_latent.cu", "latent_step.cpp", persistent_latent.macros(shape, plan))
    assert library.shared_bytes() <= persistent_latent.shared_bytes(shape, plan)
    generator = torch.Generator().manual_seed(1)
    model = latent_reference.random_model(shape, generator)
    for layer in model.layers:
        if tied and layer.routed is not None:
            layer.routed.router.zero_()
            layer.routed.correction.fill_(0.25)
    weights = latent_reference.pack_model(shape, model)
    rope = rope_table(CAPACITY, shape.rope, persistent_latent_bench.THETA)
    buffers = persistent_latent.make_buffers(shape, plan, weights, CAPACITY, rope, torch.device("cpu"))
    caches = (buffers.latents, buffers.index_keys)
    for cache in caches:
        cache.normal_(generator=generator)
    copies = [cache.clone() for cache in caches]
    table = persistent_latent_bench.forced_table(shape, 3, generator) if forced else None
    token, logits = 5, []
    for seed, position in enumerate(positions):
        buffers.state[:2].copy_(torch.tensor([token, position], dtype=torch.int32))
        buffers.logits.fill_(float("nan"))
        arguments = words(persistent_latent.step_arguments(weights, buffers, CAPACITY, table))
        assert library.run_step(arguments, seed) == 0, "the step deadlocked"
        row = None if table is None else table[position % len(table)]
        expected = latent_reference.reference_step(
            shape, model, token, position, copies[0], copies[1], rope, forced=row
        )
        assert persistent_latent_bench.relative(buffers.logits, expected.logits) < persistent_latent_bench.TOLERANCE
        assert torch.equal(buffers.routing.long(), expected.routing), expected.margin
        for cache, copy in zip(caches, copies, strict=True):
            if cache.numel():
                error = persistent_latent_bench.relative(cache[:, position], copy[:, position].double())
                assert error < persistent_latent_bench.CACHE_TOLERANCE
                copy[:, position] = cache[:, position]
                assert torch.equal(cache, copy)  # nothing else is written
        token = int(buffers.logits.argmax())
        assert buffers.state.tolist() == [token, position + 1, seed + 1, 0]
        assert not buffers.sync.any()  # ready for the next step, and no error
        if plan.lanes:
            assert (buffers.lanes[:, :, 2] > buffers.lanes[:, :, 0]).all()
        logits.append(buffers.logits.clone())
    if lanes is not None:
        lanes.append(buffers.lanes.clone())
    return logits


def test_the_cpu_converts_every_code_as_torch_does(build_kernel: Build) -> None:
    """All 256 codes, in every byte of a word: bits equal, NaN aside."""
    library = build_kernel("persistent_latent.cu", "latent_step.cpp", persistent_latent.macros(TINY, plan_for(TINY, 5)))
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float16)
    pairs = (ctypes.c_uint32 * 2)()
    for shift in range(4):
        mixed = torch.stack([codes.roll(37 * place - 37 * shift) for place in range(4)], dim=-1)
        got = []
        for word in mixed.contiguous().view(torch.int32).flatten().tolist():
            library.convert(ctypes.c_uint32(word), pairs)
            got.append(list(bytes(pairs)))
        halves = torch.tensor(got, dtype=torch.uint8).view(torch.float16)
        assert torch.equal(halves[:, shift].isnan(), expected.isnan())
        known = ~expected.isnan()
        assert torch.equal(halves[known, shift].view(torch.int16), expected[known].view(torch.int16))


@pytest.mark.parametrize(
    ("shape", "grid", "warps", "positions"),
    [
        (TINY, 5, 8, [0, 1, 30]),  # three launches of three layers; heads of one CTA each, one CTA beside them
        (TINY, 16, 16, [1]),
        (BARE, 16, 8, [0, 47]),  # heads of several CTAs; together: the shared expert's activations have a scale a unit
        (TILES, 9, 8, [20]),  # out's vector stays in registers from tile to tile, the query's does not fit
        (replace(BARE, hidden=2048, top_k=8, inter=256, shared_inter=256, q_lora=384), 16, 8, [3]),
    ],
)
def test_source_on_the_cpu_equals_float64(
    build_kernel: Build, shape: LatentShape, grid: int, warps: int, positions: list[int]
) -> None:
    simulated(build_kernel, shape, persistent_latent.make_plan(shape, grid, warps=warps, stages=4), positions)


def test_source_on_the_cpu_with_forced_experts_and_choices_taken_back(build_kernel: Build) -> None:
    plan = replace(plan_for(TINY, 7), in_flight=0, claim_head=False, evict_first=False, lanes=True)
    simulated(build_kernel, TINY, plan, [1, 47], forced=True)


@pytest.mark.parametrize("tied", [False, True])
def test_the_choice_among_many_experts(build_kernel: Build, tied: bool) -> None:
    """Eight experts a lane of the router's warp; the lower index among equals."""
    shape = replace(BARE, layers=1, experts=256, top_k=8)
    simulated(build_kernel, shape, plan_for(shape, 16), [3], tied=tied)


def test_what_only_takes_time_keeps_the_bits(build_kernel: Build) -> None:
    """Prefetching, the stand-in for collectives."""
    plan = plan_for(BARE, 9)
    slow = replace(plan, prefetch_bytes=1024, collective_ns=50, in_flight=3)
    pairs = zip(*(simulated(build_kernel, BARE, each, [3]) for each in (plan, slow)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_stamps_rise_within_a_phase_and_keep_the_bits(build_kernel: Build) -> None:
    plan = plan_for(TINY, 5)
    stamps: list[torch.Tensor] = []
    first, second = (
        simulated(build_kernel, TINY, each, [2], lanes=stamps) for each in (plan, replace(plan, stamps=True))
    )
    assert torch.equal(first[0], second[0])
    marks = stamps[1]
    assert tuple(marks.shape) == (5, TINY.layers * 7 + 1, len(persistent_latent.MARKS))
    in_order = marks[:, :-1, : persistent_latent.MARKS.index("wall")]
    seen = in_order.where(in_order != 0, in_order.cummax(dim=-1).values)
    assert (seen.diff(dim=-1) >= 0).all()
    assert (in_order[..., 0] > 0).all()
    assert (in_order[..., -1] > in_order[..., 0]).all()
    gate_up = persistent_latent.PHASES.index("gate_up")
    routed = marks[:, gate_up : TINY.layers * 7 : 7][:, TINY.dense_layers :]
    names = ("dealt", "scores", "first_choice", "chosen")
    assert (routed[..., [persistent_latent.MARKS.index(name) for name in names]].diff(dim=-1) > 0).all()
    assert (routed[..., persistent_latent.MARKS.index("feed_words")] > routed[..., 0]).all()


@pytest.mark.parametrize(("state", "flag"), [((5, CAPACITY), 2), ((272, 3), 4)])
def test_a_bad_state_is_flagged_and_nothing_runs(build_kernel: Build, state: tuple[int, int], flag: int) -> None:
    plan = plan_for(TINY, 5)
    library = build_kernel("persistent_latent.cu", "latent_step.cpp", persistent_latent.macros(TINY, plan))
    model = latent_reference.random_model(TINY, torch.Generator().manual_seed(0))
    weights = latent_reference.pack_model(TINY, model)
    rope = rope_table(CAPACITY, TINY.rope, persistent_latent_bench.THETA)
    buffers = persistent_latent.make_buffers(TINY, plan, weights, CAPACITY, rope, torch.device("cpu"))
    buffers.state[:2].copy_(torch.tensor(state, dtype=torch.int32))
    arguments = words(persistent_latent.step_arguments(weights, buffers, CAPACITY, None))
    assert library.run_step(arguments, 0) == 0
    assert buffers.sync[FLAGS_AT] == flag
    assert not buffers.logits.any()
    assert buffers.scratch.unique().tolist() == [persistent_latent.FRESH]

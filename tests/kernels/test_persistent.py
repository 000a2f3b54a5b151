"""The persistent decode step: layouts, plans and refusals everywhere, static facts where NVRTC is, numbers on a GPU.

tests/kernels/simt runs the kernel's own source on the CPU.
"""

import dataclasses

import pytest
import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import nvrtc, persistent, persistent_bench, persistent_layout, persistent_reference
from workbench.kernels.persistent_shape import check_weights, rope_table

TINY = persistent_bench.TINY
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (48, 80), (160, 32)])
def test_matrix_layout_is_a_permutation_with_an_inverse(rows: int, columns: int) -> None:
    matrix = torch.arange(rows * columns).reshape(rows, columns).to(torch.int16).view(torch.bfloat16)
    tiles = persistent_layout.pack_matrix(matrix)
    assert torch.equal(persistent_layout.unpack_matrix(tiles).view(torch.int16), matrix.view(torch.int16))


def test_matrix_layout_places_fragments() -> None:
    """Lane 4 g + t: register r holds row g + 8 (r & 1), columns 4 t + 2 (r >> 1) and the next."""
    matrix = torch.arange(32 * 48).reshape(32, 48).to(torch.int16).view(torch.bfloat16)
    tiles = persistent_layout.pack_matrix(matrix).view(torch.int16)
    source = matrix.view(torch.int16)
    for tile, step, g, t, register, half in (
        (0, 0, 0, 0, 0, 0),
        (1, 2, 5, 3, 3, 1),
        (1, 0, 7, 1, 2, 0),
        (0, 1, 2, 2, 1, 1),
    ):
        row, column = 16 * tile + g + 8 * (register & 1), 16 * step + 4 * t + 2 * (register >> 1) + half
        assert tiles[tile, step, 4 * g + t, 2 * register + half] == source[row, column]


def test_matrix_layout_refuses_what_does_not_tile() -> None:
    with pytest.raises(InputError, match="does not tile"):
        persistent_layout.pack_matrix(torch.zeros(24, 16, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="bf16"):
        persistent_layout.pack_matrix(torch.zeros(16, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 2900}, "hidden"),
        ({"heads": 60}, "heads"),
        ({"head_dim": 96}, "head_dim"),
        ({"experts": 30}, "experts"),
        ({"top_k": 0}, "top_k"),
        ({"vocab": 1000}, "vocab"),
        ({"windows": (0,)}, "windows"),
        ({"limit": 300.0}, "limit"),
    ],
)
def test_shapes_are_refused_before_anything_runs(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(persistent_bench.GPT_OSS_20B, **change)  # type: ignore[arg-type]


def test_step_bytes_of_gpt_oss_20b() -> None:
    """3.71 GB at one token, by the byte model's own count."""
    assert persistent_bench.GPT_OSS_20B.step_bytes(0) == pytest.approx(3.71e9, rel=2e-3)


def test_a_plan_that_cannot_fit_says_so() -> None:
    with pytest.raises(InputError, match="do not fit"):
        persistent.make_plan(dataclasses.replace(persistent_bench.GPT_OSS_20B, inter=24576), 132)
    with pytest.raises(InputError, match="pieces"):
        persistent.make_plan(persistent_bench.GPT_OSS_20B, 132, pieces=4)


def test_the_default_plan_is_what_was_measured_fastest() -> None:
    """docs/kernels-cuda.md, section 5; each choice can be taken back."""
    plan = persistent.make_plan(persistent_bench.GPT_OSS_20B, 132)
    assert (plan.warps, plan.stages, plan.in_flight, plan.copy_bytes, plan.join_parts) == (15, 7, 2, 0, 0)
    assert (plan.claim_head, plan.hold, plan.marks, plan.evict_first) == (True, True, True, True)
    back = {name: plan for name, plan, _ in persistent_bench.plans()}["none of the three"]
    assert (back.claim_head, back.hold, back.marks) == (False, False, False)
    assert persistent.macros(persistent_bench.GPT_OSS_20B, back)["MARKS"] == 0


def test_options_out_of_range_are_refused() -> None:
    plan = persistent.make_plan(persistent_bench.GPT_OSS_20B, 132)
    for change in ({"in_flight": plan.stages}, {"copy_bytes": 24}, {"join_parts": 9}):
        with pytest.raises(InputError, match=next(iter(change))):
            dataclasses.replace(plan, **change)


def test_weights_are_checked_by_name() -> None:
    model = persistent_reference.random_model(TINY, torch.Generator().manual_seed(0))
    weights = persistent_reference.pack_model(TINY, model)
    check_weights(TINY, weights, torch.device("cpu"))
    with pytest.raises(InputError, match="down must be"):
        check_weights(TINY, dataclasses.replace(weights, down=weights.down[:, :1]), torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_engine_says_so() -> None:
    weights = persistent_reference.pack_model(
        TINY, persistent_reference.random_model(TINY, torch.Generator().manual_seed(0))
    )
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        persistent.PersistentEngine(TINY, weights, capacity=16, rope=rope_table(16, 64, 1e4))


@needs_nvrtc
def test_gpt_oss_20b_compiles_without_spills() -> None:
    shape = persistent_bench.GPT_OSS_20B
    cubin = persistent.compile_step(shape, persistent.make_plan(shape, 132))
    assert cubin.spill_bytes == 0
    assert 0 < cubin.registers <= 128


@pytest.mark.gpu
@needs_gpu
def test_tiny_model_equals_float64() -> None:
    row = persistent_bench.check("tiny", TINY, [*range(12), 30, 31], 64, seed=3)
    assert row["ok"], row


@pytest.mark.gpu
@needs_gpu
def test_two_layers_of_the_true_shape_equal_float64() -> None:
    row = persistent_bench.check("two layers", persistent_bench.TWO_LAYERS, [0, 1, 130, 700], 2048, seed=4)
    assert row["ok"], row

"""The persistent step of several tokens: plans and refusals everywhere, static facts where NVRTC is, numbers on a GPU.

tests/kernels/simt runs the kernel's own source on the CPU, phase by phase.
"""

import dataclasses

import pytest
import torch

from workbench.errors import InputError, UnfitError
from workbench.kernels import nvrtc, persistent, persistent_reference, persistent_wide, persistent_wide_bench
from workbench.kernels.persistent_bench import GPT_OSS_20B, SMS, TINY, TWO_LAYERS
from workbench.kernels.persistent_shape import rope_table
from workbench.kernels.persistent_wide_reference import compare_trace, read_trace, reference_wide

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


@pytest.mark.parametrize(("tokens", "columns"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_tokens_are_padded_to_the_kernels_columns(tokens: int, columns: int) -> None:
    assert persistent_wide.make_wide_plan(GPT_OSS_20B, tokens, SMS).tokens == columns


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, {"tokens": 9}, "1 to 8 tokens, not 9"),
        ({}, {"tokens": 0}, "1 to 8 tokens, not 0"),
        ({}, {"pieces": 1}, "pieces must be at least"),
        ({}, {"warps": 7}, "8 query heads a KV head"),
        ({}, {"grid": 0}, "grid and warps"),
        ({"inter": 16384}, {}, "do not fit shared memory"),
        ({}, {"stages": 12}, "do not fit shared memory"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_before_launch(
    change: dict[str, int], arguments: dict[str, int], message: str
) -> None:
    shape = dataclasses.replace(GPT_OSS_20B, **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        persistent_wide.make_wide_plan(shape, **{"tokens": 8, "grid": SMS, **arguments})  # type: ignore[arg-type]


def test_plans_of_the_true_shape_fill_shared_memory() -> None:
    """A stage is one row tile of experts; what attention and router put in the parts fits."""
    for tokens in (2, 4, 8):
        plan = persistent_wide.make_wide_plan(GPT_OSS_20B, tokens, SMS)
        assert (plan.stage_units, plan.stages) == (45, 8)
        assert persistent_wide.shared_bytes(GPT_OSS_20B, plan) <= 227 * 1024


def test_weights_and_caches_are_checked_by_name() -> None:
    shared = persistent_wide.new_state(TINY, 16, rope_table(16, 64, 1e4), torch.device("cpu"))
    assert persistent_wide.check_shared(TINY, shared, torch.device("cpu")) == 16
    bad = dataclasses.replace(shared, values=shared.values[:, :, :8])
    with pytest.raises(InputError, match="values must be"):
        persistent_wide.check_shared(TINY, bad, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_engine_says_so() -> None:
    weights = persistent_reference.pack_model(
        TINY, persistent_reference.random_model(TINY, torch.Generator().manual_seed(0))
    )
    shared = persistent_wide.new_state(TINY, 16, rope_table(16, 64, 1e4), torch.device("cpu"))
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        persistent_wide.WideEngine(TINY, weights, shared, persistent_wide.make_wide_plan(TINY, 4, SMS))


@pytest.mark.parametrize("position", [0, 17, 40])
def test_the_reference_equals_one_token_after_another(position: int) -> None:
    generator = torch.Generator().manual_seed(position)
    model = persistent_reference.random_model(TINY, generator)
    rope = rope_table(64, TINY.head_dim, 1e4)
    caches = [torch.randn(2, 2, 64, 64, generator=generator).to(torch.bfloat16) for _ in range(2)]
    tokens = [3, 200, 3, 77, 12]
    one, other = [[cache.clone() for cache in caches] for _ in range(2)]
    wide = reference_wide(TINY, model, tokens, position, one[0], one[1], rope)
    for row, token in enumerate(tokens):
        step = persistent_reference.reference_step(TINY, model, token, position + row, other[0], other[1], rope)
        assert torch.equal(step.routing, wide.routing[:, row])
        torch.testing.assert_close(step.logits, wide.logits[row], rtol=1e-9, atol=1e-9)
    assert all(torch.equal(mine, right) for mine, right in zip(one, other, strict=True))


def test_a_trace_is_read_as_the_kernel_writes_it_and_the_first_wrong_phase_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    model = persistent_reference.random_model(TINY, generator)
    keys, values = (torch.randn(2, 2, 16, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    want = reference_wide(TINY, model, [5, 6], 4, keys, values, rope_table(16, 64, 1e4)).trace
    scale = persistent.inter_scale(TINY)
    rows = []
    for layer in want:
        parts = []
        for name, extents in persistent_wide.traced_extents(TINY, 4).items():
            part = torch.full(extents, float("nan"))
            value = layer[name]
            part[:2] = (
                (value * scale).half().view(torch.int16).int().bitwise_and(0xFFFF).float()
                if name == "gate-up"
                else value.float()
            )
            parts.append(part.flatten())
        rows.append(torch.cat(parts))
    trace = torch.stack(rows)
    assert all(error < 1e-3 for _, error in compare_trace(read_trace(TINY, trace, 4, 2), want))
    trace[1, TINY.qkv_rows * 4 + 3] += 100
    wrong = [name for name, error in compare_trace(read_trace(TINY, trace, 4, 2), want) if not error < 1e-3]
    assert wrong == ["layer 1, attention"]


def test_bytes_of_a_wider_step_grow_with_its_distinct_experts() -> None:
    shape = GPT_OSS_20B
    assert persistent_wide.wide_bytes(shape, 1, 512, shape.top_k) == shape.step_bytes(512)
    assert persistent_wide.expected_distinct(shape, 1) == pytest.approx(shape.top_k)
    more = persistent_wide.wide_bytes(shape, 8, 512, 20.0) - shape.step_bytes(512)
    assert more == pytest.approx(24 * 16 * 3 * 2880 * 2880 * 17 / 32)


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
def test_gpt_oss_20b_compiles_within_the_register_file() -> None:
    """It spills a little (the kernel's head says what); the loops over row tiles do not."""
    cubin = persistent_wide.compile_wide(GPT_OSS_20B, persistent_wide.make_wide_plan(GPT_OSS_20B, 8, SMS))
    assert 0 < cubin.registers <= 128
    assert cubin.spill_bytes <= 400


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [2, 4, 8])
def test_tiny_model_equals_float64(width: int) -> None:
    row = persistent_wide_bench.check("tiny", TINY, width, persistent_wide_bench.near(width), 64, seed=width)
    assert row["ok"], row


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [2, 4, 8])
def test_two_layers_of_the_true_shape_equal_float64(width: int) -> None:
    row = persistent_wide_bench.check("two", TWO_LAYERS, width, persistent_wide_bench.far(width), 2048, seed=width)
    assert row["ok"], row

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.decode.experts import Half
from workbench.decode.fp8 import dequantize_blocks, quantize_blocks
from workbench.decode.model import Target
from workbench.decode.mxfp4 import MxFp4, dequantize
from workbench.decode.precision import TensorClass, load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rungs import random_model as random_model_module
from workbench.decode.rungs.fit import held_bytes
from workbench.decode.rungs.narrow import Fp8Experts, draw_fp8
from workbench.decode.rungs.packed import PackedExperts, expand, expert_layers
from workbench.decode.rungs.plan import PLANS
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.store import WeightStore
from workbench.decode.spec import ModelSpec
from workbench.decode.weights import load_target, shipped_folder
from workbench.errors import InputError, UnfitError
from workbench.kernels.mxfp4_layout import RowOrder, relayout, restore
from workbench.scenario import parse_scenario

CPU = torch.device("cpu")
SPEC = ModelSpec.model_validate(
    {
        "name": "tiny",
        "hidden": 256,
        "vocab": 64,
        "mixers": ("full", "full"),
        "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "qk_dim": 16, "v_dim": 16, "bias": True, "sinks": True},
        "moe": {"experts": 8, "top_k": 2, "inter": 128, "bias": True},
        "dense_first": 1,
        "dense_inter": 64,
    }
)


def build(
    policy: str = "mxfp4-experts", seed: int = 1, packed: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[Target, tuple[PackedExperts, ...]]:
    return random_model(SPEC, load_policy(policy), seed=seed, device=CPU, dtype=dtype, packed=packed)


def codes(parts: tuple[torch.Tensor, torch.Tensor], order: str) -> MxFp4:
    blocks, scales = restore(*parts, order)  # type: ignore[arg-type]
    return MxFp4(blocks.flatten(-2), scales)


def test_packed_and_expanded_hold_the_same_numbers() -> None:
    (expanded, none), (target, packed) = build(), build(packed=True)
    assert none == ()
    (one,) = packed
    ((index, ffn),) = expert_layers(expanded)
    assert index == 1
    assert torch.equal(dequantize(codes(one.gate_up, "stacked"), torch.bfloat16), ffn.gate_up)
    assert torch.equal(dequantize(codes(one.down, "plain"), torch.bfloat16), ffn.down)
    assert one.nbytes == (ffn.gate_up.numel() + ffn.down.numel()) * 17 // 32
    assert one.gate_up_bias is not None
    assert torch.equal(one.gate_up_bias.flatten(1), ffn.gate_up_bias)
    (_, dropped), *_ = expert_layers(target)
    assert dropped.gate_up.device.type == dropped.down.device.type == "meta"
    for name, parameter in target.named_parameters():
        if parameter.device.type != "meta":
            assert torch.equal(parameter, expanded.get_parameter(name)), name


def test_activations_stay_of_order_one() -> None:
    for policy in ("mxfp4-experts", "bf16", "nvfp4-experts"):
        target = build(policy, dtype=torch.float32)[0]
        ffn = dict(expert_layers(target))[1]
        assert 0.5 < float(ffn.gate_up.std()) * 256**0.5 < 2
        assert 0.5 < float(ffn.down.std()) * 128**0.5 < 2
        with torch.no_grad():
            hidden = target(torch.arange(40)[None])[0]
        assert 0.2 < float(hidden.std()) < 5


@pytest.mark.parametrize("policy", ["mxfp4-experts-fp8", "fp8"])
def test_fp8_classes_are_rounded_and_stay_so(policy: str) -> None:
    target, plain = build(policy)[0], build("bf16")[0]
    for name in ("blocks.0.attention.q", "blocks.1.attention.o", "blocks.0.ffn.gate_up"):
        weight = target.get_submodule(name).weight
        assert torch.equal(dequantize_blocks(quantize_blocks(weight), torch.bfloat16), weight)
        assert not torch.equal(plain.get_submodule(name).weight, weight)
    for name in ("embed", "head", "blocks.1.ffn.router"):
        assert torch.equal(target.get_submodule(name).weight, plain.get_submodule(name).weight)


def test_seeds_and_tensors_have_streams_of_their_own() -> None:
    one, same, other = (build(seed=seed)[0] for seed in (1, 1, 2))
    matrices = [name for name, parameter in one.named_parameters() if "norm" not in name]
    for name in matrices:
        assert torch.equal(one.get_parameter(name), same.get_parameter(name))
        assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    assert not torch.equal(one.blocks[0].attention.k.weight, one.blocks[0].attention.v.weight)


def test_the_trained_model_is_packed_without_loss() -> None:
    text = 'name = "v"\nengine = { rung = "fp4" }\nprompts = { count = 1 }'
    (variant,) = parse_scenario(text, source="test", folder=shipped_folder()).variants()
    spec, store = load_preset("nano"), WeightStore()
    held = store.get(variant, spec, CPU, torch.bfloat16, packed=True)
    assert store.get(variant, spec, CPU, torch.bfloat16, packed=True) is held
    target: Target = load_target(spec, shipped_folder(), device=CPU, dtype=torch.bfloat16)[0]
    assert held.mtp is not None
    for packed, (_, ffn) in zip(held.packed, expert_layers(target), strict=True):
        assert torch.equal(dequantize(codes(packed.gate_up, "stacked"), torch.bfloat16), ffn.gate_up)
        assert torch.equal(dequantize(codes(packed.down, "plain"), torch.bfloat16), ffn.down)


@pytest.mark.parametrize(
    ("packed", "failing", "line"),
    [
        (False, "_normal", "weights: embed.weight: 32768 bytes exceed the memory left on the cpu"),
        (False, "_experts", "weights: blocks.1.ffn, routed experts: 1572864 bytes exceed the memory left on the cpu"),
        (
            True,
            "draw_words",
            "weights: blocks.1.ffn, packed routed experts: 417792 bytes exceed the memory left on the cpu",
        ),
    ],
)
def test_memory_that_runs_out_is_named(monkeypatch: pytest.MonkeyPatch, packed: bool, failing: str, line: str) -> None:
    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nlong story")

    monkeypatch.setattr(random_model_module, failing, fail)
    with pytest.raises(UnfitError) as error:
        build(packed=packed)
    assert str(error.value) == line


@pytest.mark.parametrize(("family", "policy"), [("glm", "fp8"), ("glm", "mxfp4-experts-fp8"), ("mimo", "mimo-release")])
def test_resident_tensors_are_what_the_byte_model_says(models: Callable[..., Any], family: str, policy: str) -> None:
    """To the byte, but for the router's correction, which the byte model leaves out."""
    model = models(family, policy)
    target, packed = model.packed.target, model.packed.packed
    held = PLANS["eager"].held(load_policy(policy), "bf16", packed=True)
    counted = held_bytes(model.spec, held)
    assert sum(part.nbytes for part in packed) == counted[TensorClass.ROUTED_EXPERTS]
    left = sum(
        parameter.nbytes
        for name, parameter in target.named_parameters()
        if parameter.device.type != "meta" and not name.endswith("correction")
    )
    assert left == counted.total() - counted[TensorClass.ROUTED_EXPERTS]


def test_fp8_experts_refuse_blocks_that_straddle() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(InputError, match="gate_up of 128 x 128: needs whole blocks of 128 x 128"):
        Fp8Experts(draw_fp8(torch.Size((1, 128, 128)), generator), draw_fp8(torch.Size((1, 128, 128)), generator))
    bits = draw_fp8(torch.Size((2, 256, 256)), generator)
    values = bits.values.float()
    assert bool(values.isfinite().all())
    assert {float(x) for x in bits.scales.unique().log2() % 1} == {0.0}
    assert (
        0.5
        < float(
            Fp8Experts(bits, draw_fp8(torch.Size((2, 256, 128)), generator))
            .rows("gate_up", torch.tensor([0, 1]), torch.float32)
            .std()
        )
        * 16
        < 2
    )


@pytest.mark.parametrize(("half", "order"), [("gate_up", "stacked"), ("down", "plain")])
def test_expanding_is_the_exact_inverse_of_packing(half: Half, order: RowOrder) -> None:
    generator = torch.Generator().manual_seed(6)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 255, (3, 64, 4), dtype=torch.uint8, generator=generator)
    words, scale_words = relayout(blocks, scales, order)
    want = dequantize(MxFp4(blocks.flatten(-2), scales))
    assert torch.equal(expand(words, scale_words, half, torch.float32), want)
    near = scales.clamp(100, 140)  # bfloat16 has float32's range but for the last steps
    words, scale_words = relayout(blocks, near, order)
    want = dequantize(MxFp4(blocks.flatten(-2), near), torch.bfloat16)
    assert torch.equal(expand(words, scale_words, half, torch.bfloat16), want)

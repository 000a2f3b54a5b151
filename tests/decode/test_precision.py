"""Bytes per parameter are exact, and FP4 stays with the experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.decode.precision import (
    AS_SHIPPED,
    FORMATS,
    FP4_CLASSES,
    Policy,
    TensorClass,
    load_policy,
    policy_names,
)
from workbench.decode.presets import load_preset, preset_names
from workbench.errors import InputError

dims = st.integers(1, 4096)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("fp32", 32), ("bf16", 16), ("fp8", 8 + 32 / 16384), ("fp8-tensor", 8), ("mxfp4", 4.25), ("nvfp4", 4.5)],
)
def test_bits_per_parameter(name: str, bits: float) -> None:
    assert FORMATS[name].bits_per_parameter == bits


@pytest.mark.parametrize(
    ("name", "outputs", "inputs", "expected"),
    [
        ("bf16", 3, 5, 30),
        ("fp8", 256, 256, 65536 + 4 * 4),
        ("fp8", 129, 128, 129 * 128 + 2 * 4),
        ("mxfp4", 2880, 2880, 2880 * 2880 // 2 + 2880 * 90),
        ("mxfp4", 1, 33, 17 + 2),
        ("nvfp4", 4, 32, 64 + 8 + 4),
        ("fp8-tensor", 4, 4, 16 + 4),
    ],
)
def test_matrix_bytes(name: str, outputs: int, inputs: int, expected: int) -> None:
    assert FORMATS[name].matrix_bytes(outputs, inputs) == expected


@given(name=st.sampled_from(list(FORMATS)), outputs=dims, inputs=dims)
def test_whole_blocks_match_bits_per_parameter_and_partial_ones_never_cost_less(
    name: str, outputs: int, inputs: int
) -> None:
    stored = FORMATS[name]
    asymptotic = outputs * inputs * stored.bits_per_parameter / 8
    assert stored.matrix_bytes(outputs, inputs) >= asymptotic
    rows, columns = stored.block or (1, 1)
    whole = stored.matrix_bytes(outputs * rows, inputs * columns * 2) - stored.tensor_bytes
    assert whole == outputs * rows * inputs * columns * 2 * stored.bits_per_parameter / 8


@pytest.mark.parametrize("cls", sorted(set(TensorClass) - FP4_CLASSES))
@pytest.mark.parametrize("fp4", ["mxfp4", "nvfp4"])
def test_fp4_outside_the_experts_is_refused(cls: TensorClass, fp4: str) -> None:
    with pytest.raises(InputError, match=f"{cls} cannot be {fp4}"):
        Policy("own", {cls: fp4})
    with pytest.raises(InputError, match="only routed and shared experts"):
        load_policy("bf16").with_formats(**{cls: fp4})


def test_fp4_as_the_default_is_refused() -> None:
    with pytest.raises(InputError, match="only routed and shared experts"):
        Policy("own", default="mxfp4")


def test_block_formats_are_refused_where_there_are_no_blocks() -> None:
    with pytest.raises(InputError, match="kv_cache"):
        Policy("own", {TensorClass.KV_CACHE: "fp8"})


@pytest.mark.parametrize("name", [name for name in policy_names() if name != AS_SHIPPED])
def test_named_policies_keep_what_must_be_kept(name: str) -> None:
    policy = load_policy(name)
    for cls in (TensorClass.ROUTER, TensorClass.HEAD, TensorClass.EMBEDDING, TensorClass.NORM):
        assert policy.of(cls).bits >= 16
    assert policy.of(TensorClass.O_PROJ).bits >= 8


def test_mimo_release_keeps_o_proj_in_bf16() -> None:
    release = load_policy("mimo-release")
    assert release.of(TensorClass.O_PROJ).name == "bf16"
    assert release.of(TensorClass.QKV).name == "fp8"
    assert release.of(TensorClass.ROUTED_EXPERTS).name == "mxfp4"


@pytest.mark.parametrize("model", preset_names())
def test_every_shape_ships_in_a_known_policy(model: str) -> None:
    spec = load_preset(model)
    assert load_policy(AS_SHIPPED, shipped=spec.shipped).name == spec.shipped


def test_changed_policy_says_so_and_leaves_the_original_alone() -> None:
    base = load_policy("fp8")
    changed = base.with_formats(router="fp32")
    assert changed.name == "fp8+router=fp32"
    assert changed.of(TensorClass.ROUTER).name == "fp32"
    assert base.of(TensorClass.ROUTER).name == "bf16"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InputError, match="mxfp4-experts"):
        load_policy("int4")
    with pytest.raises(InputError, match="not known"):
        load_policy("bf16").with_formats(router="int4")
    with pytest.raises(InputError, match="classes"):
        load_policy("bf16").with_formats(rooter="bf16")

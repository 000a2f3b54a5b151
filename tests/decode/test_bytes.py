"""The byte model against published and hand-computed values, and its laws."""

from collections.abc import Collection
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.decode.bytes import StepBytes, distinct_experts, draft_bytes, step_bytes
from workbench.decode.precision import AS_SHIPPED, Policy, TensorClass, load_policy
from workbench.decode.presets import load_preset, preset_names
from workbench.decode.tensors import REPLICATED
from workbench.errors import InputError

GB = 1e9
EVEN: frozenset[TensorClass] = frozenset()


def step(name: str, policy: str | Policy = AS_SHIPPED, *, tp: int = 1, width: int = 1, even: bool = False) -> StepBytes:
    spec = load_preset(name)
    chosen = policy if isinstance(policy, Policy) else load_policy(policy, shipped=spec.shipped)
    replicated: Collection[TensorClass] = EVEN if even else REPLICATED
    return step_bytes(spec, chosen, tp=tp, width=width, replicated=replicated)


def gb(result: StepBytes) -> float:
    return result.weight_read_bytes / GB


# name: total B, active B, GB per token in BF16, FP8, MXFP4 experts with BF16 rest, MXFP4 experts with FP8 rest
ACTIVE = {
    "glm-5.2": (743.4, 40.30, 80.6, 41.4, 47.3, 30.8),
    "glm-5": (743.9, 40.83, 81.7, 41.9, 48.4, 31.3),
    "deepseek-v3": (671.0, 36.62, 73.3, 37.7, 43.2, 28.1),
    "deepseek-v3.2": (671.9, 37.48, 75.0, 38.5, 44.9, 28.9),
    "kimi-k2": (1026.4, 31.69, 63.4, 33.0, 32.3, 23.1),
    "mimo-v2.5-pro": (1021.2, 40.96, 81.9, 42.1, 51.3, 32.3),
    "mimo-v2-flash": (308.8, 14.82, 29.6, 15.5, 15.7, 11.1),
    "gpt-oss-120b": (116.8, 5.13, 10.3, 5.7, 5.00, 4.0),
    "gpt-oss-20b": (20.9, 3.61, 7.2, 4.2, 3.71, 3.1),
    "qwen3-30b-a3b": (30.5, 3.04, 6.08, 3.4, 3.4, 2.5),
    "qwen3-235b-a22b": (235.1, 21.57, 43.1, 22.2, 22.3, 15.6),
    "qwen3-next-80b-a3b": (79.7, 3.56, 7.1, 3.9, 4.9, 3.2),
}
POLICIES = ("bf16", "fp8", "mxfp4-experts", "mxfp4-experts-fp8")


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters(name: str) -> None:
    total, active = ACTIVE[name][:2]
    result = step(name)
    # the table rounds, and leaves out norms and biases
    assert result.params / 1e9 == pytest.approx(total, abs=0.06)
    assert result.active_params / 1e9 == pytest.approx(active, abs=0.012)


@pytest.mark.parametrize(("policy", "column"), list(zip(POLICIES, range(2, 6), strict=True)))
@pytest.mark.parametrize("name", ACTIVE)
def test_bytes_per_token(name: str, policy: str, column: int) -> None:
    # The table rounds to 0.1 GB and leaves out norms, biases, FP8 scales and the last of Qwen3-Next's projections.
    loose = 0.1 if name == "qwen3-next-80b-a3b" else 0.052
    assert gb(step(name, policy)) == pytest.approx(ACTIVE[name][column], abs=loose, rel=1e-3)


def test_mimo_has_a_trillion_parameters_and_42_billion_active() -> None:
    result = step("mimo-v2.5-pro")
    spec = load_preset("mimo-v2.5-pro")
    assert result.params / 1e12 == pytest.approx(1.02, rel=5e-3)
    # the published 42 B count the embedding table
    assert (result.active_params + spec.vocab * spec.hidden) / 1e9 == pytest.approx(42, rel=5e-3)
    routed = sum(row.params for row in result.rows if row.cls is TensorClass.ROUTED_EXPERTS)
    assert routed / result.params == pytest.approx(0.979, abs=5e-4)


def test_glm_5_2_reads_6_65_gb_per_rank_and_token() -> None:
    result = step("glm-5.2", tp=8)
    assert result.policy == "fp8"
    assert result.read_bytes / GB == pytest.approx(6.65, rel=5e-3)
    assert result.replicated_weight_tax == pytest.approx(0.286, abs=2e-3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"router": "fp32"}, 6.89), ({"kv_b": "bf16"}, 6.79), ({"indexer_key": "bf16"}, 6.67)],
)
def test_glm_5_2_variants(change: dict[str, str], expected: float) -> None:
    assert gb(step("glm-5.2", load_policy("fp8").with_formats(**change), tp=8)) == pytest.approx(expected, rel=1.5e-3)


@pytest.mark.parametrize(("policy", "expected"), [("nvfp4-experts-fp8", 5.41), ("nvfp4-experts", 8.76)])
def test_glm_5_2_nvfp4(policy: str, expected: float) -> None:
    assert gb(step("glm-5.2", policy, tp=8)) == pytest.approx(expected, rel=1.5e-3)


def test_glm_5_2_split_evenly() -> None:
    result = step("glm-5.2", tp=8, even=True)
    assert gb(result) == pytest.approx(5.17, rel=1.5e-3)
    assert result.replicated_weight_tax == 0


WIDTHS = [
    ("glm-5.2", 8, False, {1: 6.65, 2: 9.39, 4: 14.6, 6: 19.5, 8: 24.1}),
    ("mimo-v2.5-pro", 8, True, {1: 4.92, 4: 8.90, 8: 13.8}),
    ("gpt-oss-20b", 1, False, {1: 3.71, 2: 4.82, 4: 6.64, 8: 9.10, 16: 11.4}),
    ("gpt-oss-120b", 1, False, {1: 5.00, 2: 6.84, 4: 10.4, 8: 16.8, 16: 27.4}),
    ("qwen3-30b-a3b", 1, False, {1: 6.08, 2: 9.48, 4: 15.7, 8: 25.8, 16: 39.8}),
]


@pytest.mark.parametrize(
    ("name", "tp", "even", "width", "expected"),
    [(name, tp, even, width, value) for name, tp, even, values in WIDTHS for width, value in values.items()],
)
def test_verify_width(name: str, tp: int, even: bool, width: int, expected: float) -> None:
    assert gb(step(name, tp=tp, width=width, even=even)) == pytest.approx(expected, rel=4e-3)


def test_mimo_o_proj_outweighs_all_routed_experts_at_width_one() -> None:
    read = {row.name: row.read_bytes / GB for row in step("mimo-v2.5-pro").rows}
    assert read["o_proj"] == pytest.approx(14.09, rel=2e-3)
    assert read["routed experts"] == pytest.approx(11.07, rel=2e-3)
    assert read["q_proj"] + read["k_proj, v_proj"] == pytest.approx(11.67, rel=2e-3)
    assert read["dense FFN"] == pytest.approx(0.30, rel=2e-2)
    assert read["router"] == pytest.approx(0.33, rel=2e-2)
    assert read["head"] == pytest.approx(1.87, rel=5e-3)


def test_mimo_router_replication_is_charged_to_every_rank() -> None:
    release, even = step("mimo-v2.5-pro", tp=8), step("mimo-v2.5-pro", tp=8, even=True)
    router = 2 * 69 * 384 * 6144
    assert release.read_bytes - even.read_bytes == pytest.approx(router * 7 / 8, rel=1e-2)


def test_mimo_drafter() -> None:
    spec = load_preset("mimo-v2.5-pro")
    draft = draft_bytes(spec, load_policy(spec.shipped), drafter="dflash", tp=8, replicated=EVEN)
    assert draft.width == 7
    assert draft.params / 1e9 == pytest.approx(2.8, abs=0.05)
    assert draft.stored_bytes / GB == pytest.approx(5.5, abs=0.05)
    assert draft.read_bytes / GB == pytest.approx(0.93, rel=5e-3)


def test_mimo_flash_mtp_modules_have_a_third_of_a_billion_parameters_each() -> None:
    spec = load_preset("mimo-v2-flash")
    draft = draft_bytes(spec, load_policy("fp8"), drafter="mtp")
    assert draft.params / 3 / 1e9 == pytest.approx(0.329, abs=5e-4)


# DeepSeek-V3's cache takes 70.272 KB a token (arXiv 2505.09343, table 1)
def test_latent_cache_of_deepseek_v3() -> None:
    result = step_bytes(load_preset("deepseek-v3"), load_policy("fp8"), context=1000, tp=8)
    assert result.cache_read_bytes == 70272 * 1000
    (row,) = [row for row in result.rows if row.is_cache]
    assert row.placement == "replicated"


def test_windowed_layers_stop_growing_and_full_ones_do_not() -> None:
    spec, policy = load_preset("gpt-oss-20b"), load_policy("bf16")
    short, long = (step_bytes(spec, policy, context=context) for context in (4096, 8192))
    by_name = [{row.name: row.read_bytes for row in result.rows if row.is_cache} for result in (short, long)]
    position = 2 * 8 * 128 * 12
    assert by_name[0] == {"KV cache, window 128": 127 * position, "KV cache, full": 4096 * position}
    assert by_name[1] == {"KV cache, window 128": 127 * position, "KV cache, full": 8192 * position}


def test_recurrent_state_ignores_the_context() -> None:
    spec, policy = load_preset("qwen3-next-80b-a3b"), load_policy("bf16")
    state = [
        next(row for row in step_bytes(spec, policy, context=context).rows if row.cls is TensorClass.LINEAR_STATE)
        for context in (0, 10_000)
    ]
    assert state[0].read_bytes == state[1].read_bytes == 36 * 4 * (32 * 128 * 128 + 3 * 8192)


def test_sparse_attention_reads_what_the_indexer_keeps() -> None:
    spec, policy = load_preset("glm-5.2"), load_policy("fp8")
    rows = {row.name: row for row in step_bytes(spec, policy, context=100_000).rows}
    assert rows["KV cache, latent"].read_bytes == pytest.approx(78 * 2048 * 576 * 2)
    assert rows["KV cache, indexer keys"].read_bytes == 21 * 100_000 * 128 * 2
    assert rows["KV cache, latent"].stored_bytes == 78 * 100_000 * 576 * 2


def test_kv_heads_repeat_when_ranks_outnumber_them() -> None:
    spec = load_preset("qwen3-30b-a3b")
    rows = {row.name: row for row in step_bytes(spec, load_policy("bf16"), tp=8, context=100).rows}
    for name in ("k_proj, v_proj", "KV cache, full"):
        assert (rows[name].parts, rows[name].placement) == (4, "partial")
    assert rows["q_proj"].placement == "sharded"


def test_tied_head_is_stored_once_and_read_as_head() -> None:
    nano = load_preset("nano")
    tied, untied = (
        step_bytes(nano.model_copy(update={"tied_head": tied}), load_policy("bf16")) for tied in (True, False)
    )
    assert untied.params - tied.params == nano.vocab * nano.hidden
    assert untied.stored_bytes - tied.stored_bytes == 2 * nano.vocab * nano.hidden
    assert untied.read_bytes == tied.read_bytes


@pytest.mark.parametrize("name", preset_names())
def test_operations_are_twice_the_active_parameters(name: str) -> None:
    result = step(name)
    weights = sum(row.flops for row in result.rows if not row.is_cache)
    # norms and biases are parameters and no multiply-adds
    assert weights == pytest.approx(2 * result.active_params, rel=5e-3)


def test_each_mtp_pass_reads_one_module_and_the_head() -> None:
    nano, policy = load_preset("nano"), load_policy("bf16")
    one, three = (draft_bytes(nano, policy, drafter="mtp", drafts=drafts) for drafts in (1, 3))
    assert three.read_bytes == pytest.approx(3 * one.read_bytes)
    assert three.params == one.params
    head = next(row for row in one.rows if row.cls is TensorClass.HEAD)
    assert head.read_bytes == 2 * nano.vocab * nano.hidden
    assert head.params == head.stored_bytes == 0


def test_dflash_reads_its_weights_once_whatever_the_block() -> None:
    nano, policy = load_preset("nano"), load_policy("bf16")
    short, long = (draft_bytes(nano, policy, drafter="dflash", drafts=drafts) for drafts in (1, 7))
    assert long.read_bytes - short.read_bytes == 6 * nano.hidden * 2  # embedding rows of six more masks
    assert short.stored_bytes == long.stored_bytes


def test_a_moe_module_over_several_tokens_reads_more_experts() -> None:
    glm, policy = load_preset("glm-5.2"), load_policy("fp8")
    one, many = (draft_bytes(glm, policy, drafter="mtp", drafts=5, catch_up=tokens, tp=8) for tokens in (1, 6))
    assert many.read_bytes > one.read_bytes
    reads = [next(row.read_bytes for row in x.rows if row.cls is TensorClass.ROUTED_EXPERTS) for x in (one, many)]
    assert reads[1] / reads[0] == pytest.approx((distinct_experts(256, 8, 6) + 4 * 8) / (5 * 8))


def test_measured_expert_counts_replace_the_model() -> None:
    nano, policy = load_preset("nano"), load_policy("bf16")
    measured = step_bytes(nano, policy, width=4, distinct_experts=[2.0, 3, 4, 5, 6, 7, 8, 2.5])
    modelled = step_bytes(nano, policy, width=4)
    assert (measured.tag, modelled.tag) == ("estimated", "modelled")
    (routed,) = [row for row in measured.rows if row.cls is TensorClass.ROUTED_EXPERTS]
    assert routed.read_bytes == 37.5 * 3 * 256 * 128 * 2
    assert measured.distinct == (2, 3, 4, 5, 6, 7, 8, 2.5)


@pytest.mark.parametrize("counts", [[2.0] * 7, [1.0] + [2.0] * 7, [9.0] + [2.0] * 7])
def test_impossible_expert_counts_are_refused(counts: list[float]) -> None:
    with pytest.raises(InputError, match="distinct_experts"):
        step_bytes(load_preset("nano"), load_policy("bf16"), width=4, distinct_experts=counts)


def test_expert_counts_for_a_dense_model_are_refused() -> None:
    with pytest.raises(InputError, match="no routed experts"):
        step_bytes(load_preset("qwen3-8b"), load_policy("bf16"), distinct_experts=[1.0])


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"tp": 0}, "tp=0"),
        ({"tp": 3}, "tp=3"),
        ({"width": 0}, "width=0"),
        ({"batch": -1}, "batch=-1"),
        ({"context": -1}, "context=-1"),
        ({"context": 1025}, "context=1025"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        step_bytes(load_preset("nano"), load_policy("bf16"), **sizes)


def test_drafters_a_model_lacks_are_refused() -> None:
    dense, policy = load_preset("qwen3-8b"), load_policy("bf16")
    with pytest.raises(InputError, match="no mtp"):
        draft_bytes(dense, policy, drafter="mtp")
    with pytest.raises(InputError, match="no dflash"):
        draft_bytes(dense, policy, drafter="dflash")
    with pytest.raises(InputError, match="at most 7"):
        draft_bytes(load_preset("nano"), policy, drafter="dflash", drafts=8)


def test_distinct_experts_is_the_exact_expectation() -> None:
    experts, top_k, tokens = 5, 2, 3
    choices = list(combinations(range(experts), top_k))
    sizes = [len(set().union(*picks)) for picks in product(choices, repeat=tokens)]
    assert distinct_experts(experts, top_k, tokens) == pytest.approx(sum(sizes) / len(sizes))


def test_distinct_experts_of_glm_at_width_six() -> None:
    assert distinct_experts(256, 8, 6) == pytest.approx(44.4, abs=0.05)


@given(experts=st.integers(1, 512), data=st.data(), tokens=st.integers(1, 64))
def test_distinct_experts_bounds(experts: int, data: st.DataObject, tokens: int) -> None:
    top_k = data.draw(st.integers(1, experts))
    count = distinct_experts(experts, top_k, tokens)
    assert top_k * (1 - 1e-12) <= count <= min(experts, top_k * tokens) * (1 + 1e-12)
    assert count <= distinct_experts(experts, top_k, tokens + 1) * (1 + 1e-12)


names = st.sampled_from(preset_names())
policies = st.sampled_from(["bf16", "fp8", "mxfp4-experts", "nvfp4-experts-fp8", "mimo-release"])


@given(name=names, policy=policies, width=st.integers(1, 32), batch=st.integers(1, 4), context=st.integers(0, 1000))
def test_more_tokens_or_context_never_read_less(name: str, policy: str, width: int, batch: int, context: int) -> None:
    spec, chosen = load_preset(name), load_policy(policy)
    base = step_bytes(spec, chosen, width=width, batch=batch, context=context)
    for more in (
        step_bytes(spec, chosen, width=width + 1, batch=batch, context=context),
        step_bytes(spec, chosen, width=width, batch=batch + 1, context=context),
        step_bytes(spec, chosen, width=width, batch=batch, context=context + 1),
    ):
        assert more.read_bytes >= base.read_bytes
        assert more.flops > base.flops * (1 - 1e-12)


@given(name=names, policy=policies, tp=st.sampled_from([1, 2, 4, 8]), width=st.integers(1, 16))
def test_sums_and_placement(name: str, policy: str, tp: int, width: int) -> None:
    result = step_bytes(load_preset(name), load_policy(policy), tp=tp, width=width, context=500)
    whole = step_bytes(load_preset(name), load_policy(policy), tp=1, width=width, context=500)
    assert result.sharded_read_bytes + result.replicated_read_bytes == pytest.approx(result.read_bytes)
    assert result.weight_read_bytes + result.cache_read_bytes == pytest.approx(result.read_bytes)
    excess = result.total(lambda row: row.excess_read_bytes)
    assert (result.read_bytes - excess) * tp == pytest.approx(whole.read_bytes)
    assert result.read_bytes * tp >= whole.read_bytes * (1 - 1e-12)
    assert result.params == whole.params
    assert result.stored_bytes == whole.stored_bytes
    assert all(row.parts in (1, tp) or row.placement == "partial" for row in result.rows)
    assert whole.replicated_weight_tax == 0


@given(name=names, width=st.integers(1, 8))
def test_narrower_experts_never_read_more(name: str, width: int) -> None:
    spec = load_preset(name)
    wide, narrow = (step_bytes(spec, load_policy(policy), width=width) for policy in ("bf16", "mxfp4-experts"))
    assert narrow.read_bytes <= wide.read_bytes
    assert narrow.flops == wide.flops

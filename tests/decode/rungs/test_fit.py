from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.decode.precision import TensorClass, load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rungs import fit
from workbench.decode.rungs.fit import check_variant, check_variants, held_bytes, variant_spec
from workbench.decode.rungs.plan import PLANS, plan_of
from workbench.errors import ExitCode, InputError, UnfitError
from workbench.runner import run_scenario
from workbench.scenario import RUNGS, Variant, parse_scenario


def variants(*entries: str, base: str = "") -> list[Variant]:
    matrix = "".join(f'\n[[matrix]]\nname = "v{index}"\n{entry}\n' for index, entry in enumerate(entries))
    return parse_scenario(f'name = "s"\n{base}{matrix}', source="test", folder=Path()).variants()


def model(preset: str, rung: str, policy: str = "as-shipped", more: str = "") -> str:
    return f"""
    model = {{ preset = "{preset}", weights = "random" }}
    precision = {{ policy = "{policy}" }}
    engine = {{ rung = "{rung}" }}
    {more}
    """


GLM_STEP = model("glm-5.2", "persistent", "mxfp4-experts-fp8").replace("random", 'random", tp = 8, routing = "uniform')


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``gpu(free)``: pretend that there is a GPU with that many bytes free."""

    def pretend(free: float) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free) + fit.SPARE_BYTES, 0))

    return pretend


def complaint(kind: type[Exception], checked: Sequence[Variant]) -> str:
    with pytest.raises(kind) as error:
        check_variants(checked)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_plans_cover_the_ladder() -> None:
    assert tuple(PLANS) == RUNGS
    assert [rung for rung, plan in PLANS.items() if not plan.needs_gpu] == ["eager"]


def test_without_a_gpu_all_rungs_that_need_one_are_named_and_nothing_runs(no_gpu: None, tmp_path: Path) -> None:
    text = """
    name = "ladder"
    [prompts]
    count = 1
    new_tokens = 2
    [[matrix]]
    name = "eager"
    [[matrix]]
    name = "fp4"
    engine = { rung = "fp4" }
    [[matrix]]
    name = "graph"
    engine = { rung = "graph" }
    """
    scenario = parse_scenario(text, source="test", folder=tmp_path)
    with pytest.raises(UnfitError) as error:
        run_scenario(scenario, tmp_path / "out")
    assert error.value.exit_code is ExitCode.UNFIT
    assert "engine.rung: graph, fp4 need an NVIDIA GPU and torch sees none, so no variant was run" in str(error.value)
    assert not (tmp_path / "out").exists()
    assert "persistent needs an NVIDIA GPU" in complaint(UnfitError, variants('engine = { rung = "persistent" }'))
    check_variants(variants('engine = { rung = "eager" }'))


def test_a_gpu_rung_on_the_cpu_is_a_contradiction(gpu: Any) -> None:
    gpu(1e12)
    line = complaint(InputError, variants('engine = { rung = "graph", device = "cpu" }'))
    assert line == "variant 'v0': engine.device: rung 'graph' runs on 'cuda' only"


def test_gpt_oss_120b_expanded_is_refused_by_tensor_class_and_bytes(gpu: Any) -> None:
    gpu(139 * 2**30)
    line = complaint(UnfitError, variants(model("gpt-oss-120b", "fp4"), model("gpt-oss-120b", "fused")))
    assert line.startswith("variant 'v1': rung 'fused' of gpt-oss-120b: 229403197440 bytes of routed_experts in bf16, ")
    assert "149250113536 bytes free on the cuda; rung 'fp4' keeps the experts packed, 60993699840 bytes" in line
    check_variants(variants(model("gpt-oss-120b", "fp4"), model("gpt-oss-120b", "splitk")))


def test_weights_that_variants_share_count_once(gpu: Any) -> None:
    spec, policy = load_preset("gpt-oss-20b"), load_policy("mxfp4-experts")
    expanded, packed = (held_bytes(spec, PLANS[rung].held(policy, "bf16")).total() for rung in ("fused", "fp4"))
    assert expanded == pytest.approx(41.8e9, rel=0.01)
    assert packed == pytest.approx(13.7e9, rel=0.02)
    ladder = variants(*(model("gpt-oss-20b", rung) for rung in ("eager", "graph", "fused", "fp4", "splitk")))
    gpu(expanded + packed)
    check_variants(ladder)
    gpu(expanded + packed - 1)
    assert "variant 'v3': rung 'fp4' of gpt-oss-20b: " in complaint(UnfitError, ladder)


def test_what_is_held_follows_the_rung() -> None:
    stored = load_policy("mxfp4-experts-fp8")
    held = {rung: plan.held(stored, "bf16") for rung, plan in PLANS.items()}
    experts, qkv, head = TensorClass.ROUTED_EXPERTS, TensorClass.QKV, TensorClass.HEAD
    assert [held["fused"].of(cls).name for cls in (experts, qkv, head)] == ["bf16", "bf16", "bf16"]
    assert [held["fp4"].of(cls).name for cls in (experts, qkv, head)] == ["mxfp4", "bf16", "bf16"]
    assert [held["livequant-naive"].of(cls).name for cls in (experts, qkv, head)] == ["mxfp4", "fp8", "bf16"]
    assert PLANS["eager"].held(stored, "fp32").of(experts).name == "fp32"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (model("qwen3-30b-a3b", "fp4"), "rung 'fp4' needs routed experts in mxfp4, 'bf16' of qwen3-30b-a3b has bf16"),
        (model("qwen3-8b", "splitk"), "of qwen3-8b has none; use mxfp4-experts"),
        (model("gpt-oss-20b", "livequant-naive"), "needs qkv in fp8, 'mxfp4-experts' has bf16"),
        (
            model("gpt-oss-20b", "eager", "bf16").replace('eager"', 'eager", faults = ["w4a8"]'),
            "engine.faults: 'w4a8' needs routed experts in mxfp4",
        ),
        (
            model("gpt-oss-20b", "persistent", more='drafter = { kind = "ngram", depth = 8 }'),
            "drafter.depth: rung 'persistent' scores up to 8 tokens a step, not 9",
        ),
        (
            model("gpt-oss-20b", "fused", more='drafter = { kind = "ngram", depth = 16 }'),
            "drafter.depth: kernel rungs score up to 16 tokens a step, not 17",
        ),
        (
            model("qwen3-30b-a3b", "persistent", "mxfp4-experts"),
            "qwen3-30b-a3b: attention: the persistent step takes one GQA shape",
        ),
        (
            model("gpt-oss-20b", "graph").replace('graph"', 'graph", overlap = true'),
            "engine.overlap: rung 'graph' launches no kernels of its own",
        ),
        (
            model("gpt-oss-20b", "persistent").replace('persistent"', 'persistent", overlap = true'),
            "engine.overlap: rung 'persistent' is one launch a step",
        ),
        (
            model("gpt-oss-20b", "eager").replace('eager"', 'eager", run_ahead = true'),
            "engine.run_ahead: rung 'eager' decides on the host what it commits; engine.run_ahead = false",
        ),
        (
            model("gpt-oss-20b", "persistent").replace('persistent"', 'persistent", run_ahead = true')
            + '\n[sampling]\nmethod = "sample"',
            "engine.run_ahead: tokens are chosen outside the step",
        ),
        (
            model("gpt-oss-20b", "graph").replace('graph"', 'graph", run_ahead = true, faults = ["unfused-sampling"]'),
            "engine.run_ahead: tokens are chosen outside the step",
        ),
        (
            model("gpt-oss-20b", "splitk").replace('splitk"', 'splitk", run_ahead = true')
            + '\n[drafter]\nkind = "ngram"',
            "engine.run_ahead: drafter 'ngram' needs to know how many tokens were accepted before it drafts",
        ),
        (model("qwen3-next-80b-a3b", "fused"), "attention: the kernel rungs run gqa and mla only"),
        (
            model("glm-5.2", "fused", "mxfp4-experts")
            .replace("random", 'random", tp = 8, routing = "uniform')
            .replace("mxfp4-experts", 'mxfp4-experts", expand = "step'),
            "precision.expand: rung 'fused' multiplies bf16 or fp8 experts, not mxfp4; use rung 'fp4'",
        ),
        (
            model("qwen3-30b-a3b", "graph").replace("as-shipped", 'as-shipped", expand = "step'),
            "precision.expand: 'step' needs routed experts in mxfp4 or fp8, they are bf16",
        ),
        (model("glm-5.2", "fp4", "fp8"), "rung 'fp4' needs routed experts in mxfp4, 'fp8' of glm-5.2 has fp8"),
        (
            model("gpt-oss-20b", "splitk", "fp8"),
            "fp8 experts need hidden and moe.inter in multiples of 128",
        ),
        (
            model("gpt-oss-20b", "persistent").replace("random", 'random", routing = "skewed'),
            "model.routing: rung 'persistent' routes for itself",
        ),
        (
            GLM_STEP + 'drafter = { kind = "simulated", depth = 3, accept_length = 2.5 }',
            "drafter.depth: rung 'persistent' scores one token a step of an MLA model, not 4; drafter.kind 'none'",
        ),
        (
            GLM_STEP.replace("mxfp4-experts-fp8", "mxfp4-experts"),
            "precision.policy: rung 'persistent' needs qkv_a in fp8, 'mxfp4-experts' has bf16; use mxfp4-experts-fp8",
        ),
        (
            GLM_STEP.replace("mxfp4-experts-fp8", "mimo-release"),
            "precision.policy: rung 'persistent' needs o_proj in fp8, 'mimo-release' has bf16",
        ),
        (
            GLM_STEP.replace("mxfp4-experts-fp8", "fp8"),
            "rung 'persistent' needs routed experts in mxfp4, 'fp8' of glm-5.2 tp8 has fp8",
        ),
        (
            GLM_STEP.replace("tp = 8", "tp = 4"),
            "glm-5.2 tp4: persistent step: inter must be at most 256 with top_k 8, not 512",
        ),
        (
            model("qwen3-30b-a3b", "persistent", "mxfp4-experts")
            .replace('"random"', '"random", tp = 2')
            .replace('persistent"', 'persistent", collective_us = 8'),
            "engine.collective_us: rung 'persistent' of qwen3-30b-a3b tp2 waits for no other rank; leave it out",
        ),
        (
            model("gpt-oss-20b", "graph").replace('graph"', 'graph", faults = ["low-split"]'),
            "'low-split' does not apply to rung 'graph'",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_one_line(entry: str, words: str) -> None:
    (variant,) = variants(entry)
    with pytest.raises(InputError) as error:
        check_variant(variant, variant_spec(variant))
    assert str(error.value).startswith("variant 'v0': ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 2880 + 32}, "hidden: 2912 is not a multiple of 64"),
        ({"attention": {"kind": "gqa", "heads": 64, "kv_heads": 8, "qk_dim": 48, "v_dim": 64}}, "head sizes 48 and 64"),
        ({"attention": {"kind": "gqa", "heads": 3, "kv_heads": 1, "qk_dim": 16, "v_dim": 16}}, "heads * v_dim = 48"),
        ({"attention": {"kind": "gqa", "heads": 64, "kv_heads": 1, "qk_dim": 64, "v_dim": 64}}, "256 rows"),
        ({"dense_first": 1, "dense_inter": 100}, "dense_inter: 100 is not a multiple of 64"),
    ],
)
def test_shapes_that_the_kernels_cannot_take_are_refused(changes: dict[str, Any], words: str) -> None:
    (variant,) = variants(model("gpt-oss-20b", "fp4", more='drafter = { kind = "ngram", depth = 4 }'))
    spec = type(load_preset("gpt-oss-20b")).model_validate(load_preset("gpt-oss-20b").model_dump() | changes)
    with pytest.raises(InputError, match="variant 'v0': ") as error:
        check_variant(variant, spec)
    assert words in str(error.value)


def test_slices_that_do_not_divide_name_the_variant_and_the_field() -> None:
    (variant,) = variants(model("glm-5.2", "fp4", "mxfp4-experts").replace('"random"', '"random", tp = 5'))
    with pytest.raises(InputError) as error:
        variant_spec(variant)
    assert str(error.value).startswith("variant 'v0': model.tp: glm-5.2: tp=5 does not divide ")


def test_a_rank_of_glm_fits_where_its_experts_stay_as_stored(gpu: Any) -> None:
    def entry(rung: str, policy: str, expand: str) -> str:
        text = model("glm-5.2", rung, policy).replace('"random"', '"random", tp = 8')
        return text.replace(f'"{policy}"', f'"{policy}", expand = "{expand}"')

    gpu(139 * 2**30)
    check_variants(variants(entry("eager", "fp8", "step"), entry("fused", "fp8", "step")))
    line = complaint(UnfitError, variants(entry("eager", "fp8", "load")))
    assert "bytes of routed_experts in bf16" in line
    assert "precision.expand = 'step' keeps them as stored, 90619084800 bytes" in line


@pytest.mark.parametrize(
    ("field", "size", "words"),
    [
        ("kv_lora", 48, "attention.kv_lora: 48 is no power of two from 16 to 512"),
        ("nope_dim", 40, "attention.nope_dim: 40 is not a multiple of 16"),
        ("q_lora", 96, "attention: q_lora = 96 is not a multiple of 64"),
    ],
)
def test_latent_sizes_that_the_kernels_cannot_take_are_refused(field: str, size: int, words: str) -> None:
    spec = load_preset("glm-5.2")
    assert spec.attention.kind == "mla"
    changed = spec.model_copy(update={"attention": spec.attention.model_copy(update={field: size})})
    (variant,) = variants(model("glm-5.2", "fp4", "mxfp4-experts"))
    with pytest.raises(InputError) as error:
        check_variant(variant, changed)
    assert words in str(error.value)


def test_every_persistent_variant_counts_its_own_weights(gpu: Any) -> None:
    spec = load_preset("gpt-oss-20b")
    packed = held_bytes(spec, PLANS["fp4"].held(load_policy("as-shipped", shipped=spec.shipped), "bf16")).total()
    step = model("gpt-oss-20b", "persistent")
    two = variants(step, step.replace('persistent"', 'persistent", run_ahead = true'))
    gpu(3 * packed)  # one as it is stored, one in the kernel's layout for each
    check_variants(two)
    gpu(3 * packed - 1)
    assert "variant 'v1': rung 'persistent' of gpt-oss-20b: " in complaint(UnfitError, two)


def test_the_step_of_a_glm_slice_takes_choices_and_collectives_and_its_variants_share_weights(gpu: Any) -> None:
    ahead = GLM_STEP.replace('persistent"', 'persistent", run_ahead = true, collective_us = 8')
    two = variants(GLM_STEP, ahead.replace("uniform", "skewed"))
    gpu(1e12)
    check_variants(two)
    spec, stored = variant_spec(two[0]), load_policy("mxfp4-experts-fp8")
    packed, relaid = (
        held_bytes(spec, plan.held(stored, "bf16", packed=True))
        for plan in (PLANS["eager"], plan_of("persistent", spec))
    )
    experts = TensorClass.ROUTED_EXPERTS
    assert packed[experts] == relaid[experts] == pytest.approx(48.1e9, rel=0.01)
    gpu(packed.total() + relaid.total())  # experts twice, FP8 beside bf16, for both variants
    check_variants(two)
    gpu(packed.total() + relaid.total() - 1)
    assert "variant 'v0': rung 'persistent' of glm-5.2 tp8: " in complaint(UnfitError, two)

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.decode.bytes import step_bytes
from workbench.decode.engine import SequenceRecord, StepRecord
from workbench.decode.model import Target
from workbench.decode.pipeline import Pipeline, build_pipeline
from workbench.decode.precision import load_policy
from workbench.decode.presets import load_preset
from workbench.decode.tensor_rows import byte_model_rows, tensor_rows
from workbench.scenario import parse_scenario

SHAPE = """
name = "tiny"
hidden = 32
vocab = 64
layer_pattern = "sliding full"
window = 5
tied_head = true
max_positions = 128
attention = { kind = "gqa", heads = 4, kv_heads = 2, qk_dim = 8, v_dim = 8 }
moe = { experts = 8, top_k = 2, inter = 32 }
"""
EXPERT_BYTES = 3 * 32 * 32 * 2  # gate, up and down, bfloat16


@pytest.fixture(scope="module")
def ngram(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("ngram")
    (folder / "tiny.toml").write_text(SHAPE)
    (folder / "prompts.jsonl").write_text('{"id": "a", "text": "' + "x" * 60 + '"}\n')
    text = """
    name = "v"
    model = { shape = "tiny.toml", weights = "random", seed = 1 }
    precision = { policy = "bf16" }
    engine = { device = "cpu" }
    drafter = { kind = "ngram", depth = 5, order = 2 }
    prompts = { file = "prompts.jsonl", count = 1, new_tokens = 60 }
    """
    return build_pipeline(parse_scenario(text, source="test", folder=folder).variants()[0])


def record(width: int, context: int, experts: tuple[int, ...], committed: int = 1) -> StepRecord:
    return StepRecord(0, 1, 2, 3, context, width, width - 1, committed - 1, (7,) * committed, experts)


def read(rows: list[dict[str, Any]], tensor_class: str, role: str = "target") -> int:
    return sum(row["read_bytes"] for row in rows if (row["tensor_class"], row["role"]) == (tensor_class, role))


def test_a_drafter_of_varying_width_has_a_byte_model(ngram: Pipeline) -> None:
    (prompt,) = ngram.prompts
    steps = list(ngram.engine.decode([*prompt.tokens, 3, 4, 3, 4, 3], 60, SequenceRecord(0)))
    assert {step.width for step in steps} >= {1, 6}
    rows = tensor_rows(ngram, steps)
    experts = sum(sum(step.experts) for step in steps) / len(steps)
    assert read(rows, "routed_experts") == round(experts * EXPERT_BYTES)
    assert {row["role"] for row in rows} == {"target", "kv"}  # an n-gram index is no tensor


WIDTH_AND_EXPERTS = st.integers(1, 9).flatmap(
    lambda width: st.tuples(st.just(width), st.integers(2, min(8, 2 * width)), st.integers(2, min(8, 2 * width)))
)


@given(taken=st.lists(st.tuples(WIDTH_AND_EXPERTS, st.integers(0, 100)), min_size=1, max_size=30))
def test_any_mixture_of_widths_gives_the_mean_experts(
    ngram: Pipeline, taken: list[tuple[tuple[int, int, int], int]]
) -> None:
    steps = [record(width, context, (first, second)) for (width, first, second), context in taken]
    rows = tensor_rows(ngram, steps)
    mean = sum(sum(step.experts) for step in steps) / len(steps)
    assert read(rows, "routed_experts") == round(mean * EXPERT_BYTES)
    widths = [step.width for step in steps]
    assert {row["width"] for row in rows} == {-(-sum(widths) // len(widths))}


def test_the_rows_are_the_byte_model_s(ngram: Pipeline) -> None:
    rows = tensor_rows(ngram, [record(3, 40, (4, 5)), record(3, 50, (6, 5))])
    model = step_bytes(ngram.spec, load_policy("bf16"), width=3, context=45, distinct_experts=(5, 5))
    assert sum(row["read_bytes"] for row in rows) == pytest.approx(model.read_bytes, abs=len(rows))
    assert {row["tag"] for row in rows} == {"estimated"}
    with torch.device("meta"):
        assert sum(row["parameters"] for row in rows) == sum(p.numel() for p in Target(ngram.spec).parameters())
    # The engine holds float32 where two bytes an element are stored, in the cache too.
    assert all(row["resident_bytes"] == 2 * row["stored_bytes"] for row in rows)
    assert read(rows, "kv_cache", "kv") == (45 + 4) * 2 * (8 + 8) * 2  # the window holds 4 positions before the step


@pytest.mark.parametrize(("kind", "drafts"), [("mtp", 3), ("dflash", 7)])
def test_a_drafter_with_weights_has_rows_of_its_own(tmp_path: Path, kind: str, drafts: int) -> None:
    text = f'name = "v"\nengine.device = "cpu"\nprompts.count = 1\ndrafter = {{ kind = "{kind}", depth = {drafts} }}'
    built = build_pipeline(parse_scenario(text, source="test", folder=tmp_path).variants()[0])
    rows = tensor_rows(built, [record(drafts + 1, 100, (6,) * 8, committed=3)])
    draft = [row for row in rows if row["role"] == "draft"]
    assert {row["width"] for row in draft} == {drafts}
    assert {row["tag"] for row in draft} == {"modelled"}
    assert {row["format"] for row in rows if row["tensor_class"] == "routed_experts"} == {"mxfp4"}
    weights = [row for row in draft if row["stored_bytes"] and row["tensor_class"] != "kv_cache"]
    passes = drafts if kind == "mtp" else 1
    assert all(row["read_bytes"] == passes * row["stored_bytes"] for row in weights)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_what_is_held_as_stored_is_no_wider_on_any_rank(tp: int) -> None:
    spec = load_preset("glm-5.2")
    policy = load_policy("as-shipped", shipped=spec.shipped)
    variant = parse_scenario('name = "v"\n', source="test", folder=Path()).variants()[0]
    steps = [record(1, 40, (8,) * spec.moe_layers)]
    rows = byte_model_rows(variant, spec, policy, policy, steps=steps, tp=tp)
    assert all(row["resident_bytes"] == row["stored_bytes"] for row in rows)
    experts = [row for row in rows if row["tensor_class"] == "routed_experts"]
    assert sum(row["parameters"] for row in experts) * tp == pytest.approx(
        spec.moe_layers * spec.moe.experts * 3 * spec.hidden * spec.moe.inter, rel=1e-6
    )


def test_no_steps_no_rows(ngram: Pipeline) -> None:
    assert tensor_rows(ngram, []) == []

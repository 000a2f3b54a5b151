"""A rank's slice is the whole model's byte model at that tp, but for one row and a few scales."""

import pytest

from workbench.decode.bytes import step_bytes
from workbench.decode.precision import TensorClass, load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rank import first_layers, rank_slice
from workbench.decode.spec import MLA
from workbench.errors import InputError


@pytest.mark.parametrize(
    ("preset", "policy"),
    [
        ("glm-5.2", "fp8"),
        ("glm-5.2", "mxfp4-experts-fp8"),
        ("mimo-v2.5-pro", "mimo-release"),
        ("qwen3-30b-a3b", "bf16"),
    ],
)
@pytest.mark.parametrize("width", [1, 4])
def test_bytes_are_the_whole_model_s(preset: str, policy: str, width: int) -> None:
    spec, formats, tp = load_preset(preset), load_policy(policy), 4 if preset == "qwen3-30b-a3b" else 8
    whole = step_bytes(spec, formats, tp=tp, width=width, context=500)
    mine = step_bytes(rank_slice(spec, tp), formats, width=width, context=500)
    for one, all_ranks in zip(mine.rows, whole.rows, strict=True):
        if one.cls is TensorClass.EMBEDDING:  # a rank looks up the rows it holds, a slice all that it needs
            assert one.resident_bytes == all_ranks.resident_bytes
        elif one.cls is not TensorClass.NORM:  # sinks, one a head, are held whole in the model's count
            # One KV head of 192 numbers has two scales where eight share twelve; all else divides.
            part = 1e-4 if one.name == "k_proj, v_proj" else 1e-12
            assert one.read_bytes == pytest.approx(all_ranks.read_bytes, rel=part), one.name
            assert one.resident_bytes == pytest.approx(all_ranks.resident_bytes, rel=part), one.name
    assert mine.read_bytes == pytest.approx(whole.read_bytes, rel=1e-5)


def test_the_seed_s_figure() -> None:
    mine = step_bytes(rank_slice(load_preset("glm-5.2"), 8), load_policy("fp8"))
    assert mine.read_bytes == pytest.approx(6.65e9, rel=0.005)


def test_what_a_slice_is() -> None:
    glm = rank_slice(load_preset("glm-5.2"), 8)
    assert isinstance(glm.attention, MLA)
    assert (glm.attention.heads, glm.attention.q_lora, glm.vocab, glm.dense_inter) == (8, 2048, 19360, 1536)
    assert glm.moe is not None
    assert (glm.moe.experts, glm.moe.inter, glm.moe.shared) == (256, 256, 1)
    assert glm.max_positions == 2048  # what the indexer selects of: its choice is not run
    mimo = rank_slice(load_preset("mimo-v2.5-pro"), 8)
    assert mimo.attention.kind == "gqa"
    assert (mimo.attention.heads, mimo.attention.kv_heads) == (16, 1)
    assert (mimo.mtp, mimo.dflash) == (None, None)
    four = first_layers(glm, 4)
    assert four.attention.kind == "mla"
    assert four.attention.indexer is not None
    assert (four.layers, four.dense_first, four.attention.indexer.layers) == (4, 3, 3)
    assert rank_slice(glm, 1) is glm


@pytest.mark.parametrize(
    ("preset", "tp", "words"),
    [
        ("glm-5.2", 5, "does not divide dense_inter=12288"),
        ("gpt-oss-20b", 2, r"attention\.bias"),
        ("qwen3-next-80b-a3b", 2, "gated delta"),
        ("qwen3-30b-a3b", 3, "tp=3 does not divide"),
    ],
)
def test_what_does_not_divide_is_one_line(preset: str, tp: int, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        rank_slice(load_preset(preset), tp)
    assert preset in str(error.value)
    with pytest.raises(InputError, match="layers: 99 is not 1 to"):
        first_layers(load_preset(preset), 99)

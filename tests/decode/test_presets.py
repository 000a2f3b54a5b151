"""Shipped shapes load, say where they come from, and agree with the published counts."""

from pathlib import Path

import pytest

from workbench.decode.presets import expand_pattern, load_preset, parse_shape, preset_names
from workbench.decode.spec import GQA, MLA
from workbench.errors import InputError

# name: layers, layers with experts, sliding layers, linear layers
LAYERS = {
    "glm-5": (78, 75, 0, 0),
    "glm-5.2": (78, 75, 0, 0),
    "deepseek-v3": (61, 58, 0, 0),
    "deepseek-v3.2": (61, 58, 0, 0),
    "kimi-k2": (61, 60, 0, 0),
    "mimo-v2.5-pro": (70, 69, 60, 0),
    "mimo-v2-flash": (48, 47, 39, 0),
    "gpt-oss-120b": (36, 36, 18, 0),
    "gpt-oss-20b": (24, 24, 12, 0),
    "qwen3-30b-a3b": (48, 48, 0, 0),
    "qwen3-235b-a22b": (94, 94, 0, 0),
    "qwen3-next-80b-a3b": (48, 48, 0, 36),
    "qwen3-8b": (36, 0, 0, 0),
    "nano": (8, 8, 6, 0),
}


def test_every_shape_has_an_expectation() -> None:
    assert sorted(LAYERS) == preset_names()


@pytest.mark.parametrize("name", LAYERS)
def test_layer_counts(name: str) -> None:
    spec = load_preset(name)
    assert spec.name == name
    assert spec.source
    assert (spec.layers, spec.moe_layers, spec.mixers.count("sliding"), spec.mixers.count("linear")) == LAYERS[name]


def test_hybrid_patterns_put_the_full_layers_where_the_configs_do() -> None:
    def full(name: str) -> list[int]:
        return [layer for layer, mixer in enumerate(load_preset(name).mixers) if mixer == "full"]

    assert full("mimo-v2.5-pro") == [0, 7, 15, 23, 31, 39, 47, 55, 62, 69]
    assert full("mimo-v2-flash") == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert full("nano") == [3, 7]
    assert full("gpt-oss-20b") == list(range(1, 24, 2))


def test_attention_details() -> None:
    pro, glm = load_preset("mimo-v2.5-pro"), load_preset("glm-5.2")
    assert isinstance(pro.attention, GQA)
    assert not pro.attention.sinks
    assert pro.sliding is not None
    assert pro.sliding.sinks
    assert isinstance(glm.attention, MLA)
    assert glm.attention.indexer is not None
    assert glm.attention.indexer.layers == 21


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("full", ["full"]),
        ("full*2 sliding", ["full", "full", "sliding"]),
        ("(sliding*2 full)*2", ["sliding", "sliding", "full"] * 2),
        ("((full)*2 linear)*2", ["full", "full", "linear"] * 2),
        ("full(sliding)*2full", ["full", "sliding", "sliding", "full"]),
    ],
)
def test_expand_pattern(pattern: str, expected: list[str]) -> None:
    assert list(expand_pattern(pattern)) == expected


@pytest.mark.parametrize("pattern", ["(full", "full*0", "3*full", "full)*2", "(full*4096)*4096", 3, "full**2"])
def test_bad_patterns_are_refused(pattern: object) -> None:
    with pytest.raises(InputError, match="layer_pattern"):
        expand_pattern(pattern)


MINIMAL = 'name = "m"\nhidden = 8\nvocab = 16\nlayer_pattern = "full"\ndense_inter = 16\n'
GQA_TABLE = '[attention]\nkind = "gqa"\nheads = 2\nkv_heads = 1\nqk_dim = 4\nv_dim = 4\n'


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("hidden = [", "not valid TOML"),
        (MINIMAL.replace("hidden = 8", "hidden = -8") + GQA_TABLE, "hidden"),
        (MINIMAL + "colour = 3\n" + GQA_TABLE, "colour"),
        (MINIMAL.replace('"full"', '"fool"') + GQA_TABLE, "mixers.0"),
        (MINIMAL + 'mixers = ["full"]\n' + GQA_TABLE, "mixers"),
        (MINIMAL.replace("dense_inter = 16\n", "") + GQA_TABLE, "dense_inter"),
    ],
)
def test_a_bad_file_gives_one_line_that_names_file_and_field(text: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_preset(path)
    assert "model.toml" in str(caught.value)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_own_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(MINIMAL + GQA_TABLE)
    assert load_preset(path) == parse_shape(MINIMAL + GQA_TABLE, origin="text")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"qwen3-8b.*\.toml"):
        load_preset("gpt-5")


def test_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"absent\.toml"):
        load_preset("absent.toml")

"""config.json of an engine from a shape preset."""

import json
from pathlib import Path

import pytest

from workbench.decode.presets import load_preset
from workbench.engines.hf_config import dflash_config, hf_config, write_config
from workbench.errors import InputError


def test_gpt_oss_keeps_its_layer_types_and_its_mxfp4_experts(tmp_path: Path) -> None:
    config = hf_config(load_preset("gpt-oss-20b"))
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 24
    assert config["layer_types"][:2] == ["sliding_attention", "full_attention"]
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert (config["hidden_size"], config["vocab_size"], config["num_local_experts"]) == (2880, 201088, 32)
    assert json.loads((write_config(tmp_path / "m", config) / "config.json").read_text()) == config


def test_qwen3_dense_and_moe() -> None:
    moe = hf_config(load_preset("qwen3-30b-a3b"), layers=4)
    assert (moe["num_hidden_layers"], moe["num_experts"], moe["moe_intermediate_size"]) == (4, 128, 768)
    dense = hf_config(load_preset("qwen3-8b"))
    assert (dense["architectures"], dense["intermediate_size"]) == (["Qwen3ForCausalLM"], 12288)
    draft = dflash_config(load_preset("qwen3-30b-a3b"), block=8, taps=(1, 23, 45))
    assert draft["dflash_config"] == {"mask_token_id": 151935, "target_layer_ids": [1, 23, 45], "block_size": 8}


@pytest.mark.parametrize("name", ["glm-5.2", "mimo-v2.5-pro", "qwen3-next-80b-a3b"])
def test_other_architectures_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"no config\.json can be written for .*; give model_path instead"):
        hf_config(load_preset(name))

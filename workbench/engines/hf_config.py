"""A model's shape as the ``config.json`` that engines load: enough for dummy weights, no tokenizer, no checkpoint."""

import json
from pathlib import Path
from typing import Any

from workbench.decode.spec import GQA, ModelSpec
from workbench.errors import InputError

_KEPT_BF16 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def hf_config(spec: ModelSpec, *, layers: int | None = None) -> dict[str, Any]:
    """Return ``config.json`` of ``spec`` in the Hugging Face terms, cut to its first ``layers`` if given.

    Known: gpt-oss (MXFP4 experts), Qwen3-MoE and dense Qwen3. Raises InputError for any other architecture.
    """
    shape = spec.attention
    count = spec.layers if layers is None else min(layers, spec.layers)
    if not isinstance(shape, GQA):
        raise InputError(f"engine: no config.json can be written for {spec.name!r}", hint="give model_path instead")
    common = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.qk_dim,
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": count,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied_head,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "attention_bias": shape.bias,
        "attention_dropout": 0.0,
        "vocab_size": spec.vocab,
    }
    if spec.name.startswith("gpt-oss"):
        return common | _gpt_oss(spec, count)
    if spec.name.startswith("qwen3-") and spec.linear is None:
        return common | (_qwen3_moe(spec, count) if spec.moe else _qwen3(spec))
    raise InputError(f"engine: no config.json can be written for {spec.name!r}", hint="give model_path instead")


def dflash_config(spec: ModelSpec, *, block: int, taps: tuple[int, ...], layers: int = 5) -> dict[str, Any]:
    """Return ``config.json`` of a DFlash drafter for ``spec``: a Qwen3 stack of ``layers``, ``block`` tokens a pass.

    The shape is that of published drafters (arXiv 2602.06036: five layers, the target's widths); ``taps`` are target
    layers, counted from 0.
    """
    shape = spec.attention
    if not isinstance(shape, GQA):
        raise InputError(f"engine: no DFlash config can be written for {spec.name!r}", hint="give a draft path instead")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": shape.qk_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "intermediate_size": 3 * spec.hidden,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": spec.vocab,
        "block_size": block,
        "num_target_layers": spec.layers,
        "dflash_config": {"mask_token_id": spec.vocab - 1, "target_layer_ids": list(taps), "block_size": block},
    }


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write ``config`` as ``folder``/config.json and return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def _gpt_oss(spec: ModelSpec, layers: int) -> dict[str, Any]:
    assert spec.moe is not None  # noqa: S101 - every gpt-oss has experts
    names = {"sliding": "sliding_attention", "full": "full_attention"}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "experts_per_token": spec.moe.top_k,
        "num_experts_per_tok": spec.moe.top_k,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "intermediate_size": spec.moe.inter,
        "swiglu_limit": 7.0,
        "sliding_window": spec.window,
        "layer_types": [names[mixer] for mixer in spec.mixers[:layers]],
        "num_local_experts": spec.moe.experts,
        "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _KEPT_BF16},
    }


def _qwen3_moe(spec: ModelSpec, layers: int) -> dict[str, Any]:
    assert spec.moe is not None  # noqa: S101 - checked by the caller
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "intermediate_size": 3 * spec.hidden,
        "max_window_layers": layers,
        "mlp_only_layers": [],
        "moe_intermediate_size": spec.moe.inter,
        "norm_topk_prob": True,
        "num_experts": spec.moe.experts,
        "num_experts_per_tok": spec.moe.top_k,
        "output_router_logits": False,
        "use_sliding_window": False,
    }


def _qwen3(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "intermediate_size": spec.dense_inter,
        "use_sliding_window": False,
    }

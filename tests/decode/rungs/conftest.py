"""Kernel rungs run on the GPU where there is one, else through Triton's interpreter on CPU tensors."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from workbench.decode.model import Target
from workbench.decode.precision import TensorClass, load_policy
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.store import Held
from workbench.decode.spec import ModelSpec

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when a kernel is decorated, so before the first kernel import: none of the above
    )
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

GPT_OSS: dict[str, object] = {
    "name": "tiny-oss",
    "hidden": 64,
    "vocab": 80,
    "mixers": ("sliding", "full"),
    "window": 6,
    "attention": {
        "kind": "gqa",
        "heads": 4,
        "kv_heads": 2,
        "qk_dim": 16,
        "v_dim": 16,
        "bias": True,
        "sinks": True,
    },
    "moe": {"experts": 6, "top_k": 2, "inter": 64, "bias": True, "activation": "clamped-swiglu"},
    "norm_eps": 1e-5,
    "max_positions": 128,
    "mtp": {"modules": 1, "dense_inter": 64},
    "dflash": {"layers": 1, "block": 4, "window": 6, "inter": 64, "taps": (1,)},
}
QWEN: dict[str, object] = {
    "name": "tiny-qwen",
    "hidden": 64,
    "vocab": 48,
    "mixers": ("full", "full"),
    "attention": {"kind": "gqa", "heads": 4, "kv_heads": 1, "qk_dim": 32, "v_dim": 16, "qk_norm": True},
    "moe": {"experts": 8, "top_k": 3, "inter": 64},
    "dense_first": 1,
    "dense_inter": 64,
    "tied_head": True,
    "max_positions": 128,
    "dflash": {"layers": 1, "block": 4, "window": 6, "inter": 64, "qk_dim": 32, "taps": (0, 1)},
}
GLM: dict[str, object] = {
    "name": "tiny-glm",
    "hidden": 128,
    "vocab": 48,
    "mixers": ("full", "full", "full"),
    "attention": {
        "kind": "mla",
        "heads": 3,
        "q_lora": 128,
        "kv_lora": 32,
        "nope_dim": 48,
        "rope_dim": 16,
        "v_dim": 128,
        "indexer": {"heads": 2, "dim": 32, "top_k": 64, "layers": 2, "first": 1, "every": 2},
    },
    "dense_first": 1,
    "dense_inter": 128,
    "moe": {"experts": 6, "top_k": 2, "inter": 128, "shared": 1, "score": "sigmoid", "factor": 2.5},
    "norm_eps": 1e-5,
    "max_positions": 64,
}
MIMO: dict[str, object] = {
    "name": "tiny-mimo",
    "hidden": 128,
    "vocab": 48,
    "mixers": ("full", "sliding"),
    "window": 6,
    "rope_theta": 5e6,
    "attention": {
        "kind": "gqa", "heads": 2, "kv_heads": 1, "qk_dim": 192, "v_dim": 32, "rope_dim": 64, "value_scale": 0.612,
    },
    "sliding": {
        "kind": "gqa", "heads": 2, "kv_heads": 1, "qk_dim": 192, "v_dim": 32, "rope_dim": 64, "value_scale": 0.612,
        "rope_theta": 1e4, "sinks": True,
    },
    "dense_first": 1,
    "dense_inter": 128,
    "moe": {"experts": 8, "top_k": 3, "inter": 128, "score": "sigmoid"},
    "max_positions": 128,
}  # fmt: skip
FAMILIES = {"gpt-oss": GPT_OSS, "qwen": QWEN, "glm": GLM, "mimo": MIMO}


@dataclass(frozen=True)
class Models:
    """One model in three forms that hold the same numbers: eager float32, expanded bfloat16, packed MXFP4 or FP8."""

    spec: ModelSpec
    reference: Target
    expanded: Held
    packed: Held


def _vary(target: Target) -> Target:
    """Give norms and sinks values that matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif name.endswith(("sinks", "norm.bias", "correction")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return target


@cache
def _models(family: str, policy: str) -> Models:
    spec = ModelSpec.model_validate(FAMILIES[family])

    def build(packed: bool) -> Held:
        target, experts = random_model(
            spec, load_policy(policy), seed=3, device=DEVICE, dtype=torch.bfloat16, packed=packed
        )
        return Held(_vary(target), None, experts)

    expanded = build(False)
    narrow = load_policy(policy).of(TensorClass.ROUTED_EXPERTS).name in ("mxfp4", "fp8")
    return Models(spec, build(False).target.float(), expanded, build(True) if narrow else expanded)


@pytest.fixture(scope="session")
def models() -> Callable[..., Models]:
    """``models(family, policy="mxfp4-experts")``: a tiny gpt-oss, Qwen3, GLM-5.2 or MiMo shape, built once."""

    def get(family: str, policy: str = "mxfp4-experts") -> Models:
        return _models(family, policy)

    return get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU, with the reason."""
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch.cuda finds none"))

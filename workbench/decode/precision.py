"""Storage formats with their exact bytes, and named policies that say which tensor class is kept in which format.

Bytes are what a checkpoint or a GPU holds: payload plus scales. Layouts that kernels repack weights into (Marlin,
swizzles) keep the byte count and are not modelled. GB is 1e9 bytes everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil
from types import MappingProxyType

from workbench.errors import InputError

AS_SHIPPED = "as-shipped"


class TensorClass(StrEnum):
    """Kinds of tensors that a policy can tell apart. The values are the names in policies, reports and bundles."""

    EMBEDDING = "embedding"
    QKV = "qkv"  # GQA: query, key and value projections
    QKV_A = "qkv_a"  # MLA: down-projections to the query rank and to the latent
    Q_B = "q_b"  # MLA: up-projection of the query
    KV_B = "kv_b"  # MLA: up-projection of the latent, absorbed at decode
    O_PROJ = "o_proj"
    INDEXER = "indexer"  # DSA: query side
    INDEXER_KEY = "indexer_key"  # DSA: key and head-weight projections
    LINEAR_IN = "linear_in"  # gated delta: inputs, gates and convolution
    LINEAR_OUT = "linear_out"
    ROUTER = "router"
    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    DENSE_FFN = "dense_ffn"
    NORM = "norm"  # norms, biases and attention sinks: vectors
    HEAD = "head"
    MTP_PROJ = "mtp_proj"  # joins hidden state and embedding in an MTP module
    DFLASH_PROJ = "dflash_proj"  # projects the tapped features of the target
    DFLASH = "dflash"  # matrices of the drafter's layers
    KV_CACHE = "kv_cache"
    LINEAR_STATE = "linear_state"  # recurrent state of the gated delta layers


# Attention output is what FP4 hurts first; the MiMo, gpt-oss and NVIDIA releases all quantise experts only.
FP4_CLASSES = frozenset({TensorClass.ROUTED_EXPERTS, TensorClass.SHARED_EXPERTS})
UNBLOCKED_CLASSES = frozenset({TensorClass.KV_CACHE, TensorClass.LINEAR_STATE, TensorClass.NORM})


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored. ``block`` is (outputs, inputs) sharing one scale of ``scale_bytes``."""

    name: str
    bits: int
    block: tuple[int, int] | None = None
    scale_bytes: int = 0
    tensor_bytes: int = 0
    note: str = ""

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of one stored matrix, scales included. Partial blocks have a scale of their own."""
        payload = ceil(outputs * inputs * self.bits / 8)
        if self.block is None:
            return payload + self.tensor_bytes
        scales = ceil(outputs / self.block[0]) * ceil(inputs / self.block[1])
        return payload + scales * self.scale_bytes + self.tensor_bytes

    @property
    def bits_per_parameter(self) -> float:
        """Payload and block scales, for a matrix made of whole blocks; the tensor's own scale is left out."""
        return self.bits + (8 * self.scale_bytes / (self.block[0] * self.block[1]) if self.block else 0)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Format("fp32", 32),
            Format("bf16", 16),
            Format("fp8", 8, (128, 128), 4, note="e4m3, FP32 scale per 128x128 (DeepSeek-V3)"),
            Format("fp8-tensor", 8, tensor_bytes=4, note="e4m3, one FP32 scale a tensor"),
            Format("mxfp4", 4, (1, 32), 1, note="E2M1, E8M0 scale per 32 inputs (OCP MX 1.0)"),
            Format("nvfp4", 4, (1, 16), 1, 4, note="E2M1, E4M3 scale per 16 inputs, FP32 scale a tensor"),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Policy:
    """Which format each tensor class is kept in; classes not named are BF16 (``default``).

    A policy that puts FP4 outside the experts is refused: attention with ``o_proj``, norms, embeddings, router and
    head stay at 8 bits or more.
    """

    name: str
    formats: Mapping[TensorClass, str] = field(default_factory=dict)
    default: str = "bf16"
    note: str = ""

    def __post_init__(self) -> None:
        for cls in TensorClass:
            chosen = self.formats.get(cls, self.default)
            if chosen not in FORMATS:
                raise InputError(
                    f"precision {self.name!r}: {cls}: format {chosen!r} is not known", hint=f"use one of {_listed()}"
                )
            stored = FORMATS[chosen]
            if stored.bits < 8 and cls not in FP4_CLASSES:
                raise InputError(
                    f"precision {self.name!r}: {cls} cannot be {chosen}",
                    hint="only routed and shared experts may be FP4",
                )
            if stored.block is not None and cls in UNBLOCKED_CLASSES:
                raise InputError(
                    f"precision {self.name!r}: {cls} cannot be {chosen}, which needs blocks",
                    hint="use fp32, bf16 or fp8-tensor",
                )

    def of(self, cls: TensorClass) -> Format:
        """Return the format of a tensor class."""
        return FORMATS[self.formats.get(cls, self.default)]

    def with_formats(self, **formats: str) -> "Policy":
        """Return the same policy with some classes changed, e.g. ``with_formats(router="fp32")``."""
        try:
            changes = {TensorClass(cls): chosen for cls, chosen in formats.items()}
        except ValueError as error:
            raise InputError(f"precision {self.name!r}: {error}", hint=f"classes: {', '.join(TensorClass)}") from error
        name = "+".join([self.name, *(f"{cls}={chosen}" for cls, chosen in formats.items())])
        return replace(self, name=name, formats={**self.formats, **changes})


def _listed() -> str:
    return ", ".join(FORMATS)


_C = TensorClass
_PROJECTIONS = (_C.QKV, _C.QKV_A, _C.Q_B, _C.KV_B, _C.INDEXER, _C.INDEXER_KEY, _C.LINEAR_IN, _C.LINEAR_OUT)
_FP8 = dict.fromkeys((*_PROJECTIONS, _C.O_PROJ, _C.ROUTED_EXPERTS, _C.SHARED_EXPERTS, _C.DENSE_FFN), "fp8")
_STATE = {_C.LINEAR_STATE: "fp32"}  # engines keep the recurrent state in FP32 whatever the weights are

_POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Policy("fp32", default="fp32", note="everything FP32, as the CPU pipeline computes"),
            Policy("bf16", _STATE, note="everything BF16"),
            Policy("fp8", {**_STATE, **_FP8}, note="FP8 128x128; router, head, embedding and norms BF16"),
            Policy(
                "fp8-o-bf16",
                {**_STATE, **_FP8, _C.O_PROJ: "bf16"},
                note="FP8 128x128 with every o_proj BF16, as MiMo-V2.5-Pro's FP8 release",
            ),
            Policy("mxfp4-experts", {**_STATE, _C.ROUTED_EXPERTS: "mxfp4"}, note="routed experts MXFP4, the rest BF16"),
            Policy(
                "mxfp4-experts-fp8",
                {**_STATE, **_FP8, _C.ROUTED_EXPERTS: "mxfp4"},
                note="routed experts MXFP4, the rest as fp8",
            ),
            Policy(
                "nvfp4-experts",
                {**_STATE, _C.ROUTED_EXPERTS: "nvfp4", _C.KV_CACHE: "fp8-tensor"},
                note="routed experts NVFP4, KV cache FP8, the rest BF16, as NVIDIA's GLM-5.2 checkpoint",
            ),
            Policy(
                "nvfp4-experts-fp8",
                {**_STATE, **_FP8, _C.ROUTED_EXPERTS: "nvfp4"},
                note="routed experts NVFP4, the rest as fp8",
            ),
            Policy(
                "mimo-release",
                {**_STATE, **_FP8, _C.ROUTED_EXPERTS: "mxfp4", _C.O_PROJ: "bf16"},
                note="MiMo-V2.5-Pro-FP4-DFlash: experts MXFP4, qkv and dense FFN FP8, o_proj, router and head BF16",
            ),
        )
    }
)


def policy_names() -> list[str]:
    """Return the names that :func:`load_policy` takes, ``as-shipped`` first."""
    return [AS_SHIPPED, *_POLICIES]


def load_policy(name: str, *, shipped: str = "bf16") -> Policy:
    """Return the policy called ``name``; ``as-shipped`` stands for ``shipped`` (a model's ``ModelSpec.shipped``)."""
    wanted = shipped if name == AS_SHIPPED else name
    if wanted not in _POLICIES:
        raise InputError(f"precision {wanted!r} is not known", hint=f"use one of {', '.join(policy_names())}")
    return _POLICIES[wanted]

"""What each rung of the ladder is: which product runs where, in which format, cut how."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from workbench.decode.precision import Policy, TensorClass
from workbench.scenario import Rung

DenseForm = Literal["bf16", "fp8-naive", "fp8-fused"]

FP8_CLASSES = frozenset({TensorClass.QKV, TensorClass.O_PROJ})
"""What the livequant rungs multiply in block FP8: the attention projections. Head and router stay bfloat16."""

MAX_WIDTH = 16
"""Most tokens one step of the kernel rungs scores."""


@dataclass(frozen=True, slots=True)
class RungPlan:
    """One engine configuration.

    ``graph``: shapes are fixed and the step is a CUDA graph. ``kernels``: norms, rotary embedding, attention, router,
    experts and head are the Triton kernels of workbench/kernels. ``packed``: routed experts stay in MXFP4; otherwise
    they are expanded to bfloat16 at load. ``dense``: how the attention projections multiply. ``split``: Split-K where
    a product has fewer programs than the card can hold. ``persistent``: one launch a step, of one token.
    """

    graph: bool = True
    kernels: bool = True
    packed: bool = False
    dense: DenseForm = "bf16"
    split: bool = False
    persistent: bool = False

    @property
    def needs_gpu(self) -> bool:
        """Whether a scenario can only run it on an NVIDIA GPU."""
        return self.graph or self.persistent

    def held(self, stored: Policy, base: str) -> Policy:
        """Return in which format each tensor class is held and read, kept as ``stored`` on disk.

        ``base`` (``bf16`` or ``fp32``) is what the engine computes in and expands everything else to.
        """
        formats: dict[TensorClass, str] = {}
        if self.packed:
            formats[TensorClass.ROUTED_EXPERTS] = stored.of(TensorClass.ROUTED_EXPERTS).name
        if self.dense != "bf16":
            formats |= {cls: stored.of(cls).name for cls in FP8_CLASSES}
        return Policy(f"{stored.name} as held", formats, default=base)


PLANS: Mapping[Rung, RungPlan] = MappingProxyType(
    {
        "eager": RungPlan(graph=False, kernels=False),
        "graph": RungPlan(kernels=False),
        "fused": RungPlan(),
        "fp4": RungPlan(packed=True),
        "splitk": RungPlan(packed=True, split=True),
        "livequant-naive": RungPlan(packed=True, split=True, dense="fp8-naive"),
        "livequant-fused": RungPlan(packed=True, split=True, dense="fp8-fused"),
        "persistent": RungPlan(graph=False, packed=True, persistent=True),
    }
)
"""The ladder, from the slowest rung to the fastest."""

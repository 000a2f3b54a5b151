"""What each rung of the ladder is: which product runs where, in which format, cut how."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from workbench.decode.precision import Policy, TensorClass
from workbench.decode.spec import MLA, ModelSpec
from workbench.scenario import Rung, Variant

DenseForm = Literal["bf16", "fp8-naive", "fp8-fused", "fp8-pq", "fp8-weights"]

LIVE_CLASSES = frozenset(
    {
        TensorClass.QKV,
        TensorClass.QKV_A,
        TensorClass.Q_B,
        TensorClass.O_PROJ,
        TensorClass.INDEXER,
        TensorClass.INDEXER_KEY,
        TensorClass.SHARED_EXPERTS,
        TensorClass.DENSE_FFN,
    }
)
"""What FP8 rungs hold and multiply in block FP8 where the policy stores it so. Head and router stay bfloat16, and the
halves of MLA's ``kv_b``, which are absorbed."""

ATTENTION_PROJECTIONS = frozenset({TensorClass.QKV, TensorClass.QKV_A, TensorClass.Q_B, TensorClass.O_PROJ})
"""The least that a livequant rung multiplies in FP8."""

MAX_WIDTH = 16
"""Most tokens one step of the kernel rungs scores."""


@dataclass(frozen=True, slots=True)
class RungPlan:
    """One engine configuration.

    ``graph``: shapes are fixed and the step is a CUDA graph. ``kernels``: norms, rotary embedding, attention, router,
    experts and head are the Triton kernels of workbench/kernels. ``packed``: routed experts stay as they are stored
    (MXFP4, or FP8 where ``experts`` allows it); otherwise they are expanded to bfloat16 at load. ``dense``: how the
    projections multiply; ``fp8-weights``: weights stay block FP8, activations have 16 bits. ``split``:
    Split-K where a product has fewer programs than the card can hold. ``persistent``: one launch a step. ``experts``:
    stored formats that a packed rung takes.
    """

    graph: bool = True
    kernels: bool = True
    packed: bool = False
    dense: DenseForm = "bf16"
    split: bool = False
    persistent: bool = False
    experts: tuple[str, ...] = ("mxfp4", "fp8")

    @property
    def needs_gpu(self) -> bool:
        """Whether a scenario can only run it on an NVIDIA GPU."""
        return self.graph or self.persistent

    @property
    def plain(self) -> bool:
        """Whether the forward is plain torch."""
        return not self.kernels and not self.persistent

    def fp8(self, stored: Policy) -> frozenset[TensorClass]:
        """Return the classes that this rung holds and reads in block FP8, kept as ``stored`` on disk."""
        if self.dense == "bf16":
            return frozenset()
        return frozenset(cls for cls in LIVE_CLASSES if stored.of(cls).name == "fp8")

    def live(self, stored: Policy) -> frozenset[TensorClass]:
        """Return those of :meth:`fp8` whose activations are quantised too, as they are multiplied."""
        return frozenset() if self.dense == "fp8-weights" else self.fp8(stored)

    def held(self, stored: Policy, base: str, *, packed: bool | None = None) -> Policy:
        """Return in which format each tensor class is held and read, kept as ``stored`` on disk.

        ``base`` (``bf16`` or ``fp32``) is what the engine computes in and expands everything else to. ``packed``:
        whether routed experts stay as stored (default: what the rung does by itself).
        """
        formats: dict[TensorClass, str] = {}
        if self.packed if packed is None else packed:
            formats[TensorClass.ROUTED_EXPERTS] = stored.of(TensorClass.ROUTED_EXPERTS).name
        formats |= dict.fromkeys(self.fp8(stored), "fp8")
        return Policy(f"{stored.name} as held", formats, default=base)


PLANS: Mapping[Rung, RungPlan] = MappingProxyType(
    {
        "eager": RungPlan(graph=False, kernels=False),
        "graph": RungPlan(kernels=False),
        "fused": RungPlan(),
        "fp4": RungPlan(packed=True, experts=("mxfp4",)),
        "splitk": RungPlan(packed=True, split=True),
        "livequant-naive": RungPlan(packed=True, split=True, dense="fp8-naive"),
        "livequant-fused": RungPlan(packed=True, split=True, dense="fp8-fused"),
        "livequant-pq": RungPlan(packed=True, split=True, dense="fp8-pq"),
        "persistent": RungPlan(graph=False, packed=True, persistent=True, experts=("mxfp4",)),
    }
)
"""The ladder, from the slowest rung to the fastest."""


def plan_of(rung: Rung, spec: ModelSpec) -> RungPlan:
    """Return what ``rung`` is for ``spec``: the persistent rung of MLA models keeps projections in block FP8."""
    plan = PLANS[rung]
    return replace(plan, dense="fp8-weights") if plan.persistent and isinstance(spec.attention, MLA) else plan


def stays_packed(variant: Variant) -> bool:
    """Whether routed experts stay in their stored format: on packed rungs, and where only chosen ones are expanded."""
    return PLANS[variant.engine.rung].packed or variant.precision.expand == "step"

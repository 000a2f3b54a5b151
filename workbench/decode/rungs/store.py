"""The weights of a run: every distinct set is built once and shared by the variants that hold it alike."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from workbench.decode.experts import Experts
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.mxfp4 import quantize
from workbench.decode.precision import load_policy
from workbench.decode.rungs.merging import merge_projections
from workbench.decode.rungs.packed import PackedExperts, drop_experts, expert_layers, pack
from workbench.decode.rungs.random_model import HeldExperts, random_model, round_weights
from workbench.decode.spec import ModelSpec
from workbench.decode.weights import load_target, shipped_folder
from workbench.errors import InputError
from workbench.scenario import Variant

if TYPE_CHECKING:
    from workbench.decode.rungs.persistent_latent import Relaid
    from workbench.decode.rungs.products import Blocks


@dataclass(frozen=True, slots=True)
class Held:
    """One set of weights. ``packed``: the layers' experts as stored; then ``target``'s own have no storage.

    ``blocks``: block FP8 forms of its matrices, ``relaid``: all weights as the persistent step of latent attention
    reads them; both are made by the first rung that needs them and shared by the others.
    """

    target: Target
    mtp: MtpHead | None
    packed: tuple[HeldExperts, ...]
    blocks: "Blocks" = field(default_factory=dict)
    relaid: "Relaid" = field(default_factory=dict)


class WeightStore:
    """Builds weights on first use. Variants share tensors, so nothing may write to them."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], Held] = {}

    def get(self, variant: Variant, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, packed: bool) -> Held:
        """Return the weights of ``variant``; raises InputError where no such weights exist."""
        policy = load_policy(variant.precision.policy, shipped=spec.shipped)
        key = (spec, variant.model.weights, variant.model.seed, policy.name, str(device), dtype, packed)
        if key not in self._held:
            if variant.model.weights == "random":
                seed = variant.model.seed
                target, experts = random_model(spec, policy, seed=seed, device=device, dtype=dtype, packed=packed)
                self._held[key] = Held(target, None, experts)
            else:
                self._held[key] = _trained(variant, spec, device, dtype, packed=packed)
        return self._held[key]


def _trained(variant: Variant, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, packed: bool) -> Held:
    where = f"variant {variant.name!r}"
    policy = load_policy(variant.precision.policy, shipped=spec.shipped)
    if spec.name != "nano":
        raise InputError(f"{where}: model.weights: only 'nano' ships trained weights", hint="use weights = 'random'")
    if policy.name not in (spec.shipped, f"{spec.shipped}-fp8"):
        raise InputError(
            f"{where}: precision.policy: the trained nano is stored as {spec.shipped!r}",
            hint=f"its attention can be rounded: {spec.shipped}-fp8",
        )
    target, mtp = load_target(spec, shipped_folder(), device=device, dtype=dtype)
    round_weights(target, policy)
    merge_projections(target)
    experts = tuple(_repack(ffn) for _, ffn in expert_layers(target)) if packed else ()
    return Held(target, mtp, experts)


def _repack(ffn: Experts) -> PackedExperts:
    """Pack experts that were expanded from MXFP4: bfloat16 holds such values exactly, and so does a second packing."""
    ffn.narrow = packed = pack(quantize(ffn.gate_up.detach()), quantize(ffn.down.detach()), ffn)
    drop_experts(ffn)
    return packed

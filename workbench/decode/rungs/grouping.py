"""How the plain-torch rungs multiply by the chosen experts: decided once, when a rung is built."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from workbench.decode.experts import Experts
from workbench.decode.grouped import ALIGNMENT, MOST_EXPERTS, grouped_linear, sort_by_expert
from workbench.decode.model import Target
from workbench.decode.rungs.packed import expert_layers
from workbench.decode.rungs.twin import twin

CAPABILITIES = (9, 10)
"""Major compute capabilities with a kernel of torch's own for the grouped product (torch 2.11 and 2.13,
aten/src/ATen/native/cuda/GroupedBlas.cpp). Elsewhere torch fetches the offsets and multiplies group by group: no graph
can capture that."""


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What a rung does with the experts that a step chooses, and ``why`` it is not the grouped product.

    ``grouped``: one grouped product a projection; a step reads each distinct expert once. ``gathered``: on a GPU, their
    weights are copied, once for each token that chose them, and the copy is multiplied. ``expanded``: as they are
    stored, and a wider copy of the chosen ones is made in every step. ``looped``: on the CPU, one product an expert.
    """

    name: Literal["grouped", "gathered", "expanded", "looped"]
    why: str = ""

    def __str__(self) -> str:
        """Name and reason, as a bundle's ``env`` table holds them."""
        return f"{self.name}: {self.why}" if self.why else self.name


def with_grouped_experts(target: Target) -> tuple[Target, ExpertForm | None]:
    """Return a twin of ``target`` whose experts run as grouped products, or ``target`` itself where they cannot.

    No weight is copied or moved. The form is None where the model has no routed experts.
    """
    layers = [ffn for _, ffn in expert_layers(target)]
    if not layers:
        return target, None
    if layers[0].narrow is not None:
        return target, ExpertForm("expanded", "they stay as stored")
    why = refusal(layers[0], target.device, target.dtype)
    if why:
        return target, ExpertForm("looped" if target.device.type == "cpu" else "gathered", why)
    return group(target), ExpertForm("grouped")


def group(target: Target) -> Target:
    """Return a twin of ``target`` whose experts run as grouped products, whether the device is made for it or not."""
    other = twin(target)
    for _, ffn in expert_layers(other):
        ffn.groups = torch.arange(ffn.shape.experts, device=target.device)
    return other


def refusal(ffn: Experts, device: torch.device, dtype: torch.dtype) -> str:
    """Return why ``ffn`` cannot run as a grouped product on ``device``; empty where it can: then it has been tried."""
    if device.type != "cuda":
        return "the grouped product is for GPUs"
    if dtype != torch.bfloat16:
        return f"the grouped product is for bfloat16, the weights are {dtype}"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip or major not in CAPABILITIES:
        return f"torch has no kernel for the grouped product on compute capability {major}.{minor}"
    experts, _, hidden = ffn.gate_up.shape
    if experts > MOST_EXPERTS or hidden % ALIGNMENT or ffn.shape.inter % ALIGNMENT:
        return (
            f"{experts} experts of {hidden} x {ffn.shape.inter}: the grouped product takes {MOST_EXPERTS} of sizes "
            f"that {ALIGNMENT} divides"
        )
    return _trial(ffn)


@torch.inference_mode()
def _trial(ffn: Experts) -> str:
    """Run both products of one token and expert; return torch's complaint, if any."""
    device = ffn.gate_up.device
    choice = torch.zeros(1, 1, dtype=torch.int64, device=device)
    groups = sort_by_expert(choice, torch.arange(ffn.shape.experts, device=device))
    try:
        for weight in (ffn.gate_up, ffn.down):
            grouped_linear(weight.new_zeros(1, weight.shape[-1]), weight, None, groups)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"torch refuses the grouped product: {(str(error).splitlines() or [''])[0][:200]}"
    return ""

"""The eager reference of the livequant rungs: the same rounding of activations, in plain torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.experts import Experts
from workbench.decode.fp8 import BLOCK, fake_quantize_groups
from workbench.decode.model import Target
from workbench.decode.precision import TensorClass
from workbench.decode.rungs.plan import ATTENTION_PROJECTIONS
from workbench.decode.rungs.random_model import matrix_class
from workbench.decode.rungs.twin import twin


class LiveQuantLinear(nn.Linear):
    """A linear layer whose input is rounded to FP8 in groups of 128 columns, the last one padded with zeros."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the rounded input."""
        columns = input.shape[-1]
        rounded = fake_quantize_groups(F.pad(input, (0, -columns % BLOCK)), BLOCK)[..., :columns]
        return super().forward(rounded)


def live_quant_twin(target: Target, classes: frozenset[TensorClass] = ATTENTION_PROJECTIONS) -> Target:
    """Return a twin of ``target`` whose products of ``classes`` round their inputs; its weights must be FP8 already."""
    other = twin(target)
    for name, module in list(other.named_modules()):
        if isinstance(module, nn.Linear) and matrix_class(f"{name}.weight") in classes:
            path, _, leaf = name.rpartition(".")
            setattr(other.get_submodule(path), leaf, _rounding(module))
    return other


def fp8_experts_twin(target: Target) -> Target:
    """Return a twin whose routed experts round what they multiply to FP8 by groups of 128, as the FP8 kernels do."""
    other = twin(target)
    for module in other.modules():
        if isinstance(module, Experts):
            module.quantize_activations, module.activation_group = True, BLOCK
    return other


def _rounding(part: nn.Linear) -> LiveQuantLinear:
    with torch.device("meta"):
        layer = LiveQuantLinear(part.in_features, part.out_features, bias=part.bias is not None)
    layer.weight, layer.bias = part.weight, part.bias
    return layer

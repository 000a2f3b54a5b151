"""The eager reference of the livequant rungs: the same rounding of activations, in plain torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.decode.attention import Attention
from workbench.decode.fp8 import BLOCK, fake_quantize_groups
from workbench.decode.model import Target
from workbench.decode.rungs.twin import twin


class LiveQuantLinear(nn.Linear):
    """A linear layer whose input is rounded to FP8 in groups of 128 columns, the last one padded with zeros."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the rounded input."""
        columns = input.shape[-1]
        rounded = fake_quantize_groups(F.pad(input, (0, -columns % BLOCK)), BLOCK)[..., :columns]
        return super().forward(rounded)


def live_quant_twin(target: Target) -> Target:
    """Return a twin of ``target`` whose attention projections round their inputs; its weights must be FP8 already."""
    other = twin(target)
    for module in other.modules():
        if isinstance(module, Attention):
            for name in ("q", "k", "v", "o"):
                setattr(module, name, _rounding(getattr(module, name)))
    return other


def _rounding(part: nn.Linear) -> LiveQuantLinear:
    with torch.device("meta"):
        layer = LiveQuantLinear(part.in_features, part.out_features, bias=part.bias is not None)
    layer.weight, layer.bias = part.weight, part.bias
    return layer

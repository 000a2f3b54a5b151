"""A second model over the same weights: its modules can be changed without touching the first one."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from workbench.decode.experts import Experts
from workbench.decode.model import Block, Target
from workbench.decode.mxfp4 import fake_quantize
from workbench.errors import InputError

Module = TypeVar("Module", bound=nn.Module)


def twin(module: Module) -> Module:
    """Return a copy of ``module`` and everything below it that holds the same parameter tensors."""
    other = copy.copy(module)
    other._parameters = dict(module._parameters)
    other._buffers = dict(module._buffers)
    other._modules = {name: None if child is None else twin(child) for name, child in module._modules.items()}
    return other


def shift_taps(target: Target) -> Target:
    """Return a twin whose drafter features come from one layer too early (one too late where layer 0 is tapped).

    The ``tap-off-by-one`` fault: vllm#42704 lost half its acceptance to such an offset. The target's own output is
    untouched. Raises InputError where both the first and the last layer are tapped.
    """
    step = -1 if min(target.taps) > 0 else 1
    if max(target.taps) + step >= target.spec.layers:
        raise InputError(f"{target.spec.name}: dflash.taps: the first and the last layer are tapped, none can shift")
    other = twin(target)
    other.taps = tuple(layer + step for layer in target.taps)
    return other


def unshare_head(target: Target, seed: int = 46435) -> Target:
    """Return a twin with a head of its own, random, of the true head's size, for the drafter to read.

    The ``unshared-head`` fault: vllm#46435 drafted through a head that was not the target's.
    """
    other = twin(target)
    weight = target.head_weight
    generator = torch.Generator(device=weight.device).manual_seed(seed)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    drawn = torch.empty_like(weight).normal_(generator=generator).mul_(weight.shape[1] ** -0.5)
    head.weight = nn.Parameter(drawn, requires_grad=False)
    other.head = head
    return other


def narrow_activations(target: Target) -> Target:
    """Return a twin whose experts multiply MXFP8 activations: W4A8 where the weights are MXFP4."""
    other = twin(target)
    for module in other.modules():
        if isinstance(module, Experts):
            module.quantize_activations = True
    return other


class RoundedNorm(nn.Module):
    """A norm whose output is rounded to MXFP4."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the rounded norm of ``x`` [..., hidden], hidden a multiple of 32."""
        return fake_quantize(self.norm(x))


def round_activations(target: Target) -> Target:
    """Return a twin whose QKV, routers, experts and head read MXFP4 activations: the ``w4a4`` fault.

    What the head reads is rounded behind the drafter's features, so the drafter cannot follow.
    """
    other = twin(target)
    other.norm = RoundedNorm(other.norm)  # type: ignore[assignment]
    for block in other.blocks:
        assert isinstance(block, Block)  # noqa: S101 - for the type checker
        block.attention_norm = RoundedNorm(block.attention_norm)  # type: ignore[assignment]
        block.ffn_norm = RoundedNorm(block.ffn_norm)  # type: ignore[assignment]
    return other

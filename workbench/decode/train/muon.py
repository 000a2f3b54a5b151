"""Muon: momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), here also for stacks of expert matrices.

``torch.optim.Muon`` takes two-dimensional parameters only; expert weights are [experts, rows, columns] and must be
orthogonalised one expert at a time. Update scale 0.2 * sqrt(max(rows, columns)) as in Moonlight (arXiv 2502.16982), so
that one learning rate serves Muon and AdamW.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Return ``update`` [..., rows, columns] with its singular values pushed towards 1, in its own dtype."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = update.bfloat16() if update.is_cuda else update.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay. For matrices and stacks of matrices."""

    def __init__(
        self, params: Iterable[Tensor], lr: float | Tensor = 2e-3, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one update to every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer: Tensor = state["momentum"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(parameter.grad.lerp(buffer, group["momentum"]))
                scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update * (group["lr"] * scale))


def split_parameters(named: Iterable[tuple[str, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Split into (Muon's matrices, AdamW's rest): embeddings, routers, norms, biases and vectors go to AdamW."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in named:
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in ("embed", "router", "head"))
        (matrices if is_matrix else rest).append(parameter)
    return matrices, rest

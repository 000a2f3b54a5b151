"""The FFN of a layer on the kernel rungs, added to the residual stream: dense, or routed with shared experts."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.decode.experts import Experts
from workbench.decode.rungs.expert_pass import ExpertPass
from workbench.decode.rungs.products import Product
from workbench.kernels.router import route
from workbench.kernels.skinny_gemm import SkinnyConfig
from workbench.kernels.swiglu import swiglu
from workbench.kernels.workspace import Workspace


@dataclass(frozen=True, slots=True)
class DenseFeed:
    """Three launches: gate and up, activation, down."""

    gate_up: Product
    down: Product
    overlap: bool = False

    def __call__(self, normed: Tensor, residual: Tensor, workspace: Workspace) -> None:
        """Add the FFN of ``normed`` [T, H] to ``residual`` [T, H]."""
        self.down(swiglu(self.gate_up(normed, workspace), overlap=self.overlap), workspace, residual=residual)


@dataclass(frozen=True, slots=True)
class RoutedFeed:
    """The router, the chosen experts and, where the shape has one, the shared expert behind them.

    ``split``: K of the router over several programs. The choice is the router's, or ``ffn.forced``'s.
    """

    ffn: Experts
    experts: ExpertPass
    shared: DenseFeed | None
    split: bool
    overlap: bool = False
    forced: Tensor | None = None

    def __call__(self, normed: Tensor, residual: Tensor, workspace: Workspace, kv_len: Tensor, chosen: Tensor) -> None:
        """Add the experts' outputs for ``normed`` [T, H] to ``residual``; ``chosen`` int32 [T, k] gets their ids."""
        ffn, sigmoid = self.ffn, self._sigmoid()
        bias = ffn.router.bias
        _, weights = route(
            normed,
            ffn.router.weight.detach(),
            chosen.shape[1],
            bias=None if bias is None else bias.detach(),
            factor=ffn.shape.factor,
            forced=None if self.forced is None else (self.forced, kv_len),
            ids=chosen,
            workspace=workspace,
            config=None if self.split else SkinnyConfig(),
            overlap=self.overlap,
            **sigmoid,
        )
        self.experts(normed, chosen, weights, residual, workspace)
        if self.shared is not None:
            self.shared(normed, residual, workspace)

    def _sigmoid(self) -> dict[str, Any]:
        correction = self.ffn.correction
        return {} if correction is None else {"mode": "sigmoid", "correction": correction.detach()}

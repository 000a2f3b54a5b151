"""The routed experts of one layer on the kernel rungs, added to the residual stream."""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from workbench.decode.experts import ALPHA, LIMIT, Experts
from workbench.decode.fp8 import fake_quantize_groups
from workbench.decode.rungs.narrow import Fp8Experts
from workbench.decode.rungs.packed import PackedExperts, bias_rows
from workbench.decode.rungs.products import Cut
from workbench.decode.rungs.random_model import HeldExperts
from workbench.decode.spec import Activation
from workbench.kernels import bf16_experts, fp8_experts, mxfp4_experts
from workbench.kernels.live_quant import quantise
from workbench.kernels.mxfp4_experts import ExpertConfig, Half
from workbench.kernels.skinny_gemm import SkinnyConfig
from workbench.kernels.workspace import Workspace

_ACTIVATIONS: dict[Activation, Literal["silu", "gptoss"]] = {"swiglu": "silu", "clamped-swiglu": "gptoss"}


class ExpertPass(Protocol):
    """All chosen experts of one layer."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, workspace: Workspace) -> None:
        """Add the weighted outputs of ``ids`` int32 [T, k] for normed ``x`` [T, H] to ``residual`` [T, H]."""


@dataclass(frozen=True, slots=True)
class Mxfp4Pass:
    """Packed experts through the MXFP4 kernels. ``narrow``: activations are rounded to MXFP8 first (W4A8).

    The rounding is a chain of small operators and the product stays W4A16: what W4A8 does to the numbers, not to time.
    """

    packed: PackedExperts
    activation: Activation
    cut: Cut
    narrow: bool = False

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, workspace: Workspace) -> None:
        """Two launches: gate-up with activation, down with combine."""
        x = fake_quantize_groups(x) if self.narrow else x
        hidden = mxfp4_experts.gate_up(
            x,
            ids,
            *self.packed.gate_up,
            bias=self.packed.gate_up_bias,
            activation=_ACTIVATIONS[self.activation],
            alpha=ALPHA,
            limit=LIMIT,
            workspace=workspace,
            config=self._config(self.packed.gate_up[0], ids, "gate_up"),
            overlap=self.cut.overlap,
        )
        hidden = fake_quantize_groups(hidden) if self.narrow else hidden
        mxfp4_experts.down(
            hidden,
            ids,
            weights,
            *self.packed.down,
            bias=self.packed.down_bias,
            base=residual,
            out=residual,
            workspace=workspace,
            config=self._config(self.packed.down[0], ids, "down"),
            overlap=self.cut.overlap,
        )

    def _config(self, words: Tensor, ids: Tensor, half: Half) -> ExpertConfig:
        config = mxfp4_experts.default_config(words.shape[1], words.shape[2], ids.numel(), self.cut.sms, half)
        return replace(config, split=config.split if self.cut.split else 1, registers=self.cut.registers)


@dataclass(frozen=True, slots=True)
class Bf16Pass:
    """Expanded experts through the bfloat16 kernels."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    cut: Cut
    narrow: bool = False

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, workspace: Workspace) -> None:
        """Two launches: gate-up with activation, down with combine."""
        x = fake_quantize_groups(x) if self.narrow else x
        hidden = bf16_experts.gate_up(
            x,
            ids,
            self.gate_up,
            bias=self.gate_up_bias,
            activation=_ACTIVATIONS[self.activation],
            alpha=ALPHA,
            limit=LIMIT,
            config=self._config(self.gate_up.shape[1] // 2, self.gate_up.shape[2]),
            overlap=self.cut.overlap,
        )
        hidden = fake_quantize_groups(hidden) if self.narrow else hidden
        bf16_experts.down(
            hidden,
            ids,
            weights,
            self.down,
            bias=self.down_bias,
            base=residual,
            out=residual,
            workspace=workspace,
            config=self._config(self.down.shape[1], self.down.shape[2]),
            overlap=self.cut.overlap,
        )

    def _config(self, rows: int, columns: int) -> SkinnyConfig:
        return replace(bf16_experts.default_config(rows, columns), registers=self.cut.registers)


@dataclass(frozen=True, slots=True)
class Fp8Pass:
    """Block FP8 experts; both inputs are rounded to FP8 by groups of 128 in launches of their own."""

    held: Fp8Experts
    cut: Cut

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, workspace: Workspace) -> None:
        """Four launches: quantise, gate-up with activation, quantise, down with combine."""
        up, lower = self.held.gate_up, self.held.down
        q, scales = quantise(x, power_of_2_scales=True)
        hidden = fp8_experts.gate_up(
            q, scales, ids, up.values, up.scales, config=self._config(up.values.shape[1] // 2, up.values.shape[2]),
            overlap=self.cut.overlap,
        )  # fmt: skip
        q, scales = quantise(hidden.flatten(0, 1), power_of_2_scales=True)
        fp8_experts.down(
            q, scales, ids, weights, lower.values, lower.scales, base=residual, out=residual, workspace=workspace,
            config=self._config(*lower.values.shape[1:]), overlap=self.cut.overlap,
        )  # fmt: skip

    def _config(self, rows: int, columns: int) -> SkinnyConfig:
        return replace(fp8_experts.default_config(rows, columns), registers=self.cut.registers)


def expert_pass(ffn: Experts, packed: HeldExperts | None, cut: Cut, *, narrow: bool) -> ExpertPass:
    """Return the pass over one layer's experts: ``packed`` ones, else ``ffn``'s own."""
    if isinstance(packed, Fp8Experts):
        return Fp8Pass(packed, cut)
    if packed is not None:
        return Mxfp4Pass(packed, ffn.shape.activation, cut, narrow)
    return Bf16Pass(
        ffn.gate_up.detach(),
        ffn.down.detach(),
        bias_rows(ffn.gate_up_bias, 2),
        bias_rows(ffn.down_bias, 1),
        ffn.shape.activation,
        cut,
        narrow,
    )

"""The dense products of the kernel rungs: bfloat16, or block FP8 with activations quantised live."""

from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from workbench.decode.fp8 import BLOCK, Fp8, quantize_blocks
from workbench.kernels.live_quant import Form, FusedConfig, live_quant_gemm
from workbench.kernels.live_quant import default_split as live_split
from workbench.kernels.skinny_gemm import SkinnyConfig, default_config, skinny_bf16
from workbench.kernels.skinny_products import CHUNK_BF16
from workbench.kernels.workspace import Workspace


class Product(Protocol):
    """``x @ W.T`` plus a bias, for 1 to 16 tokens."""

    def __call__(self, x: Tensor, workspace: Workspace, *, residual: Tensor | None = None) -> Tensor:
        """Return [T, N] of ``x`` bfloat16 [T, K]; with ``residual`` [T, N], add it and leave the sum there."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How products are shared out over the card's ``sms`` multiprocessors.

    ``split``: Split-K where programs are few. ``registers``: cap a thread's registers, 0 for none (a cap below what
    the loop needs makes it spill). ``overlap``: launches start under their predecessor's tail (kernels/overlap.py).
    """

    sms: int = 132
    split: bool = False
    registers: int = 0
    overlap: bool = False

    def skinny(self, rows: int, columns: int) -> SkinnyConfig:
        """Return the configuration of a dense product."""
        config = default_config(rows, columns // CHUNK_BF16, self.sms)
        return replace(config, split=config.split if self.split else 1, registers=self.registers)


@dataclass(frozen=True, slots=True)
class Bf16Product:
    """``weight`` bfloat16 [N, K], read in checkpoint order."""

    weight: Tensor
    bias: Tensor | None
    config: SkinnyConfig
    overlap: bool = False

    def __call__(self, x: Tensor, workspace: Workspace, *, residual: Tensor | None = None) -> Tensor:
        """Return the product; with ``residual`` [T, N], add it and leave the sum there."""
        return skinny_bf16(
            x,
            self.weight,
            bias=self.bias,
            residual=residual,
            out=residual,
            workspace=workspace,
            config=self.config,
            overlap=self.overlap,
        )


@dataclass(frozen=True, slots=True)
class LiveFp8Product:
    """Block FP8 weights; activations are quantised inside the product, in groups of 128 columns.

    ``split`` programs share K: 1 is the naive fusion, more hides one program's quantisation behind the others' loads;
    0 quantises in the prologue (kernels/pq_gemm.py). A K that is no multiple of 128 is padded with zeros; the
    activation is then copied into a padded buffer first.
    """

    weight: Fp8
    bias: Tensor | None
    columns: int
    split: int
    _padded: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor, workspace: Workspace, *, residual: Tensor | None = None) -> Tensor:
        """Return the product; with ``residual`` [T, N], add it and leave the sum there."""
        return live_quant_gemm(
            self._pad(x),
            self.weight.values,
            self.weight.scales,
            form=_FORMS.get(self.split, "fused"),
            power_of_2_scales=True,
            bias=self.bias,
            residual=residual,
            out=residual,
            workspace=workspace,
            config=FusedConfig(split=self.split) if self.split else None,
        )

    def _pad(self, x: Tensor) -> Tensor:
        if self.weight.values.shape[1] == self.columns:
            return x
        tokens = len(x)
        if tokens not in self._padded:
            self._padded[tokens] = x.new_zeros(tokens, self.weight.values.shape[1])
        self._padded[tokens][:, : self.columns].copy_(x)
        return self._padded[tokens]


_FORMS: dict[int, Form] = {0: "pq", 1: "naive"}

Blocks = dict[tuple[int, tuple[int, ...]], Fp8]
"""Block FP8 forms of weights that are also held wider, by address and shape: made once, shared by the rungs."""


def live_fp8(
    weight: Tensor, bias: Tensor | None, cut: Cut, *, prologue: bool = False, blocks: Blocks | None = None
) -> LiveFp8Product:
    """Quantise ``weight`` bfloat16 [N, K] to block FP8, or find it in ``blocks``, and wrap it."""
    rows, columns = weight.shape
    padded = columns + -columns % BLOCK
    split = live_split(rows, padded // BLOCK, FusedConfig().block, cut.sms) if cut.split else 1
    key = (weight.data_ptr(), tuple(weight.shape))
    blocks = {} if blocks is None else blocks
    if key not in blocks:
        blocks[key] = quantize_blocks(F.pad(weight, (0, padded - columns)))
    return LiveFp8Product(blocks[key], bias, columns, 0 if prologue else split)

"""The drafters' layers by the kernels of the rungs: a layer in ten launches where plain torch takes sixty.

Everything is bfloat16 with float32 sums, as the target is on these rungs. Weights that a kernel reads in another shape
are copied here: drafters are small, and what plain torch reads stays where captured graphs found it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.attention import Attention
from workbench.decode.dflash import DFlashModel, DraftLayer
from workbench.decode.drafters.static_dflash import block_offsets
from workbench.decode.layers import RMSNorm, SwiGLU
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.rungs.attend import AttendSettings, GqaAttend, slabs
from workbench.decode.rungs.feed import DenseFeed
from workbench.decode.rungs.merging import same_input
from workbench.decode.rungs.products import Bf16Product, Cut
from workbench.kernels.lm_head import lm_head
from workbench.kernels.rms_norm import rms_norm
from workbench.kernels.rope import rope_write
from workbench.kernels.workspace import Workspace


class FusedDraftLayer:
    """Attention and dense FFN, both pre-normed, added to the residual stream; ``keys`` and ``values`` are its cache."""

    def __init__(
        self,
        norms: tuple[RMSNorm, RMSNorm],
        attention: Attention,
        ffn: SwiGLU,
        table: Tensor,
        slots: int,
        cut: Cut,
        *,
        causal: bool = True,
    ) -> None:
        """``norms``: before attention and before the FFN. ``table`` float32 [slots, rot]: cosines, then sines."""
        shape, device = attention.shape, table.device
        self.keys, self.values = slabs((shape.kv_heads, shape.qk_dim, shape.v_dim), slots, device)
        self._weights = tuple(norm.weight.detach() for norm in norms)
        self._eps, self._overlap = norms[0].eps, cut.overlap
        settings = AttendSettings(self._eps, cut.overlap)
        qkv = product(same_input(attention)[0], cut)
        self._attend = GqaAttend(attention, qkv, table, self.keys, self.values, settings, causal=causal)
        self._out = product((attention.o,), cut)
        self._feed = DenseFeed(product((ffn.gate_up,), cut), product((ffn.down,), cut), cut.overlap)

    def __call__(self, residual: Tensor, kv_len: Tensor, workspace: Workspace) -> None:
        """Run the layer on ``residual`` bfloat16 [T, hidden], whose rows are the last T of ``kv_len`` int32 [1]."""
        before, between = self._weights
        normed = rms_norm(residual, before, eps=self._eps, overlap=self._overlap)
        delta = self._out(self._attend(normed, kv_len, workspace), workspace)
        normed = rms_norm(delta, between, eps=self._eps, residual=residual, overlap=self._overlap)
        self._feed(normed, residual, workspace)


def drafter_cut(device: torch.device) -> Cut:
    """Return how the drafters' products are shared out on ``device``: they are small, so K is split."""
    if device.type != "cuda":
        return Cut(split=True)
    return Cut(torch.cuda.get_device_properties(device).multi_processor_count, split=True)


def product(parts: tuple[torch.nn.Linear, ...], cut: Cut, columns: slice = slice(None)) -> Bf16Product:
    """Return the product of ``parts`` side by side, over ``columns`` of their input, with weights of its own."""
    weight = torch.cat([part.weight.detach()[:, columns] for part in parts]).contiguous()
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    return Bf16Product(weight, bias, cut.skinny(*weight.shape), cut.overlap)


def _table(target: Target, slots: int) -> Tensor:
    return torch.cat((target.rope[0, :slots], target.rope[1, :slots]), 1).contiguous()


class FusedMtp:
    """A pass of the MTP head in fourteen launches, norm and head in two; a cache of ``slots`` rows."""

    def __init__(self, target: Target, head: MtpHead, slots: int, cut: Cut) -> None:
        hidden = target.spec.hidden
        self._target, self._cut = target, cut
        self._token_norm, self._state_norm = head.token_norm, head.state_norm
        # The joined input is never built: its halves are multiplied one after the other.
        self._token = product((head.combine,), cut, slice(0, hidden))
        self._state = product((head.combine,), cut, slice(hidden, None))
        norms = head.attention_norm, head.ffn_norm
        self._layer = FusedDraftLayer(norms, head.attention, head.ffn, _table(target, slots), slots, cut)
        self._workspace = Workspace(target.device)

    def run(self, state: Tensor, tokens: Tensor, rows: Tensor, ahead: int) -> Tensor:
        """Run the head."""
        token = F.embedding(tokens, self._target.embed.weight.detach())
        x = self._token(self._norm(token, self._token_norm), self._workspace)
        self._state(self._norm(state, self._state_norm), self._workspace, residual=x)
        self._layer(x, rows + (ahead + len(tokens)), self._workspace)
        return x

    def logits(self, state: Tensor) -> Tensor:
        """Run norm and head."""
        weight = self._target.head_weight.detach()
        logits = torch.empty(len(state), len(weight), device=state.device)
        lm_head(self._norm(state, self._target.norm), weight, logits=logits, workspace=self._workspace)
        return logits

    def choose(self, state: Tensor) -> Tensor:
        """Run norm and head, and take the largest."""
        normed = self._norm(state, self._target.norm)
        return lm_head(normed, self._target.head_weight.detach(), workspace=self._workspace, overlap=self._cut.overlap)

    def _norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return rms_norm(x, norm.weight.detach(), eps=norm.eps, overlap=self._cut.overlap)


class FusedDFlash:
    """The DFlash drafter's model by kernels. A layer's cache holds the window as a ring, and the block behind it.

    While the ring is not full the block lies behind what there is of it, so the first ``kv_len`` rows are always all
    that is visible. The cosines and sines of the block's rows are gathered once a block.
    """

    def __init__(self, target: Target, model: DFlashModel, cut: Cut, *, stuck_positions: bool = False) -> None:
        """``stuck_positions``: as of ``DFlashDrafter``."""
        shape, device, eps = model.shape, target.device, target.spec.norm_eps
        self._target, self._cut, self._window, self._block = target, cut, shape.window, shape.block
        slots = shape.window + shape.block
        self._angles = _table(target, target.rope.shape[1])
        self._table = torch.zeros(slots, self._angles.shape[1], device=device)
        self._rows = torch.arange(slots, device=device)
        self._last = int(block_offsets(shape.block, device, stuck=stuck_positions).max())
        self._project = product((model.project,), cut)
        self._context_norm, self._norm = model.context_norm, model.norm
        self._mask = model.mask.detach().expand(shape.block - 1, -1)
        self._layers: list[FusedDraftLayer] = []
        self._fresh: list[tuple[Bf16Product, Attention]] = []
        for layer in model.layers:
            assert isinstance(layer, DraftLayer)  # noqa: S101 - for the type checker
            attention, norms = layer.attention, (layer.attention_norm, layer.ffn_norm)
            self._layers.append(FusedDraftLayer(norms, attention, layer.ffn, self._table, slots, cut, causal=False))
            self._fresh.append((product((attention.k, attention.v), cut), attention))
        self._eps, self._workspace = eps, Workspace(device)

    def context(self, taps: Tensor, length: Tensor) -> None:
        """Turn features into keys and values."""
        count = len(taps)
        positions = self._rows[:count] + length
        places, angles = positions.remainder(self._window), self._angles.index_select(0, positions)
        features = rms_norm(
            self._project(taps.flatten(1), self._workspace), self._context_norm.weight.detach(), eps=self._eps
        )
        kv_len = torch.full((1,), count, dtype=torch.int32, device=taps.device)
        for layer, (kv, attention) in zip(self._layers, self._fresh, strict=True):
            shape = attention.shape
            keys, values = (
                torch.empty(shape.kv_heads, count, width, dtype=torch.bfloat16, device=taps.device)
                for width in (shape.qk_dim, shape.v_dim)
            )
            q_norm, k_norm = attention.q_norm, attention.k_norm
            rope_write(
                kv(features, self._workspace), angles, kv_len, keys, values, heads=0, eps=self._eps,
                q_norm=q_norm.weight.detach() if isinstance(q_norm, RMSNorm) else None,
                k_norm=k_norm.weight.detach() if isinstance(k_norm, RMSNorm) else None,
                v_scale=shape.value_scale,
            )  # fmt: skip
            layer.keys.index_copy_(1, places, keys)
            layer.values.index_copy_(1, places, values)

    def fill(self, anchor: Tensor, length: Tensor) -> Tensor:
        """Fill the block."""
        held = length.clamp(max=self._window)  # rows of context; the block begins behind them
        # Row r of the caches stands at position r + length - held; rows of the ring are rotated already.
        positions = torch.minimum(self._rows + (length - held), length + self._last)
        torch.index_select(self._angles, 0, positions, out=self._table)
        x = torch.cat((F.embedding(anchor, self._target.embed.weight.detach()), self._mask))
        kv_len = held + self._block
        for layer in self._layers:
            layer(x, kv_len, self._workspace)
        return rms_norm(x[1:], self._norm.weight.detach(), eps=self._norm.eps)

    def logits(self, states: Tensor) -> Tensor:
        """Run the head."""
        weight = self._target.head_weight.detach()
        logits = torch.empty(len(states), len(weight), device=states.device)
        lm_head(states, weight, logits=logits, workspace=self._workspace)
        return logits

    def choose(self, states: Tensor) -> Tensor:
        """Run the head, and take the largest of each row."""
        return lm_head(states, self._target.head_weight.detach(), workspace=self._workspace)

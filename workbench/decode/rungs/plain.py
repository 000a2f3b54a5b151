"""The plain-torch step of fixed shapes: the eager rung's arithmetic without its host decisions.

It costs what fixed shapes in plain torch cost: attention reads the whole cache slab under a mask. Experts run as
grouped products; where torch has none for the device (workbench/decode/rungs/grouping.py), they are gathered into a
copy, once a token, before they are multiplied.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.decode.cache import KVCache
from workbench.decode.experts import Experts
from workbench.decode.layers import rope_table
from workbench.decode.model import Block, Scores, Target
from workbench.decode.rungs.static import StepInputs


@dataclass(slots=True)
class PlainState:
    """A step under way: ``x`` [1, T, hidden], ``positions`` int64 [T], rotary tables [2, T, rot/2], masks by window."""

    x: Tensor
    positions: Tensor
    ropes: dict[tuple[int, float], Tensor]
    masks: dict[int | None, Tensor]
    taps: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)


class PlainStep:
    """``target``'s forward over a cache of ``capacity`` positions of its own. Any dtype, CPU or CUDA."""

    def __init__(self, target: Target, capacity: int) -> None:
        spec = target.spec
        self.layers = spec.layers
        self._target, self._capacity = target, capacity
        self._ropes = {
            key: rope_table(capacity, *key, target.device) for key in {spec.rope(layer) for layer in range(spec.layers)}
        }
        self._blocks = [block for block in target.blocks if isinstance(block, Block)]
        self._caches = KVCache(spec, capacity, device=target.device, dtype=target.dtype).layers

    def begin(self, inputs: StepInputs) -> PlainState:
        """Embed the tokens, and make one mask for each window."""
        width = len(inputs.tokens)
        positions = inputs.kv_len - width + torch.arange(width, device=inputs.tokens.device)
        column = torch.arange(self._capacity, device=positions.device)[None, :]
        row = positions[:, None]
        masks = {}
        for window in dict.fromkeys(block.attention.window for block in self._blocks):
            seen = column <= row
            masks[window] = seen if window is None else seen & (column > row - window)
        ropes = {key: table.index_select(1, positions) for key, table in self._ropes.items()}
        return PlainState(self._target.embed(inputs.tokens)[None], positions, ropes, masks)

    def layer(self, index: int, state: PlainState) -> None:
        """Run one layer."""
        block, cache = self._blocks[index], self._caches[index]
        attention, rope = block.attention, state.ropes[self._target.spec.rope(index)]
        attended = attention.fixed(
            block.attention_norm(state.x), rope, cache, state.positions, state.masks[attention.window]
        )
        block.exchange()
        x = state.x + attended
        normed = block.ffn_norm(x)
        if isinstance(block.ffn, Experts):
            out, indices = block.ffn.fixed(normed[0], state.positions)
            state.x = x + out[None]
            state.experts.append(indices)
        else:
            state.x = x + block.ffn(normed)
        block.exchange()
        if index in self._target.taps:
            state.taps.append(state.x)

    def end(self, state: PlainState) -> Scores:
        """Norm and head."""
        x = state.x
        return Scores(
            logits=self._target.logits(x),
            hidden=x,
            taps=torch.stack(state.taps, 2) if state.taps else x.new_empty(*x.shape[:2], 0, x.shape[2]),
            experts=torch.stack(state.experts)
            if state.experts
            else torch.empty(0, x.shape[1], 0, dtype=torch.long, device=x.device),
        )

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Every layer's slabs."""
        return [(cache.keys[0], cache.values[0]) for cache in self._caches]

"""The step of several tokens in float64, with what each phase leaves: the kernel's trace is held to it.

Source of the arithmetic: ``persistent_reference``, which runs one token after another; a test holds the two together.
"""

from dataclasses import dataclass

import torch

from workbench.kernels import mxfp4_cuda
from workbench.kernels.persistent import inter_scale
from workbench.kernels.persistent_reference import LayerWeights, ModelWeights
from workbench.kernels.persistent_shape import StepShape
from workbench.kernels.persistent_wide import TRACED, traced_extents


@dataclass(frozen=True, slots=True)
class WideResult:
    """``logits`` float64 [T, vocab], ``routing`` [layers, T, top_k]; ``trace``: for each layer what its phases leave,
    under the names of ``persistent_wide.TRACED``. ``margin``: smallest gap between the last expert chosen and the
    first left out, in router logits."""

    logits: torch.Tensor
    routing: torch.Tensor
    trace: list[dict[str, torch.Tensor]]
    margin: float


def _norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps) * gain.double()


def _turn(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] turned by rope [T, head_dim/2, 2] (cos, sin)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = (rope[:, None, :, part].double() for part in range(2))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attention(
    shape: StepShape,
    layer: LayerWeights,
    qkv: torch.Tensor,
    window: int,
    position: int,
    caches: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Attention of T tokens [T, qkv_rows] from ``position`` on; writes them into ``caches`` (keys, values, rope)."""
    keys, values, rope = caches
    count, d, group = len(qkv), shape.head_dim, shape.heads // shape.kv_heads
    q, k, v = torch.split(qkv, [shape.query_rows, shape.kv_heads * d, shape.kv_heads * d], dim=1)
    here = slice(position, position + count)
    q = _turn(q.view(count, shape.heads, d), rope[here])
    keys[:, here] = _turn(k.view(count, shape.kv_heads, d), rope[here]).to(torch.bfloat16).transpose(0, 1)
    values[:, here] = v.view(count, shape.kv_heads, d).to(torch.bfloat16).transpose(0, 1)
    past_keys = keys[:, : position + count].double().repeat_interleave(group, dim=0)
    past_values = values[:, : position + count].double().repeat_interleave(group, dim=0)
    scores = torch.einsum("thd,hpd->thp", q, past_keys) * d**-0.5
    own = torch.arange(position, position + count, device=qkv.device)[:, None]
    other = torch.arange(position + count, device=qkv.device)[None]
    hidden = (other > own) | ((other <= own - window) if window else torch.zeros_like(other > own))
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    sinks = layer.sinks.double()[None, :, None].expand(count, -1, 1)
    weights = torch.softmax(torch.cat((scores, sinks), dim=2), dim=2)[:, :, :-1]
    return torch.einsum("thp,hpd->thd", weights, past_values).flatten(1)


def reference_wide(
    shape: StepShape,
    model: ModelWeights,
    tokens: list[int],
    position: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    rope: torch.Tensor,
) -> WideResult:
    """Score ``tokens`` from ``position`` on; writes them into ``keys`` and ``values`` (bf16 [layers, kv_heads,
    capacity, head_dim])."""
    x = model.embedding[tokens].double()
    routing, trace, margin = [], [], float("inf")
    for index, layer in enumerate(model.layers):
        qkv = _norm(x, layer.attention_norm, shape.eps) @ layer.qkv.double().T + layer.qkv_bias.double()
        attention = _attention(shape, layer, qkv, shape.windows[index], position, (keys[index], values[index], rope))
        x = middle = x + attention @ layer.out.double().T + layer.out_bias.double()
        h = _norm(x, layer.mlp_norm, shape.eps)
        router = h @ layer.router.double().T + layer.router_bias.double()
        if shape.top_k < shape.experts:
            ordered = router.sort(dim=1, descending=True).values
            margin = min(margin, float((ordered[:, shape.top_k - 1] - ordered[:, shape.top_k]).min()))
        top = router.topk(shape.top_k, dim=1)
        weights = torch.softmax(top.values, dim=1)
        inters = torch.zeros(len(tokens), shape.top_k, shape.inter, dtype=torch.float64, device=x.device)
        for expert in sorted(set(top.indices.flatten().tolist())):
            rows, ranks = (top.indices == expert).nonzero(as_tuple=True)
            gate_up = mxfp4_cuda.dequantise(layer.gate_up[expert], layer.gate_up_scales[expert]).double()
            both = h[rows] @ gate_up.T + layer.gate_up_bias[expert].double()
            gate = both[:, 0::2].clamp(max=shape.limit)
            up = both[:, 1::2].clamp(-shape.limit, shape.limit)
            inter = gate * torch.sigmoid(shape.alpha * gate) * (up + 1)
            inters[rows, ranks] = inter
            down = mxfp4_cuda.dequantise(layer.down[expert], layer.down_scales[expert]).double()
            x = x.index_add(0, rows, weights[rows, ranks, None] * (inter @ down.T + layer.down_bias[expert].double()))
        routing.append(top.indices)
        trace.append(dict(zip(TRACED, (qkv, attention, middle, inters, x), strict=True)))
    logits = _norm(x, model.final_norm, shape.eps) @ model.head.double().T
    return WideResult(logits, torch.stack(routing), trace, margin)


def read_trace(shape: StepShape, trace: torch.Tensor, columns: int, count: int) -> list[dict[str, torch.Tensor]]:
    """The kernel's trace fp32 [layers, ...] as ``WideResult.trace`` has it, of the first ``count`` tokens."""
    layers = []
    for row in trace:
        parts, at = {}, 0
        for name, extents in traced_extents(shape, columns).items():
            size = torch.Size(extents).numel()
            part = row[at : at + size].view(extents)[:count]
            at += size
            if name == "gate-up":
                bits = torch.nan_to_num(part, nan=31744.0).to(torch.int32).to(torch.int16)  # what is missing: infinite
                part = bits.view(torch.float16).float() / inter_scale(shape)
            parts[name] = part.double()
        layers.append(parts)
    return layers


def compare_trace(got: list[dict[str, torch.Tensor]], want: list[dict[str, torch.Tensor]]) -> list[tuple[str, float]]:
    """(``layer i, phase``, relative error) of everything traced, in the order of computation, worst token each."""
    rows = []
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        for name in TRACED:
            error = (one[name] - other[name]).flatten(1).norm(dim=1) / other[name].flatten(1).norm(dim=1)
            worst = float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")
            rows.append((f"layer {index}, {name}", worst))
    return rows

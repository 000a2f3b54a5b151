"""The stack that the decode-step kernel computes, written plainly in torch: random weights in checkpoint form, one
step in float64 (or any type), and the packing into the kernel's layouts.

Source of the arithmetic: openai/gpt-oss (RMSNorm, GQA with sinks and sliding windows, RoPE on half-split dimensions,
router softmax over the chosen experts, clamped activation). Keys and values are rounded to bf16, as the cache keeps
them; nothing else is.
"""

from dataclasses import dataclass

import torch

from workbench.kernels import mxfp4_cuda, mxfp4_tiles, persistent_layout
from workbench.kernels.persistent_shape import StepShape, StepWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer in checkpoint form: bf16 matrices [out, in], gate and up rows alternating, MXFP4 blocks and scales."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    sinks: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    mlp_norm: torch.Tensor
    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scales: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor
    down_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model in checkpoint form."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def random_model(shape: StepShape, generator: torch.Generator) -> ModelWeights:
    """Random weights under which activations keep an order of one, on the generator's device."""
    device = generator.device

    def normal(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale).to(torch.bfloat16)

    def codes(*size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device=device)

    def scales(*size: int, fan_in: int) -> torch.Tensor:
        middle = 127 - (int(fan_in * 9).bit_length() + 1) // 2  # E2M1 codes have a mean square near 9
        return middle + torch.randint(-1, 2, size, generator=generator, device=device).to(torch.int16)

    h, i, e, q = shape.hidden, shape.inter, shape.experts, shape.query_rows
    layers = [
        LayerWeights(
            attention_norm=1 + normal(h, scale=0.1),
            qkv=normal(shape.qkv_rows, h, scale=h**-0.5),
            qkv_bias=normal(shape.qkv_rows, scale=0.2),
            sinks=normal(shape.heads, scale=1.0),
            out=normal(h, q, scale=q**-0.5),
            out_bias=normal(h, scale=0.2),
            mlp_norm=1 + normal(h, scale=0.1),
            router=normal(e, h, scale=h**-0.5),
            router_bias=normal(e, scale=0.5),
            gate_up=codes(e, 2 * i, h // 32, 16),
            gate_up_scales=scales(e, 2 * i, h // 32, fan_in=h).to(torch.uint8),
            gate_up_bias=normal(e, 2 * i, scale=0.2),
            down=codes(e, h, i // 32, 16),
            down_scales=scales(e, h, i // 32, fan_in=i).to(torch.uint8),
            down_bias=normal(e, h, scale=0.2),
        )
        for _ in range(shape.layers)
    ]
    return ModelWeights(
        normal(shape.vocab, h, scale=1.0),
        tuple(layers),
        1 + normal(h, scale=0.1),
        normal(shape.vocab, h, scale=h**-0.5),
    )


def pack_model(shape: StepShape, model: ModelWeights) -> StepWeights:
    """The kernel's form of ``model``."""

    def stack(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(values).contiguous()

    layers = model.layers
    gains = [gain for layer in layers for gain in (layer.attention_norm, layer.mlp_norm)]
    router = [
        (layer.router.to(torch.float64) * layer.mlp_norm.to(torch.float64)).T.to(torch.float32) for layer in layers
    ]
    return StepWeights(
        embedding=model.embedding,
        qkv=stack([persistent_layout.pack_matrix(layer.qkv) for layer in layers]),
        qkv_bias=stack([layer.qkv_bias.to(torch.float32) for layer in layers]),
        out=stack([persistent_layout.pack_matrix(layer.out) for layer in layers]),
        out_bias=stack([layer.out_bias.to(torch.float32) for layer in layers]),
        gains=stack([gain.to(torch.float32) for gain in [*gains, model.final_norm]]),
        router=stack(router),
        router_bias=stack([layer.router_bias.to(torch.float32) for layer in layers]),
        gate_up=stack(
            [mxfp4_tiles.pack_tiles(layer.gate_up, layer.gate_up_scales, order="interleaved") for layer in layers]
        ),
        gate_up_bias=stack([mxfp4_tiles.pack_bias(layer.gate_up_bias, order="interleaved") for layer in layers]),
        down=stack([mxfp4_tiles.pack_tiles(layer.down, layer.down_scales) for layer in layers]),
        down_bias=stack([layer.down_bias for layer in layers]),
        head=persistent_layout.pack_matrix(model.head),
        sinks=stack([layer.sinks.to(torch.float32) for layer in layers]),
    )


@dataclass(slots=True)
class StepResult:
    """One step of the reference. ``margin`` is the smallest gap, over layers, between the last expert chosen and the
    first left out, in router logits: below the kernel's error a different choice is no fault."""

    logits: torch.Tensor
    routing: torch.Tensor
    margin: float


def _norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean() + eps) * gain.to(x.dtype)


def _turn(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x [..., head_dim] turned by rope [head_dim/2, 2] (cos, sin)."""
    half = x.shape[-1] // 2
    cos, sin = rope[:, 0].to(x.dtype), rope[:, 1].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def reference_step(
    shape: StepShape,
    model: ModelWeights,
    token: int,
    position: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    rope: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> StepResult:
    """One decode step; writes this position into ``keys`` and ``values`` (bf16 [layers, kv_heads, capacity,
    head_dim])."""
    x = model.embedding[token].to(dtype)
    d, group = shape.head_dim, shape.heads // shape.kv_heads
    routing, margin = [], float("inf")
    for index, layer in enumerate(model.layers):
        h = _norm(x, layer.attention_norm, shape.eps)
        qkv = layer.qkv.to(dtype) @ h + layer.qkv_bias.to(dtype)
        q, k, v = torch.split(qkv, [shape.query_rows, shape.kv_heads * d, shape.kv_heads * d])
        q = _turn(q.view(shape.heads, d), rope[position])
        keys[index, :, position] = _turn(k.view(shape.kv_heads, d), rope[position]).to(torch.bfloat16)
        values[index, :, position] = v.view(shape.kv_heads, d).to(torch.bfloat16)
        window = shape.windows[index]
        first = max(0, position + 1 - window) if window else 0
        past_keys = keys[index, :, first : position + 1].to(dtype).repeat_interleave(group, dim=0)
        past_values = values[index, :, first : position + 1].to(dtype).repeat_interleave(group, dim=0)
        scores = torch.einsum("hd,hpd->hp", q, past_keys) * d**-0.5
        weights = torch.softmax(torch.cat((scores, layer.sinks.to(dtype)[:, None]), dim=1), dim=1)[:, :-1]
        attention = torch.einsum("hp,hpd->hd", weights, past_values).flatten()
        x = x + layer.out.to(dtype) @ attention + layer.out_bias.to(dtype)
        h = _norm(x, layer.mlp_norm, shape.eps)
        router = layer.router.to(dtype) @ h + layer.router_bias.to(dtype)
        ordered = router.sort(descending=True).values
        if shape.top_k < shape.experts:
            margin = min(margin, float(ordered[shape.top_k - 1] - ordered[shape.top_k]))
        top = router.topk(shape.top_k)
        routing.append(top.indices)
        for expert, weight in zip(top.indices.tolist(), torch.softmax(top.values, dim=0), strict=True):
            gate_up = mxfp4_cuda.dequantise(layer.gate_up[expert], layer.gate_up_scales[expert]).to(dtype) @ h
            gate_up = gate_up + layer.gate_up_bias[expert].to(dtype)
            gate = gate_up[0::2].clamp(max=shape.limit)
            up = gate_up[1::2].clamp(-shape.limit, shape.limit)
            inter = gate * torch.sigmoid(shape.alpha * gate) * (up + 1)
            down = mxfp4_cuda.dequantise(layer.down[expert], layer.down_scales[expert]).to(dtype) @ inter
            x = x + weight * (down + layer.down_bias[expert].to(dtype))
    logits = model.head.to(dtype) @ _norm(x, model.final_norm, shape.eps)
    return StepResult(logits, torch.stack(routing), margin)

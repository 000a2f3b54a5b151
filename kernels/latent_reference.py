"""The slice that the decode-step kernel of latent attention computes, written plainly in torch: random weights in
checkpoint form, one step in float64 (or any type), and the packing into the kernel's layouts.

Source of the arithmetic: workbench/decode (mla.py, experts.py, model.py). What a position leaves in the caches is
rounded to their type; nothing else is.
"""

from dataclasses import dataclass

import torch

from workbench.decode.fp8 import BLOCK, Fp8, quantize_blocks
from workbench.kernels import fp8_tiles, mxfp4_cuda, mxfp4_tiles, persistent_layout
from workbench.kernels.latent_shape import LatentLayer, LatentShape, LatentWeights


@dataclass(frozen=True, slots=True)
class IndexerModel:
    """A layer's own indexer: block FP8 ``wk`` [dim, hidden], ``weights`` [heads, hidden], ``wq_b`` [heads * dim,
    q_lora]; ``norm`` fp32 [2, dim], weight and bias."""

    wk: Fp8
    weights: Fp8
    wq_b: Fp8
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """Routed experts: ``router`` bf16 [experts, hidden], ``correction`` fp32, MXFP4 blocks and scales, gate rows
    first."""

    router: torch.Tensor
    correction: torch.Tensor
    gate_up: torch.Tensor
    gate_up_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerModel:
    """One layer in checkpoint form: matrices [out, in], block FP8 but for ``uk`` bf16 [heads, kv_lora, nope] and ``uv``
    bf16 [heads, v_dim, kv_lora]. ``routed`` is None in a dense layer, ``indexer`` where the layer owns none;
    ``feed_gate``, ``feed_up``, ``feed_down``: the dense FFN or the shared expert."""

    attention_norm: torch.Tensor
    q_a: Fp8
    kv_a: Fp8
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    q_b: Fp8
    uk: torch.Tensor
    uv: torch.Tensor
    out: Fp8
    indexer: IndexerModel | None
    ffn_norm: torch.Tensor
    routed: RoutedModel | None
    feed_gate: Fp8
    feed_up: Fp8
    feed_down: Fp8


@dataclass(frozen=True, slots=True)
class LatentModel:
    """A rank's slice in checkpoint form."""

    embedding: torch.Tensor
    layers: tuple[LayerModel, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


class _Draw:
    """Random tensors on the generator's device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def normal(self, *size: int, scale: float) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device=self.generator.device) * scale

    def bf16(self, *size: int, scale: float) -> torch.Tensor:
        return self.normal(*size, scale=scale).to(torch.bfloat16)

    def fp8(self, rows: int, columns: int) -> Fp8:
        """Outputs of order one, scales that are no powers of two."""
        plain = quantize_blocks(self.normal(rows, columns, scale=columns**-0.5))
        spread = torch.rand(plain.scales.shape, generator=self.generator, device=self.generator.device)
        return Fp8(plain.values, plain.scales * (0.75 + 0.5 * spread))

    def codes(self, *size: int) -> torch.Tensor:
        return torch.randint(0, 256, size, generator=self.generator, dtype=torch.uint8, device=self.generator.device)

    def scales(self, *size: int, fan_in: int) -> torch.Tensor:
        middle = mxfp4_scale(fan_in)
        return torch.randint(
            middle - 1, middle + 2, size, generator=self.generator, dtype=torch.uint8, device=self.generator.device
        )


def mxfp4_scale(fan_in: int) -> int:
    """The E8M0 scale under which ``fan_in`` random codes give an output of order one: their mean square is near 9."""
    return 127 - ((fan_in * 9).bit_length() + 1) // 2


def random_model(shape: LatentShape, generator: torch.Generator) -> LatentModel:
    """Random weights under which activations keep an order of one, on the generator's device."""
    draw, h = _Draw(generator), shape.hidden

    def norm(width: int) -> torch.Tensor:
        return 1 + draw.bf16(width, scale=0.1)

    def indexer() -> IndexerModel:
        bias = torch.stack((1 + draw.normal(shape.index_dim, scale=0.1), draw.normal(shape.index_dim, scale=0.1)))
        queries = draw.fp8(shape.index_heads * shape.index_dim, shape.q_lora)
        return IndexerModel(draw.fp8(shape.index_dim, h), draw.fp8(shape.index_heads, h), queries, bias)

    def routed() -> RoutedModel:
        e, i = shape.experts, shape.inter
        return RoutedModel(
            router=draw.bf16(e, h, scale=h**-0.5),
            correction=draw.normal(e, scale=0.1),
            gate_up=draw.codes(e, 2 * i, h // 32, 16),
            gate_up_scales=draw.scales(e, 2 * i, h // 32, fan_in=h),
            down=draw.codes(e, h, i // 32, 16),
            down_scales=draw.scales(e, h, i // 32, fan_in=i),
        )

    def layer(index: int) -> LayerModel:
        feed = shape.feed_inter(index)
        return LayerModel(
            attention_norm=norm(h),
            q_a=draw.fp8(shape.q_lora, h),
            kv_a=draw.fp8(shape.latent, h),
            q_norm=norm(shape.q_lora),
            kv_norm=norm(shape.kv_lora),
            q_b=draw.fp8(shape.query_rows, shape.q_lora),
            uk=draw.bf16(shape.heads, shape.kv_lora, shape.nope, scale=shape.nope**-0.5),
            uv=draw.bf16(shape.heads, shape.v_dim, shape.kv_lora, scale=shape.kv_lora**-0.5),
            out=draw.fp8(h, shape.heads * shape.v_dim),
            indexer=indexer() if index in shape.owners else None,
            ffn_norm=norm(h),
            routed=None if shape.dense(index) else routed(),
            feed_gate=draw.fp8(feed, h),
            feed_up=draw.fp8(feed, h),
            feed_down=draw.fp8(h, feed),
        )

    embedding = draw.bf16(shape.vocab, h, scale=1.0)
    layers = tuple(layer(index) for index in range(shape.layers))
    return LatentModel(embedding, layers, norm(h), draw.bf16(shape.vocab, h, scale=h**-0.5))


def pack_model(shape: LatentShape, model: LatentModel) -> LatentWeights:
    """The kernel's form of ``model``."""
    layers = tuple(_pack_layer(shape, layer) for layer in model.layers)
    return LatentWeights(model.embedding, persistent_layout.pack_matrix(model.head), model.final_norm, layers)


def _pack_layer(shape: LatentShape, layer: LayerModel) -> LatentLayer:
    index, routed = layer.indexer, layer.routed
    low, queries = [layer.q_a, layer.kv_a], [layer.q_b]
    if index is not None:
        low += [index.wk, Fp8(fp8_tiles.pad_rows(index.weights.values), index.weights.scales)]
        queries.append(index.wq_b)
    return LatentLayer(
        a=merged(low),
        q_b=merged(queries),
        uk=persistent_layout.pack_matrix(layer.uk.flatten(0, 1)),
        uv=persistent_layout.pack_matrix(layer.uv.flatten(0, 1)),
        out=merged([layer.out]),
        attention_norm=layer.attention_norm,
        q_norm=layer.q_norm,
        kv_norm=layer.kv_norm,
        index_norm=None if index is None else index.norm,
        ffn_norm=layer.ffn_norm,
        router=None if routed is None else routed.router,
        correction=None if routed is None else routed.correction,
        gate_up=None
        if routed is None
        else mxfp4_tiles.pack_tiles(routed.gate_up, routed.gate_up_scales, order="halves"),
        down=None if routed is None else mxfp4_tiles.pack_tiles(routed.down, routed.down_scales),
        feed_up=fp8_tiles.pack_gate_up(
            layer.feed_gate.values, layer.feed_gate.scales, layer.feed_up.values, layer.feed_up.scales
        ),
        feed_down=merged([layer.feed_down]),
    )


def merged(parts: list[Fp8]) -> torch.Tensor:
    """Matrices under each other as FP8 tiles, each with its own blocks."""
    return torch.cat([fp8_tiles.pack_fp8(part.values, part.scales) for part in parts])


@dataclass(slots=True)
class LatentResult:
    """One step of the reference. ``routing`` int64 [moe layers, top_k], by falling score; ``margin`` is the smallest
    gap, over layers, between the last expert chosen and the first left out, in sigmoid scores plus correction: below
    the kernel's error a different choice is no fault. Infinite where the choice was forced."""

    logits: torch.Tensor
    routing: torch.Tensor
    margin: float


def make_caches(
    shape: LatentShape, capacity: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty caches: latents [layers, capacity, kv_lora + rope] and index keys [owners, capacity, index_dim]."""
    latents = torch.zeros(shape.layers, capacity, shape.latent, dtype=dtype, device=device)
    return latents, torch.zeros(len(shape.owners), capacity, shape.index_dim, dtype=dtype, device=device)


def values_of(matrix: Fp8, dtype: torch.dtype) -> torch.Tensor:
    """The values of a block FP8 matrix, scaled in ``dtype``."""
    rows, columns = matrix.values.shape
    scales = matrix.scales.to(dtype).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return matrix.values.to(torch.float32).to(dtype) * scales


def _norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean() + eps) * gain.to(x.dtype)


def _turn(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x [..., width] whose first numbers are turned by rope [rope/2, 2] (cos, sin), pairs (i, i + rope/2)."""
    half = rope.shape[0]
    cos, sin = rope[:, 0].to(x.dtype), rope[:, 1].to(x.dtype)
    first, second, passing = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, passing), dim=-1)


def _index_key(index: IndexerModel, h: torch.Tensor, rope: torch.Tensor, eps: float) -> torch.Tensor:
    raw = values_of(index.wk, h.dtype) @ h
    centred = raw - raw.mean()
    weight, bias = index.norm.to(h.dtype)
    return _turn(centred * torch.rsqrt((centred * centred).mean() + eps) * weight + bias, rope)


def _attend(
    shape: LatentShape, layer: LayerModel, h: torch.Tensor, cache: torch.Tensor, position: int, rope: torch.Tensor
) -> torch.Tensor:
    """What the layer's attention adds to the residual; writes ``position`` of ``cache`` [capacity, kv_lora + rope]."""
    dtype = h.dtype
    low = _norm(values_of(layer.q_a, dtype) @ h, layer.q_norm, shape.eps)
    latent, key = torch.split(values_of(layer.kv_a, dtype) @ h, [shape.kv_lora, shape.rope])
    cache[position] = torch.cat((_norm(latent, layer.kv_norm, shape.eps), _turn(key, rope))).to(cache.dtype)
    query = (values_of(layer.q_b, dtype) @ low).view(shape.heads, -1)
    nope, turning = torch.split(query, [shape.nope, shape.rope], dim=-1)
    absorbed = torch.einsum("hn,hrn->hr", nope, layer.uk.to(dtype))
    seen = cache[: position + 1].to(dtype)
    scores = torch.cat((absorbed, _turn(turning, rope)), dim=-1) @ seen.T * (shape.nope + shape.rope) ** -0.5
    mixed = torch.softmax(scores, dim=-1) @ seen[:, : shape.kv_lora]
    values = torch.einsum("hr,hvr->hv", mixed, layer.uv.to(dtype)).flatten()
    return values_of(layer.out, dtype) @ values


def _route(
    shape: LatentShape, routed: RoutedModel, h: torch.Tensor, forced: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Chosen experts (the lower index among equals), their weights, and the margin of the choice."""
    scores = torch.sigmoid(routed.router.to(h.dtype) @ h)
    margin = float("inf")
    if forced is None:
        ordered = (scores + routed.correction.to(h.dtype)).sort(descending=True, stable=True)
        chosen = ordered.indices[: shape.top_k]
        if shape.top_k < shape.experts:
            margin = float(ordered.values[shape.top_k - 1] - ordered.values[shape.top_k])
    else:
        chosen = forced.long()
    weights = scores[chosen]
    return chosen, weights / weights.sum() * shape.factor, margin


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(gate) * up


def _experts(routed: RoutedModel, h: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    for expert, weight in zip(chosen.tolist(), weights, strict=True):
        both = mxfp4_cuda.dequantise(routed.gate_up[expert], routed.gate_up_scales[expert]).to(h.dtype) @ h
        down = mxfp4_cuda.dequantise(routed.down[expert], routed.down_scales[expert]).to(h.dtype)
        out = out + weight * (down @ _swiglu(*both.chunk(2)))
    return out


def reference_step(
    shape: LatentShape,
    model: LatentModel,
    token: int,
    position: int,
    latents: torch.Tensor,
    index_keys: torch.Tensor,
    rope: torch.Tensor,
    *,
    forced: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> LatentResult:
    """One decode step; writes this position into ``latents`` and ``index_keys`` (see ``make_caches``).

    ``rope`` fp32 [capacity, rope/2, 2]; ``forced`` int [moe layers, top_k] replaces the routers' choice.
    """
    x = model.embedding[token].to(dtype)
    routing, margin = [], float("inf")
    for number, layer in enumerate(model.layers):
        h = _norm(x, layer.attention_norm, shape.eps)
        if layer.indexer is not None:
            key = _index_key(layer.indexer, h, rope[position], shape.eps)
            index_keys[shape.owners.index(number), position] = key.to(index_keys.dtype)
        x = x + _attend(shape, layer, h, latents[number], position, rope[position])
        h = _norm(x, layer.ffn_norm, shape.eps)
        gate, up = values_of(layer.feed_gate, dtype) @ h, values_of(layer.feed_up, dtype) @ h
        x = x + values_of(layer.feed_down, dtype) @ _swiglu(gate, up)
        if layer.routed is not None:
            row = None if forced is None else forced[number - shape.dense_layers]
            chosen, weights, gap = _route(shape, layer.routed, h, row)
            x = x + _experts(layer.routed, h, chosen, weights)
            routing.append(chosen)
            margin = min(margin, gap)
    logits = model.head.to(dtype) @ _norm(x, model.final_norm, shape.eps)
    return LatentResult(logits, torch.stack(routing), margin)

"""What each kernel must compute, in plain torch at float64: the tests and the benchmark hold the kernels to these.

Arguments are named and shaped as in the kernels' own files; weights come dequantised or in checkpoint form.
"""

import torch

from workbench.kernels.mxfp4_experts import Activation
from workbench.kernels.router import Mode


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ``|got - want| / |want|`` (Frobenius); NaN if either holds one."""
    want = want.double()
    return float((got.to(want.device).double() - want).norm() / want.norm())


def activate(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """SwiGLU, or gpt-oss's clamped form (alpha 1.702, limit 7)."""
    if activation == "gptoss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return gate * torch.sigmoid(gate) * up


def gate_up(
    x: torch.Tensor, ids: torch.Tensor, w: dict[int, torch.Tensor], bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """Return float64[T * k, I]; ``w`` maps each chosen expert to its weights, float[2, I, K]."""
    rows = []
    for token, experts in enumerate(ids.tolist()):
        for expert in experts:
            gate, up = (w[expert].double() @ x[token].double()).unbind(0)
            if bias is not None:
                gate, up = gate + bias[expert, 0].double(), up + bias[expert, 1].double()
            rows.append(activate(gate, up, activation))
    return torch.stack(rows)


def down(
    h: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: dict[int, torch.Tensor],
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float64[T, H]; ``h`` at true scale, ``w`` maps each chosen expert to its weights, float[H, I]."""
    tokens, top_k = ids.shape
    hidden = next(iter(w.values())).shape[0]
    out = torch.zeros(tokens, hidden, dtype=torch.float64, device=h.device) if base is None else base.double()
    for token, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            value = w[expert].double() @ h[token * top_k + slot].double()
            if bias is not None:
                value = value + bias[expert].double()
            out[token] += weights[token, slot].double() * value
    return out


def gqa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_len: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Return float64[T, H, Dv]."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[0]
    keys = k[:, :kv_len].double().repeat_interleave(group, 0)
    values = v[:, :kv_len].double().repeat_interleave(group, 0)
    logits = torch.einsum("thd,hsd->ths", q.double(), keys) * scale
    position = torch.arange(tokens, device=q.device)[:, None, None] + kv_len - tokens
    key = torch.arange(kv_len, device=q.device)
    hidden = torch.zeros_like(logits, dtype=torch.bool)
    if causal:
        hidden |= key > position
    if window is not None:
        hidden |= key <= position - window
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.double()[None, :, None].expand(tokens, heads, 1)
        weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("ths,hsd->thd", weights, values)


def mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    kv_len: int,
    *,
    rank: int,
    scale: float,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float64[T, H, rank]."""
    tokens = q.shape[0]
    logits = torch.einsum("thd,sd->ths", q.double(), cache[:kv_len].double()) * scale
    position = torch.arange(tokens, device=q.device)[:, None, None] + kv_len - tokens
    hidden = torch.arange(kv_len, device=q.device) > position
    if indices is not None:
        picked = torch.zeros(tokens, 1, kv_len, dtype=torch.bool, device=q.device)
        for token in range(tokens):
            row = indices[token]
            picked[token, 0, row[row >= 0].long()] = True
        hidden = hidden | ~picked
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("ths,sd->thd", weights, cache[:kv_len, :rank].double())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return float64 of x's shape; x already holds the residual."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rotate(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate the first ``table.shape[1]`` numbers of x [T, heads, D]; float64."""
    x = x.double()
    rot = table.shape[1]
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    part = x[..., :rot]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((turned, x[..., rot:]), -1)


def route(
    logits: torch.Tensor, top_k: int, mode: Mode, *, renormalise: bool, correction: torch.Tensor | None, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(ids, weights)`` of float64 logits [T, E], the bias already in them."""
    if mode == "sigmoid":
        score = logits.sigmoid()
        ids = (score if correction is None else score + correction.double()).topk(top_k).indices
        weights = score.gather(1, ids)
        return ids, factor * (weights / weights.sum(-1, keepdim=True) if renormalise else weights)
    values, ids = logits.topk(top_k)
    if mode == "softmax_of_chosen":
        return ids, values.softmax(-1)
    weights = logits.softmax(-1).gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def dequantise_fp8(w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return e4m3 weights times their 128 x 128 block scales, float64[N, K]."""
    full = scales.double().repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)
    return w.double() * full


def quantise_dequantise(x: torch.Tensor) -> torch.Tensor:
    """Return x after e4m3 by groups of 128 columns, float64."""
    groups = x.float().view(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return ((groups / scale).to(torch.float8_e4m3fn).double() * scale.double()).view(x.shape)

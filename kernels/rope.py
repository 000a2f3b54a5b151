"""RoPE on queries and keys, optional QK-norm, and the write into the KV cache, in one launch behind the projection.

Reference (fp32): optional RMSNorm of each query and key head; then the first ``rot`` numbers of each are rotated by
the angles of position ``kv_len - T + t``: pairs (i, i + rot/2) (NeoX form), or (2 i, 2 i + 1) where ``interleaved``.
Values are copied, times ``v_scale`` (MiMo). Angles come from a table, so any scaling rule (YaRN) is the table's.

Shapes: qkv bf16[T, (H + KV) Dk + KV Dv], heads of q, then k, then v; table fp32[positions, rot], cos then sin; q out
bf16[T, H, Dk]; caches bf16[KV, capacity, Dk] and [.., Dv], written at the T new positions; kv_len int32[1] counts
them already. Byte floor: qkv read, q, k, v written. Instruction floor: about 10 per element.
MLA form: kv bf16[T, rank + rope] is normed (latent) and rotated (key) into cache bf16[capacity, rank + rope]; the
rotary part of q bf16[T, H, nope + rope] is rotated into q_out bf16[T, H, rank + rope] at column rank.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.overlap import wait_for_previous


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``num_warps`` of the one program a head and token gets."""

    num_warps: int = 1


SPACE = (RopeConfig(1), RopeConfig(2), RopeConfig(4))


@triton.jit
def _rotate_store(
    in_ptr, out_ptr, norm_ptr, gain, table_ptr, ROT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Rotate ROT numbers from in_ptr to out_ptr, after a gain and a norm weight where NORM."""
    i = tl.arange(0, HALF)
    ok = i < ROT // 2
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + ROT // 2
    a = tl.load(in_ptr + first, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(in_ptr + second, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        a *= gain * tl.load(norm_ptr + first, mask=ok, other=0.0).to(tl.float32)
        b *= gain * tl.load(norm_ptr + second, mask=ok, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + i, mask=ok, other=0.0)
    sin = tl.load(table_ptr + ROT // 2 + i, mask=ok, other=0.0)
    tl.store(out_ptr + first, (a * cos - b * sin).to(tl.bfloat16), mask=ok)
    tl.store(out_ptr + second, (b * cos + a * sin).to(tl.bfloat16), mask=ok)


@triton.jit
def rope_kernel(
    qkv_ptr,
    table_ptr,
    kv_len_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    capacity,
    eps,
    v_scale,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDE: tl.constexpr,
    ROT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    wait_for_previous(OVERLAP)
    position = tl.load(kv_len_ptr) - T + token
    line = qkv_ptr + token * ((HEADS + KV_HEADS) * DK + KV_HEADS * DV)
    column = tl.arange(0, WIDE)
    if head < HEADS + KV_HEADS:
        source = line + head * DK
        if head < HEADS:
            target = q_ptr + (token * HEADS + head) * DK
            norm_ptr = q_norm_ptr
        else:
            target = k_ptr + ((head - HEADS).to(tl.int64) * capacity + position) * DK
            norm_ptr = k_norm_ptr
        x = tl.load(source + column, mask=column < DK, other=0.0).to(tl.float32)
        gain = 1.0
        if NORM:
            gain = tl.rsqrt(tl.sum(x * x, 0) / DK + eps)
            x *= gain * tl.load(norm_ptr + column, mask=column < DK, other=0.0).to(tl.float32)
        if ROT < DK:
            tl.store(target + column, x.to(tl.bfloat16), mask=(column >= ROT) & (column < DK))
        _rotate_store(
            source, target, norm_ptr, gain, table_ptr + position.to(tl.int64) * ROT, ROT, HALF, INTERLEAVED, NORM
        )
    else:
        kv_head = head - HEADS - KV_HEADS
        source = line + (HEADS + KV_HEADS) * DK + kv_head * DV
        target = v_ptr + (kv_head.to(tl.int64) * capacity + position) * DV
        v = tl.load(source + column, mask=column < DV, other=0.0).to(tl.float32) * v_scale
        tl.store(target + column, v.to(tl.bfloat16), mask=column < DV)


@triton.jit
def rope_mla_kernel(
    kv_ptr,
    q_ptr,
    table_ptr,
    kv_len_ptr,
    norm_ptr,
    cache_ptr,
    q_out_ptr,
    eps,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    wait_for_previous(OVERLAP)
    position = (tl.load(kv_len_ptr) - T + token).to(tl.int64)
    table = table_ptr + position * ROPE
    if head < HEADS:
        source = q_ptr + (token * HEADS + head) * (NOPE + ROPE) + NOPE
        target = q_out_ptr + (token * HEADS + head) * (RANK + ROPE) + RANK
        _rotate_store(source, target, source, 1.0, table, ROPE, ROPE // 2, INTERLEAVED, False)
    else:
        line = kv_ptr + token * (RANK + ROPE)
        target = cache_ptr + position * (RANK + ROPE)
        column = tl.arange(0, RANK)
        x = tl.load(line + column).to(tl.float32)
        weight = tl.load(norm_ptr + column).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * weight
        tl.store(target + column, x.to(tl.bfloat16))
        _rotate_store(line + RANK, target + RANK, line, 1.0, table, ROPE, ROPE // 2, INTERLEAVED, False)


def rope_table(positions: int, rot: int, theta: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return fp32[positions, rot]: cosines, then sines, of position * theta^(-2 i / rot), computed in float64."""
    frequency = theta ** (-torch.arange(0, rot, 2, dtype=torch.float64) / rot)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1).float().to(device)


def floor(tokens: int, heads: int, kv_heads: int, dk: int, dv: int, rot: int) -> Floor:
    """Return the floor of the GQA form."""
    numbers = tokens * ((heads + kv_heads) * dk + kv_heads * dv)
    return Floor(2 * numbers + 4 * tokens * rot, 2 * numbers, 10 * numbers)


def rope_write(
    qkv: torch.Tensor,
    table: torch.Tensor,
    kv_len: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    v_scale: float = 1.0,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    config: RopeConfig | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Return q, bf16[T, heads, Dk], and write the T new positions of the caches ``k`` and ``v``.

    ``q_norm`` and ``k_norm`` (bf16[Dk], both or none) are QK-norm weights; ``overlap``: overlap.py.
    Raises InputError before launch. The
    caller keeps kv_len within the caches and the table: it lives on the device and cannot be checked here.
    """
    kernel = "rope_write"
    expect(kernel, "qkv", qkv, torch.bfloat16, (None, None))
    expect(kernel, "k", k, torch.bfloat16, (None, None, None), device=qkv.device)
    kv_heads, capacity, dk = k.shape
    expect(kernel, "v", v, torch.bfloat16, (kv_heads, capacity, None), device=qkv.device)
    dv, tokens = v.shape[2], qkv.shape[0]
    expect(kernel, "qkv", qkv, torch.bfloat16, (tokens, (heads + kv_heads) * dk + kv_heads * dv))
    expect(kernel, "table", table, torch.float32, (None, None), device=qkv.device)
    expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=qkv.device)
    rot = table.shape[1]
    require(kernel, rot % 2 == 0 and rot <= dk, f"the table rotates {rot} numbers, needs an even count up to Dk={dk}")
    require(kernel, table.shape[0] >= capacity, f"the table has {table.shape[0]} positions, the cache {capacity}")
    require(kernel, (q_norm is None) == (k_norm is None), "q_norm and k_norm must be given together")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            expect(kernel, name, norm, torch.bfloat16, (dk,), device=qkv.device)
    if out is None:
        out = torch.empty(tokens, heads, dk, dtype=torch.bfloat16, device=qkv.device)
    expect(kernel, "out", out, torch.bfloat16, (tokens, heads, dk), device=qkv.device)
    rope_kernel[(tokens, heads + 2 * kv_heads)](
        qkv, table, kv_len, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, out, k, v, capacity,
        eps, v_scale, T=tokens, HEADS=heads, KV_HEADS=kv_heads, DK=dk, DV=dv, WIDE=power_of_2(max(dk, dv)), ROT=rot,
        HALF=power_of_2(rot // 2), INTERLEAVED=interleaved, NORM=q_norm is not None,
        OVERLAP=overlap, launch_pdl=overlap, num_warps=(config or RopeConfig()).num_warps,
    )  # fmt: skip
    return out


def rope_write_mla(
    kv: torch.Tensor,
    q: torch.Tensor,
    table: torch.Tensor,
    kv_len: torch.Tensor,
    norm: torch.Tensor,
    cache: torch.Tensor,
    q_out: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = True,
    overlap: bool = False,
) -> None:
    """Write the latent cache and the rotary columns of ``q_out``; see the module text for shapes.

    ``overlap``: overlap.py. Raises InputError before launch for shapes or types that do not fit.
    """
    kernel = "rope_write_mla"
    expect(kernel, "table", table, torch.float32, (None, None), device=kv.device)
    rope = table.shape[1]
    expect(kernel, "norm", norm, torch.bfloat16, (None,), device=kv.device)
    rank, tokens = norm.shape[0], kv.shape[0]
    for name, extent in (("rank", rank), ("rope", rope)):
        require(kernel, extent >= 2 and extent == power_of_2(extent), f"{name}={extent} is not a power of two")
    expect(kernel, "kv", kv, torch.bfloat16, (tokens, rank + rope))
    expect(kernel, "q", q, torch.bfloat16, (tokens, None, None), device=kv.device)
    heads, nope = q.shape[1], q.shape[2] - rope
    require(kernel, nope >= 0, f"q heads hold {q.shape[2]} numbers, fewer than the {rope} that rotate")
    expect(kernel, "cache", cache, torch.bfloat16, (None, rank + rope), device=kv.device)
    expect(kernel, "q_out", q_out, torch.bfloat16, (tokens, heads, rank + rope), device=kv.device)
    expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=kv.device)
    rope_mla_kernel[(tokens, heads + 1)](
        kv, q, table, kv_len, norm, cache, q_out, eps, T=tokens, HEADS=heads, NOPE=nope, RANK=rank, ROPE=rope,
        INTERLEAVED=interleaved, OVERLAP=overlap, launch_pdl=overlap, num_warps=1,
    )  # fmt: skip

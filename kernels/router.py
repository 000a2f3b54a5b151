"""Router: the gate product and the top-k choice with its weights, in one launch.

Reference (fp32): ``logits = x @ W.T + bias``; then, by ``mode``:

- ``softmax``: the k largest, weights ``softmax(logits)[chosen]``, divided by their sum where ``renormalise``
  (Qwen3-MoE). Renormalised, this equals gpt-oss's softmax over the k chosen logits, because the common factor
  cancels; ``softmax_of_chosen`` names that rule and computes the same numbers without the full sum.
- ``sigmoid``: scores ``sigmoid(logits)``, chosen by ``score + correction``, weights the scores, divided by their sum
  where ``renormalise``, times ``factor`` (DeepSeek-V3, GLM, MiMo with one expert group).

``forced`` (int32[P, k] and kv_len int32[1]) replaces the choice: the token at position p gets the experts of row
p mod P, as recorded or drawn beforehand, with the weights that their own scores give them.

Ties go to the lower expert. Shapes: x bf16[T, H], W bf16[E, H], bias bf16[E], correction fp32[E];
ids int32[T, k], weights fp32[T, k]. Byte floor: W and x once. Instruction floor: 1/8 of an MMA a weight, and
k (log2 E + 4) per expert and token for the choice.

E is too small to fill the card, so programs split K; the last of all to arrive adds the parts and chooses.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

from typing import Literal

import torch
import triton
import triton.language as tl

from workbench.kernels.arrive import arrive
from workbench.kernels.contract import expect, power_of_2, require
from workbench.kernels.floor import Floor
from workbench.kernels.skinny_gemm import SkinnyConfig, check_config, cut
from workbench.kernels.skinny_products import CHUNK_BF16, products_bf16
from workbench.kernels.workspace import Workspace

Mode = Literal["softmax", "softmax_of_chosen", "sigmoid"]
MODES: tuple[Mode, ...] = ("softmax", "softmax_of_chosen", "sigmoid")

SPACE = (
    SkinnyConfig(4, 1, 1, 8, 1),
    SkinnyConfig(4, 1, 1, 4, 1),
    SkinnyConfig(2, 1, 1, 16, 1),
    SkinnyConfig(8, 1, 1, 4, 1),
    SkinnyConfig(8, 1, 1, 2, 2),
)


def default_config(chunks: int) -> SkinnyConfig:
    """Choose by rule: four warps a program, K over as many programs as leave a warp at least one chunk, up to 8."""
    return SkinnyConfig(4, 1, 1, max(1, min(8, power_of_2(-(-chunks // 4)))), 1)


@triton.jit
def router_kernel(
    w_ptr,
    x_ptr,
    bias_ptr,
    correction_ptr,
    forced_ptr,
    kv_len_ptr,
    ids_ptr,
    weights_ptr,
    partial_ptr,
    counter_ptr,
    rows,
    columns,
    factor,
    period,
    FORCED: tl.constexpr,
    TOPK: tl.constexpr,
    K_WIDE: tl.constexpr,
    T_WIDE: tl.constexpr,
    E_WIDE: tl.constexpr,
    MODE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    T: tl.constexpr,
    TN: tl.constexpr,
    KW: tl.constexpr,
    RW: tl.constexpr,
    R: tl.constexpr,
    SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    acc = products_bf16(
        w_ptr, x_ptr, block, part, rows, columns, T, TN, KW, RW, R, SPLIT, TURNS, UNROLL, STAGED, OVERLAP
    )
    row = block * (RW * R * 16) + tl.arange(0, RW * R * 16)
    column = tl.arange(0, TN)
    mine = partial_ptr + (part * T + column)[None, :] * rows + row[:, None]
    tl.store(mine, acc, mask=(row < rows)[:, None] & (column < T)[None, :])
    if not arrive(counter_ptr, tl.num_programs(0) * SPLIT):
        return

    token = tl.arange(0, T_WIDE)
    expert = tl.arange(0, E_WIDE)
    ok = (token < T)[:, None] & (expert < rows)[None, :]
    logits = tl.zeros((T_WIDE, E_WIDE), tl.float32)
    for other in range(SPLIT):
        at = partial_ptr + (other * T + token)[:, None] * rows + expert[None, :]
        logits += tl.load(at, mask=ok, other=0.0, cache_modifier=".cg")
    if BIAS:
        logits += tl.load(bias_ptr + expert, mask=expert < rows, other=0.0).to(tl.float32)[None, :]
    logits = tl.where((expert < rows)[None, :], logits, float("-inf"))
    if MODE == 2:
        score = tl.where((expert < rows)[None, :], 1.0 / (1.0 + tl.exp(-logits)), float("-inf"))
        key = score + tl.load(correction_ptr + expert, mask=expert < rows, other=0.0)[None, :]
    else:
        score = logits
        key = logits
    slot = tl.arange(0, K_WIDE)
    chosen = tl.zeros((T_WIDE, K_WIDE), tl.int32)
    value = tl.full((T_WIDE, K_WIDE), float("-inf"), tl.float32)
    for j in tl.static_range(TOPK):
        best = tl.argmax(key, 1, tie_break_left=True)
        hit = expert[None, :] == best[:, None]
        taken = tl.sum(tl.where(hit, score, 0.0), 1)
        chosen = tl.where((slot == j)[None, :], best[:, None], chosen)
        value = tl.where((slot == j)[None, :], taken[:, None], value)
        key = tl.where(hit, float("-inf"), key)
    if FORCED:
        line = (tl.load(kv_len_ptr) - T + token) % period
        here = (token < T)[:, None] & (slot < TOPK)[None, :]
        chosen = tl.load(forced_ptr + line[:, None] * TOPK + slot[None, :], mask=here, other=0)
        for j in tl.static_range(TOPK):
            named = tl.sum(tl.where((slot == j)[None, :], chosen, 0), 1)
            taken = tl.sum(tl.where(expert[None, :] == named[:, None], score, 0.0), 1)
            value = tl.where((slot == j)[None, :], taken[:, None], value)
    if MODE == 2:
        value = tl.where((slot < TOPK)[None, :], value, 0.0)
        if RENORMALISE:
            value = value / tl.sum(value, 1)[:, None]
        value = value * factor
    else:
        top = tl.max(value, 1)
        value = tl.exp(value - top[:, None])
        if RENORMALISE or MODE == 1:
            value = value / tl.sum(value, 1)[:, None]
        else:
            value = value / tl.sum(tl.exp(logits - top[:, None]), 1)[:, None]
    at_out = token[:, None] * TOPK + slot[None, :]
    out_ok = (token < T)[:, None] & (slot < TOPK)[None, :]
    tl.store(ids_ptr + at_out, chosen, mask=out_ok)
    tl.store(weights_ptr + at_out, value, mask=out_ok)


def floor(tokens: int, experts: int, hidden: int, top_k: int) -> Floor:
    """Return the floor."""
    choice = tokens * experts * top_k * (experts.bit_length() + 4)
    return Floor(2 * hidden * (experts + tokens), 8 * tokens * top_k, experts * hidden // 8 + choice)


def route(
    x: torch.Tensor,
    w: torch.Tensor,
    top_k: int,
    *,
    mode: Mode = "softmax",
    renormalise: bool = True,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    factor: float = 1.0,
    forced: tuple[torch.Tensor, torch.Tensor] | None = None,
    ids: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: SkinnyConfig | None = None,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(ids, weights)``, int32 and fp32 [T, k], experts of a token from the highest key down.

    ``forced``: the table and kv_len of the module text, with experts below E and T at most kv_len (both on the device).

    ``overlap``: overlap.py. Raises InputError before launch for shapes, types or options that do not fit.
    """
    kernel = "route"
    expect(kernel, "w", w, torch.bfloat16, (None, None))
    experts, hidden = w.shape
    expect(kernel, "x", x, torch.bfloat16, (None, hidden), device=w.device)
    tokens = x.shape[0]
    require(kernel, 1 <= tokens <= 16, f"x holds {tokens} tokens, the kernel takes 1 to 16")
    require(kernel, hidden % CHUNK_BF16 == 0, f"hidden={hidden} is not a multiple of {CHUNK_BF16}")
    require(kernel, experts <= 1024, f"{experts} experts, the kernel takes up to 1024")
    require(kernel, 1 <= top_k <= min(experts, 32), f"top_k={top_k} does not fit {experts} experts (at most 32)")
    require(kernel, mode in MODES, f"mode={mode!r} is unknown", hint=f"one of {', '.join(MODES)}")
    require(
        kernel, (correction is not None) == (mode == "sigmoid"), "correction goes with mode='sigmoid', and only then"
    )
    if bias is not None:
        expect(kernel, "bias", bias, torch.bfloat16, (experts,), device=w.device)
    if correction is not None:
        expect(kernel, "correction", correction, torch.float32, (experts,), device=w.device)
    table, kv_len = forced or (w, w)
    if forced is not None:
        expect(kernel, "forced", table, torch.int32, (None, top_k), device=w.device)
        expect(kernel, "kv_len", kv_len, torch.int32, (1,), device=w.device)
    config = config or default_config(hidden // CHUNK_BF16)
    check_config(kernel, config)
    if ids is None:
        ids = torch.empty(tokens, top_k, dtype=torch.int32, device=w.device)
    if weights is None:
        weights = torch.empty(tokens, top_k, dtype=torch.float32, device=w.device)
    expect(kernel, "ids", ids, torch.int32, (tokens, top_k), device=w.device)
    expect(kernel, "weights", weights, torch.float32, (tokens, top_k), device=w.device)
    workspace = workspace or Workspace(w.device)
    partial, counters = workspace.take(kernel, config.split * tokens * experts, 1)
    blocks = -(-experts // (config.rw * config.r * 16))
    router_kernel[(blocks, config.split)](
        w, x, x if bias is None else bias, partial if correction is None else correction, table, kv_len, ids,
        weights, partial, counters, experts, hidden, factor, len(table), FORCED=forced is not None, TOPK=top_k,
        K_WIDE=power_of_2(top_k), T_WIDE=power_of_2(tokens), E_WIDE=power_of_2(experts), MODE=MODES.index(mode),
        RENORMALISE=renormalise, BIAS=bias is not None,
        **cut(config, tokens, hidden // CHUNK_BF16, overlap),
    )  # fmt: skip
    return ids, weights

"""What ``bench.py`` runs: each kernel at true shapes, with its float64 check and its floor.

Weights and caches come in enough copies that no replay finds them in L2; activations are as hot as in a real step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.kernels import (
    attention,
    chain_verify,
    live_quant,
    lm_head,
    mla,
    mxfp4_experts,
    nucleus,
    reference,
    rms_norm,
    rope,
    router,
    skinny_gemm,
)
from workbench.kernels.floor import Floor
from workbench.kernels.mxfp4_layout import dequantise, restore
from workbench.kernels.reference import relative_error
from workbench.kernels.workspace import Workspace

DEVICE = "cuda"

#: Bytes that a rotation of copies must at least read: several times any L2.
ROTATION_BYTES = 320_000_000
BF16_TOLERANCE = 4e-3


@dataclass(slots=True)
class Case:
    """One kernel at one shape.

    ``launch(copy, config)`` launches on rotating inputs; ``check(config)`` returns the error against float64 of a
    run into poisoned outputs; ``configs`` starts with the default. ``baseline(copy)`` is the library's way, if any.
    """

    name: str
    shape: str
    floor: Floor
    copies: int
    configs: tuple[Any, ...]
    launch: Callable[[int, Any], object]
    check: Callable[[Any], float]
    tolerance: float = BF16_TOLERANCE
    baseline: Callable[[int], object] | None = None
    note: str = field(default="")


Builder = Callable[[], Case]


def _copies(bytes_read: int, most: int = 64) -> int:
    return max(2, min(most, -(-ROTATION_BYTES // bytes_read)))


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def _space(default: Any, space: tuple[Any, ...]) -> tuple[Any, ...]:
    return (default, *(config for config in space if config != default))


def _words(experts: int, tiles: int, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights straight in kernel form: every bit pattern is a weight; scales 2^-17 to 2^-9."""
    words = torch.randint(-(2**31), 2**31 - 1, (experts, tiles, chunks, 128), dtype=torch.int32, device=DEVICE)
    scale_bytes = torch.randint(110, 119, (experts, tiles, chunks, 8, 4), dtype=torch.uint8, device=DEVICE)
    return words, scale_bytes.view(torch.int32).view(experts, tiles, chunks, 8)


def _choices(copies: int, tokens: int, experts: int, top_k: int) -> list[torch.Tensor]:
    return [torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.to(torch.int32) for _ in range(copies)]


def _distinct(choices: list[torch.Tensor]) -> int:
    return round(sum(len(set(ids.flatten().tolist())) for ids in choices) / len(choices))


def _dequantised(
    words: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, order: Any, shape: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    chosen = sorted(set(ids.flatten().tolist()))
    return {e: dequantise(*restore(words[e : e + 1], scales[e : e + 1], order)).view(shape) for e in chosen}


def _poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


@dataclass(frozen=True, slots=True)
class _Experts:
    label: str
    experts: int
    top_k: int
    hidden: int
    inter: int
    gptoss: bool


GPT_OSS = _Experts("gpt-oss-120b", 128, 4, 2880, 2880, True)
GLM_RANK = _Experts("GLM-5.2 TP8", 256, 8, 6144, 256, False)


def _gate_up(model: _Experts, tokens: int) -> Case:
    tiles, chunks = model.inter // 8, model.hidden // 64
    words, scales = _words(model.experts, tiles, chunks)
    bytes_each = model.top_k * tiles * 16 * model.hidden * 17 // 32
    choices = _choices(_copies(bytes_each), tokens, model.experts, model.top_k)
    x = _randn(tokens, model.hidden)
    bias = _randn(model.experts, 2, model.inter) if model.gptoss else None
    activation: mxfp4_experts.Activation = "gptoss" if model.gptoss else "silu"
    workspace = Workspace(DEVICE)
    out = torch.empty(tokens * model.top_k, model.inter, dtype=torch.bfloat16, device=DEVICE)
    wanted: list[torch.Tensor] = []

    def run(ids: torch.Tensor, into: torch.Tensor, config: Any) -> torch.Tensor:
        return mxfp4_experts.gate_up(
            x, ids, words, scales, bias=bias, activation=activation, out=into, workspace=workspace, config=config
        )

    def check(config: Any) -> float:
        if not wanted:
            w = _dequantised(words, scales, choices[0], "stacked", (2, model.inter, model.hidden))
            wanted.append(reference.gate_up(x, choices[0], w, bias, activation))
        got = run(choices[0], _poisoned(tokens * model.top_k, model.inter), config)
        return relative_error(got.double() / 2.0**mxfp4_experts.H_EXPONENT, wanted[0])

    default = mxfp4_experts.default_config(tiles, chunks, tokens * model.top_k)
    return Case(
        f"mxfp4 gate-up T={tokens}",
        model.label,
        mxfp4_experts.floor(tokens, _distinct(choices), tiles * 16, model.hidden),
        len(choices),
        _space(default, mxfp4_experts.SPACE),
        lambda copy, config: run(choices[copy], out, config),
        check,
    )


def _down(model: _Experts, tokens: int) -> Case:
    tiles, chunks = model.hidden // 16, model.inter // 64
    words, scales = _words(model.experts, tiles, chunks)
    bytes_each = model.top_k * model.hidden * model.inter * 17 // 32
    choices = _choices(_copies(bytes_each), tokens, model.experts, model.top_k)
    plain = _randn(tokens * model.top_k, model.inter)
    h = (plain.double() * 2.0**mxfp4_experts.H_EXPONENT).bfloat16()
    weights = torch.rand(tokens, model.top_k, device=DEVICE)
    bias = _randn(model.experts, model.hidden) if model.gptoss else None
    workspace = Workspace(DEVICE)
    out = torch.empty(tokens, model.hidden, dtype=torch.bfloat16, device=DEVICE)
    wanted: list[torch.Tensor] = []

    def run(ids: torch.Tensor, into: torch.Tensor, config: Any) -> torch.Tensor:
        return mxfp4_experts.down(
            h, ids, weights, words, scales, bias=bias, out=into, workspace=workspace, config=config
        )

    def check(config: Any) -> float:
        if not wanted:
            w = _dequantised(words, scales, choices[0], "plain", (model.hidden, model.inter))
            wanted.append(reference.down(plain, choices[0], weights, w, bias))
        return relative_error(run(choices[0], _poisoned(tokens, model.hidden), config), wanted[0])

    default = mxfp4_experts.default_config(tiles, chunks, tokens * model.top_k)
    return Case(
        f"mxfp4 down T={tokens}",
        model.label,
        mxfp4_experts.floor(tokens, _distinct(choices), model.hidden, model.inter),
        len(choices),
        _space(default, mxfp4_experts.SPACE),
        lambda copy, config: run(choices[copy], out, config),
        check,
    )


def _expert_pass(model: _Experts, tokens: int) -> Case:
    """Gate-up and down behind each other, as a layer runs them."""
    up_tiles, up_chunks = model.inter // 8, model.hidden // 64
    down_tiles, down_chunks = model.hidden // 16, model.inter // 64
    up_words, up_scales = _words(model.experts, up_tiles, up_chunks)
    down_words, down_scales = _words(model.experts, down_tiles, down_chunks)
    each = 3 * model.hidden * model.inter * 17 // 32
    choices = _choices(_copies(model.top_k * each), tokens, model.experts, model.top_k)
    x, weights = _randn(tokens, model.hidden), torch.rand(tokens, model.top_k, device=DEVICE)
    workspace = Workspace(DEVICE)
    h = torch.empty(tokens * model.top_k, model.inter, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(tokens, model.hidden, dtype=torch.bfloat16, device=DEVICE)
    wanted: list[torch.Tensor] = []

    def run(ids: torch.Tensor, into: torch.Tensor, config: Any) -> torch.Tensor:
        mxfp4_experts.gate_up(x, ids, up_words, up_scales, out=h, workspace=workspace, config=config[0])
        return mxfp4_experts.down(
            h, ids, weights, down_words, down_scales, out=into, workspace=workspace, config=config[1]
        )

    def check(config: Any) -> float:
        if not wanted:
            up = _dequantised(up_words, up_scales, choices[0], "stacked", (2, model.inter, model.hidden))
            lower = _dequantised(down_words, down_scales, choices[0], "plain", (model.hidden, model.inter))
            middle = reference.gate_up(x, choices[0], up, None, "silu")
            wanted.append(reference.down(middle, choices[0], weights, lower))
        return relative_error(run(choices[0], _poisoned(tokens, model.hidden), config), wanted[0])

    pairs = tokens * model.top_k
    default = (
        mxfp4_experts.default_config(up_tiles, up_chunks, pairs),
        mxfp4_experts.default_config(down_tiles, down_chunks, pairs),
    )
    up_floor = mxfp4_experts.floor(tokens, _distinct(choices), up_tiles * 16, model.hidden)
    down_floor = mxfp4_experts.floor(tokens, _distinct(choices), model.hidden, model.inter)
    total = Floor(
        up_floor.bytes_read + down_floor.bytes_read,
        up_floor.bytes_written + down_floor.bytes_written,
        up_floor.lane_instructions + down_floor.lane_instructions,
    )
    some = mxfp4_experts.SPACE[:5]
    return Case(
        f"mxfp4 expert pass T={tokens}",
        model.label,
        total,
        len(choices),
        _space(default, tuple((config, config) for config in some)),
        lambda copy, config: run(choices[copy], out, config),
        check,
        tolerance=2 * BF16_TOLERANCE,
    )


def _skinny_bf16(shape: str, tokens: int, rows: int, columns: int) -> Case:
    copies = _copies(2 * rows * columns)
    w = [(torch.randn(rows, columns, device=DEVICE) / columns**0.5).bfloat16() for _ in range(copies)]
    x, workspace = _randn(tokens, columns), Workspace(DEVICE)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=DEVICE)

    def run(copy: int, into: torch.Tensor, config: Any) -> torch.Tensor:
        return skinny_gemm.skinny_bf16(x, w[copy], out=into, workspace=workspace, config=config)

    return Case(
        f"skinny bf16 T={tokens}",
        shape,
        skinny_gemm.floor(tokens, rows, columns, 2),
        copies,
        _space(skinny_gemm.default_config(rows, columns // 64), skinny_gemm.SPACE),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, _poisoned(tokens, rows), config), x.double() @ w[0].double().T),
        baseline=lambda copy: torch.mm(x, w[copy].T, out=out),
    )


def _fp8_weights(rows: int, columns: int, copies: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights = [torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(copies)]
    scales = [torch.rand(-(-rows // 128), columns // 128, device=DEVICE) / columns**0.5 for _ in range(copies)]
    return weights, scales


def _skinny_fp8(shape: str, tokens: int, rows: int, columns: int) -> Case:
    copies = _copies(rows * columns)
    w, w_scales = _fp8_weights(rows, columns, copies)
    x, workspace = _randn(tokens, columns), Workspace(DEVICE)
    q, scales = live_quant.quantise(x)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=DEVICE)
    want = (q.double() * scales.double().repeat_interleave(128, 1)) @ reference.dequantise_fp8(w[0], w_scales[0]).T

    def run(copy: int, into: torch.Tensor, config: Any) -> torch.Tensor:
        return skinny_gemm.skinny_fp8(q, scales, w[copy], w_scales[copy], out=into, workspace=workspace, config=config)

    return Case(
        f"skinny fp8 T={tokens}",
        shape,
        skinny_gemm.floor(tokens, rows, columns, 1),
        copies,
        _space(skinny_gemm.default_config(rows, columns // 128), skinny_gemm.SPACE),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, _poisoned(tokens, rows), config), want),
    )


def _live_quant(form: live_quant.Form, shape: str, tokens: int, rows: int, columns: int) -> Case:
    copies = _copies(rows * columns)
    w, w_scales = _fp8_weights(rows, columns, copies)
    x, workspace = _randn(tokens, columns), Workspace(DEVICE)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=DEVICE)
    want = reference.quantise_dequantise(x) @ reference.dequantise_fp8(w[0], w_scales[0]).T
    default: Any = live_quant.NAIVE
    space: tuple[Any, ...] = ()
    if form == "separate":
        default, space = skinny_gemm.default_config(rows, columns // 128), skinny_gemm.SPACE[:6]
    elif form == "fused":
        split = live_quant.default_split(rows, columns // 128, live_quant.NAIVE.block)
        default, space = live_quant.FusedConfig(split=split), live_quant.SPACE

    def run(copy: int, into: torch.Tensor, config: Any) -> torch.Tensor:
        return live_quant.live_quant_gemm(
            x, w[copy], w_scales[copy], form=form, out=into, workspace=workspace, config=config
        )

    return Case(
        f"live quant {form} T={tokens}",
        shape,
        live_quant.floor(tokens, rows, columns, form),
        copies,
        _space(default, space),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, _poisoned(tokens, rows), config), want),
    )


def _gqa(
    shape: str, tokens: int, heads: int, kv_heads: int, dk: int, dv: int, context: int, window: int | None
) -> Case:
    visible = context if window is None else min(context, window + tokens - 1)
    copies = _copies(2 * kv_heads * visible * (dk + dv))
    k = [_randn(kv_heads, context + 64, dk) for _ in range(copies)]
    v = [_randn(kv_heads, context + 64, dv) for _ in range(copies)]
    q, workspace = _randn(tokens, heads, dk), Workspace(DEVICE)
    sinks = _randn(heads) if window is not None else None
    length = torch.tensor([context], dtype=torch.int32, device=DEVICE)
    out = torch.empty(tokens, heads, dv, dtype=torch.bfloat16, device=DEVICE)
    want = reference.gqa(q, k[0], v[0], context, scale=dk**-0.5, window=window, sinks=sinks)

    def run(copy: int, into: torch.Tensor, config: Any) -> torch.Tensor:
        return attention.gqa_decode(
            q, k[copy], v[copy], length, scale=dk**-0.5, window=window, sinks=sinks, out=into, workspace=workspace,
            config=config,
        )  # fmt: skip

    return Case(
        f"gqa {'full' if window is None else 'window'} T={tokens}",
        f"{shape}, {context} ctx",
        attention.floor(tokens, heads, kv_heads, dk, dv, visible),
        copies,
        _space(None, attention.SPACE),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, _poisoned(tokens, heads, dv), config), want),
        tolerance=2 * BF16_TOLERANCE,
    )


def _mla(tokens: int, heads: int, context: int) -> Case:
    rank, rope_dim = 512, 64
    copies = _copies(2 * context * (rank + rope_dim))
    cache = [_randn(context + 64, rank + rope_dim) for _ in range(copies)]
    q, workspace = _randn(tokens, heads, rank + rope_dim), Workspace(DEVICE)
    length = torch.tensor([context], dtype=torch.int32, device=DEVICE)
    out = torch.empty(tokens, heads, rank, dtype=torch.bfloat16, device=DEVICE)
    want = reference.mla(q, cache[0], context, rank=rank, scale=0.06)

    def run(copy: int, into: torch.Tensor, config: Any) -> torch.Tensor:
        return mla.mla_decode(
            q, cache[copy], length, rank=rank, scale=0.06, out=into, workspace=workspace, config=config
        )

    return Case(
        f"mla T={tokens}",
        f"GLM-5.2 TP8, {context} ctx",
        mla.floor(tokens, heads, rank, rope_dim, context),
        copies,
        mla.SPACE,
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, _poisoned(tokens, heads, rank), config), want),
        tolerance=2 * BF16_TOLERANCE,
    )


def _rms_norm(tokens: int, hidden: int, quantise: bool) -> Case:
    x, start, weight = _randn(tokens, hidden), _randn(tokens, hidden), _randn(hidden)
    residual = start.clone()
    out = torch.empty_like(x)

    def run(config: Any) -> torch.Tensor:
        if quantise:
            q, scales = rms_norm.rms_norm_quantise(x, weight, eps=1e-5, residual=residual, config=config)
            return q.double() * scales.double().repeat_interleave(128, 1)
        return rms_norm.rms_norm(x, weight, eps=1e-5, residual=residual, out=out, config=config)

    def launch(_: int, config: Any) -> object:
        if quantise:
            return rms_norm.rms_norm_quantise(x, weight, eps=1e-5, residual=residual, config=config)
        return rms_norm.rms_norm(x, weight, eps=1e-5, residual=residual, out=out, config=config)

    def check(config: Any) -> float:
        residual.copy_(start)
        got = run(config)
        error = relative_error(got, reference.rms_norm(x.double() + start.double(), weight, 1e-5))
        residual.zero_()
        return error

    return Case(
        f"rms_norm{'+fp8' if quantise else ''} T={tokens}",
        f"hidden {hidden}",
        rms_norm.floor(tokens, hidden, residual=True, quantise=quantise),
        1,
        _space(rms_norm.NormConfig(), rms_norm.SPACE),
        launch,
        check,
        tolerance=4e-2 if quantise else BF16_TOLERANCE,
        note="hot",
    )


def _rope(tokens: int) -> Case:
    heads, kv_heads, dim, context = 32, 4, 128, 4096
    qkv = _randn(tokens, (heads + 2 * kv_heads) * dim)
    table = rope.rope_table(context, dim, 1e6, DEVICE)
    length = torch.tensor([context - 7], dtype=torch.int32, device=DEVICE)
    k, v = (torch.zeros(kv_heads, context, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    norm = torch.ones(dim, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=DEVICE)

    def run(into: torch.Tensor, config: Any) -> torch.Tensor:
        return rope.rope_write(qkv, table, length, k, v, heads=heads, q_norm=norm, k_norm=norm, out=into, config=config)

    def check(config: Any) -> float:
        got = run(_poisoned(tokens, heads, dim), config)
        q = qkv[:, : heads * dim].view(tokens, heads, dim)
        positions = torch.arange(context - 7 - tokens, context - 7, device=DEVICE)
        return relative_error(
            got, reference.rotate(reference.rms_norm(q, norm, 1e-6), table, positions, interleaved=False)
        )

    return Case(
        f"rope+kv write T={tokens}",
        "Qwen3-30B",
        rope.floor(tokens, heads, kv_heads, dim, dim, dim),
        1,
        rope.SPACE,
        lambda _, config: run(out, config),
        check,
        note="hot",
    )


def _router(shape: str, tokens: int, experts: int, hidden: int, top_k: int) -> Case:
    copies = _copies(2 * experts * hidden)
    w = [(torch.randn(experts, hidden, device=DEVICE) / hidden**0.5).bfloat16() for _ in range(copies)]
    x, workspace = _randn(tokens, hidden), Workspace(DEVICE)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=DEVICE)
    weights = torch.empty(tokens, top_k, device=DEVICE)

    def run(copy: int, config: Any) -> None:
        router.route(x, w[copy], top_k, ids=ids, weights=weights, workspace=workspace, config=config)

    def check(config: Any) -> float:
        weights.fill_(float("nan"))
        run(0, config)
        logits = x.double() @ w[0].double().T
        want_ids, want = reference.route(logits, top_k, "softmax", renormalise=True, correction=None, factor=1.0)
        return relative_error(weights, want) + float((ids != want_ids).sum())

    return Case(
        f"router T={tokens}",
        shape,
        router.floor(tokens, experts, hidden, top_k),
        copies,
        _space(router.default_config(hidden // 64), router.SPACE),
        run,
        check,
        tolerance=1e-4,
    )


def _lm_head(tokens: int, sample: bool) -> Case:
    vocab, hidden = 201088, 2880
    w = [(torch.randn(vocab, hidden, device=DEVICE) / hidden**0.5).bfloat16() for _ in range(2)]
    x, workspace = _randn(tokens, hidden), Workspace(DEVICE)
    out = torch.empty(tokens, dtype=torch.int32, device=DEVICE)
    logits = torch.empty(tokens, vocab, device=DEVICE) if sample else None
    lse = torch.empty(tokens, device=DEVICE) if sample else None
    rng = torch.tensor([1, 0], dtype=torch.int64, device=DEVICE)

    def run(copy: int, config: Any, temperature: float) -> torch.Tensor:
        return lm_head.lm_head(
            x, w[copy], temperature=temperature, rng=rng, logits=logits, lse=lse, out=out, workspace=workspace,
            config=config,
        )  # fmt: skip

    def check(config: Any) -> float:
        out.fill_(-1)
        want = x.double() @ w[0].double().T
        chosen = run(0, config, 0.0).long()
        error = float((want.gather(1, chosen[:, None])[:, 0] - want.amax(1)).abs().max())
        if logits is not None and lse is not None:
            run(0, config, 1.0)
            error += relative_error(logits, want) + relative_error(lse, want.logsumexp(1))
        return error

    return Case(
        f"lm_head {'sample' if sample else 'greedy'} T={tokens}",
        "gpt-oss",
        lm_head.floor(tokens, vocab, hidden, sample=sample, logits=sample),
        2,
        _space(lm_head.HeadConfig(), lm_head.SPACE),
        lambda copy, config: run(copy, config, 1.0 if sample else 0.0),
        check,
        tolerance=1e-4,
        baseline=lambda copy: torch.mm(x, w[copy].T).argmax(1),
    )


def _nucleus(tokens: int) -> Case:
    vocab = 201088
    logits = torch.randn(tokens, vocab, device=DEVICE) * 3
    lse = logits.double().logsumexp(1).float()
    rng = torch.tensor([1, 0], dtype=torch.int64, device=DEVICE)
    start = logits.softmax(1).multinomial(1)[:, 0].to(torch.int32)
    chosen, workspace = start.clone(), Workspace(DEVICE)

    def run(config: Any) -> torch.Tensor:
        return nucleus.nucleus(
            logits, lse, chosen, rng, top_p=0.95, temperature=1.0, workspace=workspace, config=config
        )

    def check(config: Any) -> float:
        """Return how far the mass above any kept token exceeds top-p."""
        chosen.copy_(start)
        kept = logits.gather(1, run(config).long()[:, None])
        p = logits.double().softmax(1)
        mass = torch.where(logits > kept, p, 0.0).sum(1)
        return max(0.0, float(mass.max()) - 0.95)

    return Case(
        f"nucleus T={tokens}",
        "gpt-oss vocabulary",
        nucleus.floor(tokens, vocab),
        1,
        _space(nucleus.NucleusConfig(), nucleus.SPACE),
        lambda _, config: run(config),
        check,
        tolerance=1e-5,
        note="hot; every draw already inside",
    )


def _verify(tokens: int) -> Case:
    vocab = 201088
    logits = torch.randn(tokens, vocab, device=DEVICE)
    logits[torch.arange(tokens), torch.arange(tokens)] = 40.0
    lse = logits.double().logsumexp(1).float()
    drafts = torch.arange(tokens - 1, dtype=torch.int32, device=DEVICE)
    rng = torch.tensor([1, 0], dtype=torch.int64, device=DEVICE)
    workspace = Workspace(DEVICE)
    committed = torch.empty(tokens, dtype=torch.int32, device=DEVICE)
    count = torch.empty(1, dtype=torch.int32, device=DEVICE)

    def run(config: Any) -> None:
        chain_verify.verify_rejection(
            logits, lse, drafts, rng, temperature=1.0, committed=committed, count=count, workspace=workspace,
            config=config,
        )  # fmt: skip

    def check(config: Any) -> float:
        committed.fill_(-7)
        run(config)
        return float((committed != torch.arange(tokens, device=DEVICE)).sum()) + float(count) - tokens

    return Case(
        f"verify rejection T={tokens}",
        "gpt-oss vocabulary",
        chain_verify.floor(tokens, vocab, rejection=True),
        1,
        _space(chain_verify.VerifyConfig(), chain_verify.SPACE),
        lambda _, config: run(config),
        check,
        tolerance=0.0,
        note="hot",
    )


def builders() -> Iterator[tuple[str, Builder]]:
    """Yield ``(name, builder)`` in the order of value; a builder allocates only when called."""
    for tokens in (1, 4, 16):
        yield "mxfp4", lambda tokens=tokens: _gate_up(GPT_OSS, tokens)  # type: ignore[misc]
        yield "mxfp4", lambda tokens=tokens: _down(GPT_OSS, tokens)  # type: ignore[misc]
    yield "mxfp4", lambda: _expert_pass(GPT_OSS, 1)
    for tokens in (1, 6):
        yield "mxfp4", lambda tokens=tokens: _gate_up(GLM_RANK, tokens)  # type: ignore[misc]
        yield "mxfp4", lambda tokens=tokens: _down(GLM_RANK, tokens)  # type: ignore[misc]
    yield "attention", lambda: _gqa("gpt-oss", 1, 64, 8, 64, 64, 8192, None)
    yield "attention", lambda: _gqa("gpt-oss", 1, 64, 8, 64, 64, 8192, 128)
    yield "attention", lambda: _gqa("Qwen3-30B", 8, 32, 4, 128, 128, 8192, None)
    yield "mla", lambda: _mla(1, 8, 8192)
    yield "mla", lambda: _mla(6, 8, 8192)
    yield "rms_norm", lambda: _rms_norm(1, 6144, False)
    yield "rms_norm", lambda: _rms_norm(1, 6144, True)
    yield "rope", lambda: _rope(1)
    yield "router", lambda: _router("gpt-oss-120b", 1, 128, 2880, 4)
    yield "router", lambda: _router("GLM-5.2", 6, 256, 6144, 8)
    yield "lm_head", lambda: _lm_head(1, False)
    yield "lm_head", lambda: _lm_head(8, True)
    yield "nucleus", lambda: _nucleus(1)
    yield "skinny", lambda: _skinny_bf16("gpt-oss qkv", 1, 5120, 2880)
    yield "skinny", lambda: _skinny_bf16("gpt-oss o_proj", 1, 2880, 4096)
    yield "skinny", lambda: _skinny_bf16("gpt-oss qkv", 16, 5120, 2880)
    yield "skinny", lambda: _skinny_fp8("GLM-5.2 q_a+kv_a", 1, 2624, 6144)
    yield "skinny", lambda: _skinny_fp8("GLM-5.2 o TP8", 8, 6144, 2048)
    for form in live_quant.FORMS:
        yield "live_quant", lambda form=form: _live_quant(form, "GLM-5.2 q_a+kv_a", 1, 2624, 6144)  # type: ignore[misc]
    yield "verify", lambda: _verify(8)

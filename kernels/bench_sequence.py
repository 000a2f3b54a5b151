"""Benchmark cases: attention, norms, RoPE, top-p and verification."""

from typing import Any

import torch

from workbench.kernels import attention, bench_case, chain_verify, mla, nucleus, reference, rms_norm, rope
from workbench.kernels.bench_case import BF16_TOLERANCE, Case, poisoned, randn, rotation, space
from workbench.kernels.reference import relative_error
from workbench.kernels.workspace import Workspace


def gqa_case(
    shape: str, tokens: int, heads: int, kv_heads: int, dk: int, dv: int, context: int, window: int | None
) -> Case:
    """Attention of one layer at ``context`` positions."""
    visible = context if window is None else min(context, window + tokens - 1)
    copies = rotation(2 * kv_heads * visible * (dk + dv))
    k = [randn(kv_heads, context + 64, dk) for _ in range(copies)]
    v = [randn(kv_heads, context + 64, dv) for _ in range(copies)]
    q, workspace = randn(tokens, heads, dk), Workspace(bench_case.DEVICE)
    sinks = randn(heads) if window is not None else None
    length = torch.tensor([context], dtype=torch.int32, device=bench_case.DEVICE)
    out = torch.empty(tokens, heads, dv, dtype=torch.bfloat16, device=bench_case.DEVICE)
    want = reference.gqa(q, k[0], v[0], context, scale=dk**-0.5, window=window, sinks=sinks)

    def run(copy: int, into: torch.Tensor, config: Any, overlap: bool = False) -> torch.Tensor:
        return attention.gqa_decode(
            q, k[copy], v[copy], length, scale=dk**-0.5, window=window, sinks=sinks, out=into, workspace=workspace,
            config=config, overlap=overlap,
        )  # fmt: skip

    return Case(
        f"gqa {'full' if window is None else 'window'} T={tokens}",
        f"{shape}, {context} ctx",
        attention.floor(tokens, heads, kv_heads, dk, dv, visible),
        copies,
        space(None, attention.SPACE),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, poisoned(tokens, heads, dv), config), want),
        tolerance=2 * BF16_TOLERANCE,
        overlapped=lambda copy, config: run(copy, out, config, True),
    )


def mla_case(tokens: int, heads: int, context: int) -> Case:
    """Absorbed attention of one layer at ``context`` positions."""
    rank, rope_dim = 512, 64
    copies = rotation(2 * context * (rank + rope_dim))
    cache = [randn(context + 64, rank + rope_dim) for _ in range(copies)]
    q, workspace = randn(tokens, heads, rank + rope_dim), Workspace(bench_case.DEVICE)
    length = torch.tensor([context], dtype=torch.int32, device=bench_case.DEVICE)
    out = torch.empty(tokens, heads, rank, dtype=torch.bfloat16, device=bench_case.DEVICE)
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
        lambda config: relative_error(run(0, poisoned(tokens, heads, rank), config), want),
        tolerance=2 * BF16_TOLERANCE,
    )


def rms_norm_case(tokens: int, hidden: int, quantise: bool) -> Case:
    """The norm before a projection, residual included."""
    x, start, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
    residual = start.clone()
    out = torch.empty_like(x)

    def run(config: Any) -> torch.Tensor:
        if quantise:
            q, scales = rms_norm.rms_norm_quantise(x, weight, eps=1e-5, residual=residual, config=config)
            return q.double() * scales.double().repeat_interleave(128, 1)
        return rms_norm.rms_norm(x, weight, eps=1e-5, residual=residual, out=out, config=config)

    def launch(_: int, config: Any, overlap: bool = False) -> object:
        if quantise:
            return rms_norm.rms_norm_quantise(x, weight, eps=1e-5, residual=residual, config=config, overlap=overlap)
        return rms_norm.rms_norm(x, weight, eps=1e-5, residual=residual, out=out, config=config, overlap=overlap)

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
        space(rms_norm.NormConfig(), rms_norm.SPACE),
        launch,
        check,
        tolerance=4e-2 if quantise else BF16_TOLERANCE,
        overlapped=lambda copy, config: launch(copy, config, True),
        note="hot",
    )


def rope_case(tokens: int) -> Case:
    """RoPE with QK-norm and the cache write of one layer."""
    heads, kv_heads, dim, context = 32, 4, 128, 4096
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim)
    table = rope.rope_table(context, dim, 1e6, bench_case.DEVICE)
    length = torch.tensor([context - 7], dtype=torch.int32, device=bench_case.DEVICE)
    k, v = (torch.zeros(kv_heads, context, dim, dtype=torch.bfloat16, device=bench_case.DEVICE) for _ in range(2))
    norm = torch.ones(dim, dtype=torch.bfloat16, device=bench_case.DEVICE)
    out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=bench_case.DEVICE)

    def run(into: torch.Tensor, config: Any) -> torch.Tensor:
        return rope.rope_write(qkv, table, length, k, v, heads=heads, q_norm=norm, k_norm=norm, out=into, config=config)

    def check(config: Any) -> float:
        got = run(poisoned(tokens, heads, dim), config)
        q = qkv[:, : heads * dim].view(tokens, heads, dim)
        positions = torch.arange(context - 7 - tokens, context - 7, device=bench_case.DEVICE)
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


def nucleus_case(tokens: int) -> Case:
    """Top-p behind the head."""
    vocab = 201088
    logits = torch.randn(tokens, vocab, device=bench_case.DEVICE) * 3
    lse = logits.double().logsumexp(1).float()
    rng = torch.tensor([1, 0], dtype=torch.int64, device=bench_case.DEVICE)
    start = logits.softmax(1).multinomial(1)[:, 0].to(torch.int32)
    chosen, workspace = start.clone(), Workspace(bench_case.DEVICE)

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
        space(nucleus.NucleusConfig(), nucleus.SPACE),
        lambda _, config: run(config),
        check,
        tolerance=1e-5,
        note="hot; every draw already inside",
    )


def verify_case(tokens: int) -> Case:
    """Rejection sampling of a chain that stands."""
    vocab = 201088
    logits = torch.randn(tokens, vocab, device=bench_case.DEVICE)
    logits[torch.arange(tokens), torch.arange(tokens)] = 40.0
    lse = logits.double().logsumexp(1).float()
    drafts = torch.arange(tokens - 1, dtype=torch.int32, device=bench_case.DEVICE)
    rng = torch.tensor([1, 0], dtype=torch.int64, device=bench_case.DEVICE)
    workspace = Workspace(bench_case.DEVICE)
    committed = torch.empty(tokens, dtype=torch.int32, device=bench_case.DEVICE)
    count = torch.empty(1, dtype=torch.int32, device=bench_case.DEVICE)

    def run(config: Any) -> None:
        chain_verify.verify_rejection(
            logits, lse, drafts, rng, temperature=1.0, committed=committed, count=count, workspace=workspace,
            config=config,
        )  # fmt: skip

    def check(config: Any) -> float:
        committed.fill_(-7)
        run(config)
        return float((committed != torch.arange(tokens, device=bench_case.DEVICE)).sum()) + float(count) - tokens

    return Case(
        f"verify rejection T={tokens}",
        "gpt-oss vocabulary",
        chain_verify.floor(tokens, vocab, rejection=True),
        1,
        space(chain_verify.VerifyConfig(), chain_verify.SPACE),
        lambda _, config: run(config),
        check,
        tolerance=0.0,
        note="hot",
    )

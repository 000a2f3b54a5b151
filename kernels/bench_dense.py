"""Benchmark cases: dense products, live quantisation, router, LM head."""

from typing import Any

import torch

from workbench.kernels import bench_case, live_quant, lm_head, pq_gemm, reference, router, skinny_gemm
from workbench.kernels.bench_case import Case, poisoned, randn, rotation, space
from workbench.kernels.reference import relative_error
from workbench.kernels.workspace import Workspace


def skinny_bf16_case(shape: str, tokens: int, rows: int, columns: int) -> Case:
    """One BF16 projection."""
    copies = rotation(2 * rows * columns)
    w = [(torch.randn(rows, columns, device=bench_case.DEVICE) / columns**0.5).bfloat16() for _ in range(copies)]
    x, workspace = randn(tokens, columns), Workspace(bench_case.DEVICE)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=bench_case.DEVICE)

    def run(copy: int, into: torch.Tensor, config: Any, overlap: bool = False) -> torch.Tensor:
        return skinny_gemm.skinny_bf16(x, w[copy], out=into, workspace=workspace, config=config, overlap=overlap)

    return Case(
        f"skinny bf16 T={tokens}",
        shape,
        skinny_gemm.floor(tokens, rows, columns, 2),
        copies,
        space(skinny_gemm.default_config(rows, columns // 64), skinny_gemm.SPACE),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, poisoned(tokens, rows), config), x.double() @ w[0].double().T),
        baseline=lambda copy: torch.mm(x, w[copy].T, out=out),
        overlapped=lambda copy, config: run(copy, out, config, True),
    )


def _fp8_weights(rows: int, columns: int, copies: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights = [torch.randn(rows, columns, device=bench_case.DEVICE).to(torch.float8_e4m3fn) for _ in range(copies)]
    scales = [
        torch.rand(-(-rows // 128), columns // 128, device=bench_case.DEVICE) / columns**0.5 for _ in range(copies)
    ]
    return weights, scales


def skinny_fp8_case(shape: str, tokens: int, rows: int, columns: int) -> Case:
    """One FP8 projection with quantised inputs."""
    copies = rotation(rows * columns)
    w, w_scales = _fp8_weights(rows, columns, copies)
    x, workspace = randn(tokens, columns), Workspace(bench_case.DEVICE)
    q, scales = live_quant.quantise(x)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=bench_case.DEVICE)
    want = (q.double() * scales.double().repeat_interleave(128, 1)) @ reference.dequantise_fp8(w[0], w_scales[0]).T

    def run(copy: int, into: torch.Tensor, config: Any, overlap: bool = False) -> torch.Tensor:
        return skinny_gemm.skinny_fp8(
            q, scales, w[copy], w_scales[copy], out=into, workspace=workspace, config=config, overlap=overlap
        )

    return Case(
        f"skinny fp8 T={tokens}",
        shape,
        skinny_gemm.floor(tokens, rows, columns, 1),
        copies,
        space(skinny_gemm.default_config(rows, columns // 128), skinny_gemm.SPACE),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, poisoned(tokens, rows), config), want),
        overlapped=lambda copy, config: run(copy, out, config, True),
    )


def live_quant_case(form: live_quant.Form, shape: str, tokens: int, rows: int, columns: int) -> Case:
    """One FP8 projection behind a live quantisation, by ``form``."""
    copies = rotation(rows * columns)
    w, w_scales = _fp8_weights(rows, columns, copies)
    x, workspace = randn(tokens, columns), Workspace(bench_case.DEVICE)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=bench_case.DEVICE)
    want = reference.quantise_dequantise(x) @ reference.dequantise_fp8(w[0], w_scales[0]).T
    default: Any = live_quant.NAIVE
    others: tuple[Any, ...] = ()
    if form == "separate":
        default, others = skinny_gemm.default_config(rows, columns // 128), skinny_gemm.SPACE[:6]
    elif form == "fused":
        split = live_quant.default_split(rows, columns // 128, live_quant.NAIVE.block)
        default, others = live_quant.FusedConfig(split=split), live_quant.SPACE
    elif form == "pq":
        default, others = pq_gemm.default_config(columns), pq_gemm.SPACE

    def run(copy: int, into: torch.Tensor, config: Any) -> torch.Tensor:
        return live_quant.live_quant_gemm(
            x, w[copy], w_scales[copy], form=form, out=into, workspace=workspace, config=config
        )

    return Case(
        f"live quant {form} T={tokens}",
        shape,
        live_quant.floor(tokens, rows, columns, form),
        copies,
        space(default, others),
        lambda copy, config: run(copy, out, config),
        lambda config: relative_error(run(0, poisoned(tokens, rows), config), want),
    )


def router_case(shape: str, tokens: int, experts: int, hidden: int, top_k: int) -> Case:
    """The router of one layer."""
    copies = rotation(2 * experts * hidden)
    w = [(torch.randn(experts, hidden, device=bench_case.DEVICE) / hidden**0.5).bfloat16() for _ in range(copies)]
    x, workspace = randn(tokens, hidden), Workspace(bench_case.DEVICE)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=bench_case.DEVICE)
    weights = torch.empty(tokens, top_k, device=bench_case.DEVICE)

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
        space(router.default_config(hidden // 64), router.SPACE),
        run,
        check,
        tolerance=1e-4,
    )


def lm_head_case(tokens: int, sample: bool, *, keep: bool = False, others: tuple[Any, ...] = lm_head.SPACE) -> Case:
    """gpt-oss's LM head, greedy (``keep``: with the logits, as a step has it), or sampled with log-sum-exp as well."""
    vocab, hidden = 201088, 2880
    w = [(torch.randn(vocab, hidden, device=bench_case.DEVICE) / hidden**0.5).bfloat16() for _ in range(2)]
    x, workspace = randn(tokens, hidden), Workspace(bench_case.DEVICE)
    out = torch.empty(tokens, dtype=torch.int32, device=bench_case.DEVICE)
    logits = torch.empty(tokens, vocab, device=bench_case.DEVICE) if sample or keep else None
    lse = torch.empty(tokens, device=bench_case.DEVICE) if sample else None
    rng = torch.tensor([1, 0], dtype=torch.int64, device=bench_case.DEVICE)

    def run(copy: int, config: Any, temperature: float, overlap: bool = False) -> torch.Tensor:
        return lm_head.lm_head(
            x, w[copy], temperature=temperature, rng=rng, logits=logits, lse=lse, out=out, workspace=workspace,
            config=config, overlap=overlap,
        )  # fmt: skip

    def check(config: Any) -> float:
        out.fill_(-1)
        if logits is not None:
            logits.fill_(float("nan"))
        want = x.double() @ w[0].double().T
        chosen = run(0, config, 0.0).long()
        error = float((want.gather(1, chosen[:, None])[:, 0] - want.amax(1)).abs().max())
        if logits is not None:
            error += relative_error(logits, want)
        if lse is not None:
            run(0, config, 1.0)
            error += relative_error(lse, want.logsumexp(1))
        return error

    return Case(
        f"lm_head {'sample' if sample else 'logits' if keep else 'greedy'} T={tokens}",
        "gpt-oss",
        lm_head.floor(tokens, vocab, hidden, sample=sample, logits=sample or keep),
        2,
        space(lm_head.default_config(tokens), others),
        lambda copy, config: run(copy, config, 1.0 if sample else 0.0),
        check,
        tolerance=1e-4,
        baseline=lambda copy: torch.mm(x, w[copy].T).argmax(1),
        overlapped=lambda copy, config: run(copy, config, 1.0 if sample else 0.0, True),
    )

"""Benchmark cases: the MXFP4 expert kernels."""

from dataclasses import dataclass
from typing import Any

import torch

from workbench.kernels import bench_case, mxfp4_experts, reference
from workbench.kernels.bench_case import BF16_TOLERANCE, Case, poisoned, randn, rotation, space
from workbench.kernels.floor import Floor
from workbench.kernels.mxfp4_layout import dequantise, restore
from workbench.kernels.reference import relative_error
from workbench.kernels.workspace import Workspace


def _words(experts: int, tiles: int, chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights straight in kernel form: every bit pattern is a weight; scales 2^-17 to 2^-9."""
    words = torch.randint(
        -(2**31), 2**31 - 1, (experts, tiles, chunks, 128), dtype=torch.int32, device=bench_case.DEVICE
    )
    scale_bytes = torch.randint(110, 119, (experts, tiles, chunks, 8, 4), dtype=torch.uint8, device=bench_case.DEVICE)
    return words, scale_bytes.view(torch.int32).view(experts, tiles, chunks, 8)


def _choices(copies: int, tokens: int, experts: int, top_k: int) -> list[torch.Tensor]:
    return [
        torch.rand(tokens, experts, device=bench_case.DEVICE).topk(top_k).indices.to(torch.int32) for _ in range(copies)
    ]


def _distinct(choices: list[torch.Tensor]) -> int:
    return round(sum(len(set(ids.flatten().tolist())) for ids in choices) / len(choices))


def _dequantised(
    words: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, order: Any, shape: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    chosen = sorted(set(ids.flatten().tolist()))
    return {e: dequantise(*restore(words[e : e + 1], scales[e : e + 1], order)).view(shape) for e in chosen}


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of one model (or of one rank of it)."""

    label: str
    experts: int
    top_k: int
    hidden: int
    inter: int
    gptoss: bool


GPT_OSS = Experts("gpt-oss-120b", 128, 4, 2880, 2880, True)
GPT_OSS_20B = Experts("gpt-oss-20b", 32, 4, 2880, 2880, True)
GLM_RANK = Experts("GLM-5.2 TP8", 256, 8, 6144, 256, False)


def gate_up_case(model: Experts, tokens: int, others: tuple[Any, ...] = mxfp4_experts.SPACE) -> Case:
    """Gate-up of a model's chosen experts. ``others`` are configurations beside the default."""
    tiles, chunks = model.inter // 8, model.hidden // 64
    words, scales = _words(model.experts, tiles, chunks)
    bytes_each = model.top_k * tiles * 16 * model.hidden * 17 // 32
    choices = _choices(rotation(bytes_each), tokens, model.experts, model.top_k)
    x = randn(tokens, model.hidden)
    bias = randn(model.experts, 2, model.inter) if model.gptoss else None
    activation: mxfp4_experts.Activation = "gptoss" if model.gptoss else "silu"
    workspace = Workspace(bench_case.DEVICE)
    out = torch.empty(tokens * model.top_k, model.inter, dtype=torch.bfloat16, device=bench_case.DEVICE)
    wanted: list[torch.Tensor] = []

    def run(ids: torch.Tensor, into: torch.Tensor, config: Any, overlap: bool = False) -> torch.Tensor:
        return mxfp4_experts.gate_up(
            x, ids, words, scales, bias=bias, activation=activation, out=into, workspace=workspace, config=config,
            overlap=overlap,
        )  # fmt: skip

    def check(config: Any) -> float:
        if not wanted:
            w = _dequantised(words, scales, choices[0], "stacked", (2, model.inter, model.hidden))
            wanted.append(reference.gate_up(x, choices[0], w, bias, activation))
        got = run(choices[0], poisoned(tokens * model.top_k, model.inter), config)
        return relative_error(got.double() / 2.0**mxfp4_experts.H_EXPONENT, wanted[0])

    default = mxfp4_experts.default_config(tiles, chunks, tokens * model.top_k)
    return Case(
        f"mxfp4 gate-up T={tokens}",
        model.label,
        mxfp4_experts.floor(tokens, _distinct(choices), tiles * 16, model.hidden),
        len(choices),
        space(default, others),
        lambda copy, config: run(choices[copy], out, config),
        check,
        overlapped=lambda copy, config: run(choices[copy], out, config, True),
    )


def down_case(model: Experts, tokens: int, others: tuple[Any, ...] = mxfp4_experts.SPACE) -> Case:
    """Down projection and combine of a model's chosen experts. ``others`` are configurations beside the default."""
    tiles, chunks = model.hidden // 16, model.inter // 64
    words, scales = _words(model.experts, tiles, chunks)
    bytes_each = model.top_k * model.hidden * model.inter * 17 // 32
    choices = _choices(rotation(bytes_each), tokens, model.experts, model.top_k)
    plain = randn(tokens * model.top_k, model.inter)
    h = (plain.double() * 2.0**mxfp4_experts.H_EXPONENT).bfloat16()
    weights = torch.rand(tokens, model.top_k, device=bench_case.DEVICE)
    bias = randn(model.experts, model.hidden) if model.gptoss else None
    workspace = Workspace(bench_case.DEVICE)
    out = torch.empty(tokens, model.hidden, dtype=torch.bfloat16, device=bench_case.DEVICE)
    wanted: list[torch.Tensor] = []

    def run(ids: torch.Tensor, into: torch.Tensor, config: Any, overlap: bool = False) -> torch.Tensor:
        return mxfp4_experts.down(
            h, ids, weights, words, scales, bias=bias, out=into, workspace=workspace, config=config, overlap=overlap
        )

    def check(config: Any) -> float:
        if not wanted:
            w = _dequantised(words, scales, choices[0], "plain", (model.hidden, model.inter))
            wanted.append(reference.down(plain, choices[0], weights, w, bias))
        return relative_error(run(choices[0], poisoned(tokens, model.hidden), config), wanted[0])

    default = mxfp4_experts.default_config(tiles, chunks, tokens * model.top_k, half="down")
    return Case(
        f"mxfp4 down T={tokens}",
        model.label,
        mxfp4_experts.floor(tokens, _distinct(choices), model.hidden, model.inter),
        len(choices),
        space(default, others),
        lambda copy, config: run(choices[copy], out, config),
        check,
        overlapped=lambda copy, config: run(choices[copy], out, config, True),
    )


def expert_pass_case(model: Experts, tokens: int) -> Case:
    """Gate-up and down behind each other, as a layer runs them."""
    up_tiles, up_chunks = model.inter // 8, model.hidden // 64
    down_tiles, down_chunks = model.hidden // 16, model.inter // 64
    up_words, up_scales = _words(model.experts, up_tiles, up_chunks)
    down_words, down_scales = _words(model.experts, down_tiles, down_chunks)
    each = 3 * model.hidden * model.inter * 17 // 32
    choices = _choices(rotation(model.top_k * each), tokens, model.experts, model.top_k)
    x, weights = randn(tokens, model.hidden), torch.rand(tokens, model.top_k, device=bench_case.DEVICE)
    workspace = Workspace(bench_case.DEVICE)
    h = torch.empty(tokens * model.top_k, model.inter, dtype=torch.bfloat16, device=bench_case.DEVICE)
    out = torch.empty(tokens, model.hidden, dtype=torch.bfloat16, device=bench_case.DEVICE)
    wanted: list[torch.Tensor] = []

    def run(ids: torch.Tensor, into: torch.Tensor, config: Any) -> torch.Tensor:
        overlap = config[2] == "overlap"
        mxfp4_experts.gate_up(
            x, ids, up_words, up_scales, out=h, workspace=workspace, config=config[0], overlap=overlap
        )
        return mxfp4_experts.down(
            h, ids, weights, down_words, down_scales, out=into, workspace=workspace, config=config[1], overlap=overlap
        )

    def check(config: Any) -> float:
        if not wanted:
            up = _dequantised(up_words, up_scales, choices[0], "stacked", (2, model.inter, model.hidden))
            lower = _dequantised(down_words, down_scales, choices[0], "plain", (model.hidden, model.inter))
            middle = reference.gate_up(x, choices[0], up, None, "silu")
            wanted.append(reference.down(middle, choices[0], weights, lower))
        return relative_error(run(choices[0], poisoned(tokens, model.hidden), config), wanted[0])

    pairs = tokens * model.top_k
    default = (
        mxfp4_experts.default_config(up_tiles, up_chunks, pairs),
        mxfp4_experts.default_config(down_tiles, down_chunks, pairs, half="down"),
        "plain",
    )
    up_floor = mxfp4_experts.floor(tokens, _distinct(choices), up_tiles * 16, model.hidden)
    down_floor = mxfp4_experts.floor(tokens, _distinct(choices), model.hidden, model.inter)
    total = Floor(
        up_floor.bytes_read + down_floor.bytes_read,
        up_floor.bytes_written + down_floor.bytes_written,
        up_floor.lane_instructions + down_floor.lane_instructions,
    )
    up_best, down_best = default[0], default[1]
    others = (
        (up_best, mxfp4_experts.ExpertConfig(4, 1, 2, 1, 2)),
        (mxfp4_experts.ExpertConfig(4, 1, 1, 1, 2), down_best),
        (up_best, mxfp4_experts.ExpertConfig(4, 1, 2, 1, 1)),
        (mxfp4_experts.ExpertConfig(8, 1, 1, 1, 2), mxfp4_experts.ExpertConfig(8, 1, 1, 1, 2)),
    )
    return Case(
        f"mxfp4 expert pass T={tokens}",
        model.label,
        total,
        len(choices),
        space(default, ((*default[:2], "overlap"), *((*pair, "overlap") for pair in others))),
        lambda copy, config: run(choices[copy], out, config),
        check,
        tolerance=2 * BF16_TOLERANCE,
    )

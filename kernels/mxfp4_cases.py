"""The layers that expert passes are checked and timed with, and the check of a pass against float64."""

from dataclasses import asdict
from typing import Any

import torch

from workbench.kernels import mxfp4_cuda, mxfp4_one_token, mxfp4_tiles
from workbench.kernels.budget import wait
from workbench.kernels.mxfp4_cuda import ExpertPass, ExpertShape, ExpertWeights, Plan
from workbench.kernels.mxfp4_one_token import OneTokenPass, OneTokenPlan

GPT_OSS = ExpertShape(2880, 2880, 128, 4, clamp=True, bias=True)
GPT_OSS_20B = ExpertShape(2880, 2880, 32, 4, clamp=True, bias=True)
GLM = ExpertShape(6144, 2048, 256, 8)
GLM_RANK = ExpertShape(6144, 256, 256, 8)
QWEN = ExpertShape(2048, 768, 128, 8)
NAMES = {
    GPT_OSS: "gpt-oss-120b",
    GPT_OSS_20B: "gpt-oss-20b",
    GLM: "glm-5.2",
    GLM_RANK: "glm-5.2/tp8",
    QWEN: "qwen3-30b-a3b",
}


def checkpoint(shape: ExpertShape, experts: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random experts in the checkpoint's packing, with scales that give outputs of order one."""

    def draw(*size: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8, device=generator.device)

    two, h, i = 2 * shape.inter, shape.hidden, shape.inter
    result = {
        "gate_up": draw(experts, two, h // 32, 16),
        "gate_up_scales": draw(experts, two, h // 32, low=117, high=122),
        "down": draw(experts, h, i // 32, 16),
        "down_scales": draw(experts, h, i // 32, low=117, high=122),
    }
    if shape.bias:
        for name, size in (("gate_up_bias", two), ("down_bias", h)):
            result[name] = torch.randn(experts, size, generator=generator, device=generator.device).to(torch.bfloat16)
    return result


AnyPlan = Plan | OneTokenPlan
AnyPass = ExpertPass | OneTokenPass


def build_passes(shape: ExpertShape, tokens: int, plan: AnyPlan | None, split: bool) -> list[AnyPass]:
    """The pass that ``plan`` is of, the default's where there is none; ``split``: its halves as two launches."""
    if isinstance(plan, OneTokenPlan):
        return [OneTokenPass(shape, plan=plan)]
    runs = [ExpertPass(shape, tokens, plan=plan, phases=p) for p in (("gate_up", "down") if split else ("both",))]
    for other in runs[1:]:
        other.inter = runs[0].inter
    return [*runs]


def packed(shape: ExpertShape, source: dict[str, torch.Tensor], plan: AnyPlan | None = None) -> ExpertWeights:
    """The checkpoint re-laid out as ``plan``'s pass wants it; gpt-oss alternates gate and up rows, the others stack
    them."""
    order: mxfp4_tiles.Rows = "interleaved" if shape.clamp else "halves"
    biases = (
        (mxfp4_tiles.pack_bias(source["gate_up_bias"], order=order), source["down_bias"])
        if shape.bias
        else (None, None)
    )
    gate_up = mxfp4_tiles.pack_tiles(source["gate_up"], source["gate_up_scales"], order=order)
    if isinstance(plan, OneTokenPlan):
        down = (source["down"], source["down_scales"])
        return ExpertWeights(*mxfp4_one_token.relayout(plan, gate_up, down), *biases)
    return ExpertWeights(gate_up, mxfp4_tiles.pack_tiles(source["down"], source["down_scales"]), *biases)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference; NaN never passes."""
    error = (value.to(torch.float64) - reference).norm() / reference.norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def check(
    shape: ExpertShape, tokens: int, plan: AnyPlan | None = None, *, seed: int = 0, split: bool = False
) -> dict[str, Any]:
    """Compare one pass with float64. ``inter`` may err by its rounding to bf16 and 1e-5 of its largest element;
    ``out`` is compared given the kernel's own ``inter``, so fp32 summation is all it errs by.

    ``split`` runs the two halves as two launches.
    """
    experts = min(shape.experts, 12)
    small = ExpertShape(**{**asdict(shape), "experts": experts})
    generator = torch.Generator("cuda").manual_seed(seed)
    source = checkpoint(small, experts, generator)
    weights = packed(small, source, plan)
    x = (torch.randn(tokens, shape.hidden, generator=generator, device="cuda") * 3).to(torch.bfloat16)
    x[:, 5] *= 300  # an outlier channel
    ids = torch.stack(
        [torch.randperm(experts, generator=generator, device="cuda")[: shape.top_k] for _ in range(tokens)]
    ).to(torch.int32)
    routing = torch.rand(tokens, shape.top_k, generator=generator, device="cuda") + 0.1
    runs = build_passes(small, tokens, plan, split)
    lanes = None
    if runs[0].plan.lanes:
        lanes = torch.zeros(runs[0].lane_words, dtype=torch.int64, device="cuda")
    outs = []
    for _ in range(3):
        out = torch.full((tokens, shape.hidden), float("nan"), device="cuda")
        if isinstance(runs[0], OneTokenPass) or runs[0].plan.exchange == "counters":
            runs[0].inter.fill_(float("nan"))
        for run in runs:
            run.run(x, ids, routing, weights, out, lanes=lanes)
        wait("check")
        for run in runs:
            run.check()
        outs.append(out)
    slots = mxfp4_cuda.slot_order(ids)  # of one token: its choices, which differ
    inter = runs[0].activation()
    expected = torch.zeros(tokens, shape.hidden, dtype=torch.float64, device="cuda")
    worst, equal, excess = 0.0, 1.0, 0.0
    for slot, expert in enumerate(slots):
        full = mxfp4_cuda.dequantise(source["gate_up"][expert], source["gate_up_scales"][expert])
        bias = source["gate_up_bias"][expert] if shape.bias else None
        pick = (
            (slice(0, None, 2), slice(1, None, 2)) if shape.clamp else (slice(0, shape.inter), slice(shape.inter, None))
        )
        biases = (None, None) if bias is None else (bias[pick[0]], bias[pick[1]])
        h = mxfp4_cuda.reference_inter(small, x, full[pick[0]], full[pick[1]], *biases)
        worst = max(worst, relative(inter[slot], h))
        beyond = ((inter[slot].to(torch.float64) - h).abs() - h.abs() * 2.0**-8).max() / h.abs().max()
        excess = max(excess, float(beyond) if bool(torch.isfinite(beyond)) else float("inf"))
        equal = min(equal, float((inter[slot] == h.to(torch.bfloat16)).double().mean()))
        y = (
            inter[slot].to(torch.float64)
            @ mxfp4_cuda.dequantise(source["down"][expert], source["down_scales"][expert]).T
        )
        if shape.bias:
            y = y + source["down_bias"][expert].to(torch.float64)
        chosen = ((ids == expert) * routing.to(torch.float64)).sum(dim=1)
        expected += chosen[:, None] * y
    return {
        "shape": NAMES[shape],
        "tokens": tokens,
        "slots": len(slots),
        "inter_relative": worst,
        "inter_equal_bf16": equal,
        "inter_beyond_rounding": excess,
        "out_relative": max(relative(out, expected) for out in outs),
        "repeatable": all(torch.equal(outs[0], out) for out in outs),
        "ok": excess < 1e-5 and max(relative(out, expected) for out in outs) < 2e-6,
    }

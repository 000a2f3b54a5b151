"""The kernel rungs against the eager reference in float32, which holds the same weights."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.decode.model import Target
from workbench.decode.precision import load_policy
from workbench.decode.presets import load_preset
from workbench.decode.rungs.agreement import agreement, fill_context
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.fused import FusedFaults, FusedStep
from workbench.decode.rungs.plain import PlainStep
from workbench.decode.rungs.plan import PLANS
from workbench.decode.rungs.random_model import random_model
from workbench.decode.rungs.reference import live_quant_twin
from workbench.decode.rungs.static import StaticForward
from workbench.decode.rungs.store import Held
from workbench.decode.rungs.verifiers import DecidedScores
from workbench.scenario import Rung

CAPACITY = 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 3e-2
"""bfloat16 activations through two layers; the interpreter truncates where the device rounds."""

LIVE_TOLERANCE = 1e-1
"""Where activations are rounded to FP8 live, a bfloat16 error turns some of them to a neighbour, 6 to 12 % away."""

LIVE_ROW_TOLERANCE = 1.5e-1
"""The same where a single row may be all that is compared: seen on an H200, up to 0.102."""


def kernel_forward(
    models: Any, rung: Rung, widths: list[int], faults: FusedFaults | None = None, piecewise: bool = False
) -> StaticForward[Any]:
    plan = PLANS[rung]
    held = models.packed if plan.packed else models.expanded
    overlap = rung == "splitk"  # without effect in the interpreter
    step = FusedStep(
        held.target, held.packed, plan, CAPACITY + max(widths), overlap=overlap, faults=faults or FusedFaults()
    )
    device = held.target.device
    return StaticForward(
        step, device=device, capacity=CAPACITY, widths=widths, capture=device.type == "cuda", piecewise=piecewise
    )


def reference(target: Target, context: int) -> EagerForward:
    forward = EagerForward(target, CAPACITY)
    fill_context(forward, context)
    return forward


def draw(vocab: int, width: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (1, width), generator=generator).to(device)


def relative(value: Tensor, wanted: Tensor) -> float:
    return float((value.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(
    ("rung", "family", "width", "context"),
    [
        ("fused", "gpt-oss", 1, 0),
        ("fused", "gpt-oss", 3, 4),
        ("fused", "qwen", 4, 13),
        ("fp4", "gpt-oss", 1, 13),
        ("fp4", "gpt-oss", 4, 5),
        ("fp4", "qwen", 2, 7),
        ("splitk", "gpt-oss", 2, 13),
        ("splitk", "qwen", 1, 3),
        ("livequant-naive", "gpt-oss", 2, 9),
        ("livequant-naive", "qwen", 1, 9),
        ("livequant-fused", "gpt-oss", 1, 13),
        ("livequant-fused", "qwen", 4, 5),
    ],
)
def test_every_rung_scores_as_the_reference_does(
    models: Callable[..., Any], rung: Rung, family: str, width: int, context: int
) -> None:
    live = rung.startswith("livequant")
    model = models(family, "mxfp4-experts-fp8" if live else "mxfp4-experts")
    target = live_quant_twin(model.reference) if live else model.reference
    tokens = draw(model.spec.vocab, width, target.device)
    eager, kernels = reference(target, context), kernel_forward(model, rung, [width])
    fill_context(kernels, context)
    want, got = eager.score(tokens), kernels.score(tokens)
    tolerance = LIVE_TOLERANCE if live else TOLERANCE
    result = agreement(got, want)
    assert result.same >= (width - 1 if live and width > 1 else width)
    assert max(result.error, result.hidden_error) < tolerance, result
    assert relative(got.taps, want.taps) < (tolerance if result.same == width else 1)
    for got_slabs, wanted_slabs in zip(kernels.caches(), eager.caches(), strict=True):
        for slab, wanted in zip(got_slabs, wanted_slabs, strict=True):
            new = slice(context, context + width)
            assert relative(slab[:, new], wanted[:, new]) < (tolerance if result.same == width else 1)
            assert torch.equal(slab[:, :context].float(), wanted[:, :context])
    assert isinstance(got, DecidedScores)
    assert got.outcome[width + 1 : 2 * width + 1].tolist() == got.logits[0].argmax(-1).tolist()


@pytest.fixture(scope="module")
def true_shape() -> Callable[[str, str], Any]:
    """``true_shape(preset, policy)``: the first two layers of a real model, as packed, expanded and float32 forms."""

    @cache
    def build(preset: str, policy: str) -> Any:
        spec = load_preset(preset)
        spec = spec.model_copy(update={"mixers": spec.mixers[:2]})
        device = torch.device("cuda")

        def form(packed: bool, dtype: torch.dtype = torch.bfloat16) -> Held:
            target, experts = random_model(spec, load_policy(policy), seed=1, device=device, dtype=dtype, packed=packed)
            return Held(target, None, experts)

        expanded = form(False)
        reference = form(False).target.float()
        return SimpleNamespace(spec=spec, reference=reference, expanded=expanded, packed=form(True))

    return build


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["gpt-oss-20b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("rung", ["graph", "fused", "fp4", "splitk", "livequant-naive", "livequant-fused"])
@pytest.mark.parametrize("width", [1, 4])
def test_true_shapes_in_graphs(true_shape: Callable[[str, str], Any], preset: str, rung: Rung, width: int) -> None:
    live = rung.startswith("livequant")
    model = true_shape(preset, "mxfp4-experts-fp8" if live else "mxfp4-experts")
    target = live_quant_twin(model.reference) if live else model.reference
    if PLANS[rung].kernels:
        kernels = kernel_forward(model, rung, [width])
    else:
        step = PlainStep(model.expanded.target, CAPACITY + width)
        kernels = StaticForward(step, device=DEVICE, capacity=CAPACITY, widths=[width], capture=True)
    eager = reference(target, 17)
    fill_context(kernels, 17)
    same = rows = 0
    for seed in range(4):
        tokens = draw(model.spec.vocab, width, target.device, seed)
        result = agreement(kernels.score(tokens), eager.score(tokens))
        same, rows = same + result.same, rows + result.rows
        assert result.same == 0 or result.error < (LIVE_ROW_TOLERANCE if live else TOLERANCE)
    assert same >= rows / 2

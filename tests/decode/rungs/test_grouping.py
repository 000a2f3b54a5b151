"""Which rungs run their experts as a grouped product, that it changes no number, and on a GPU the product itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.decode.experts import Experts
from workbench.decode.presets import load_preset
from workbench.decode.rank import rank_slice
from workbench.decode.rungs import build, grouping
from workbench.decode.rungs.agreement import agreement, fill_context
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.grouping import ExpertForm, group, refusal, with_grouped_experts
from workbench.decode.rungs.packed import expert_layers
from workbench.decode.rungs.plain import PlainStep
from workbench.decode.rungs.static import StaticForward
from workbench.decode.rungs.store import Held
from workbench.decode.spec import MoE
from workbench.kernels.graph_capture import capturing
from workbench.scenario import parse_scenario

CAPACITY = 40
CUDA = torch.device("cuda")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend to a GPU of that major compute capability, on which torch's product works."""

    def pretend(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (major, 0))
        monkeypatch.setattr(grouping, "_trial", lambda *_: "")

    return pretend


def layer(hidden: int = 64, inter: int = 64, experts: int = 6) -> Experts:
    with torch.device("meta"):
        return Experts(hidden, MoE(experts=experts, top_k=2, inter=inter)).bfloat16()


@pytest.mark.parametrize(("major", "fits"), [(8, False), (9, True), (10, True), (12, False)])
def test_the_device_decides(capability: Callable[[int], None], major: int, fits: bool) -> None:
    capability(major)
    why = refusal(layer(), CUDA, torch.bfloat16)
    assert (why == "") == fits
    assert fits or f"compute capability {major}.0" in why


def test_shape_dtype_and_torch_decide(capability: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    capability(9)
    assert refusal(layer(), torch.device("cpu"), torch.bfloat16) == "the grouped product is for GPUs"
    assert "weights are torch.float32" in refusal(layer(), CUDA, torch.float32)
    assert "6 experts of 64 x 36" in refusal(layer(inter=36), CUDA, torch.bfloat16)
    assert "6 experts of 60 x 64" in refusal(layer(hidden=60), CUDA, torch.bfloat16)
    assert "1024 experts" in refusal(layer(experts=1024), CUDA, torch.bfloat16)
    monkeypatch.delattr(F, "grouped_mm")
    assert "has no torch.nn.functional.grouped_mm" in refusal(layer(), CUDA, torch.bfloat16)


def test_what_torch_refuses_is_gathered_and_said(models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, ffn = next(expert_layers(models("gpt-oss").expanded.target))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: None)
    assert refusal(ffn, CUDA, torch.bfloat16) == ""

    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("strides should be multiple of 16 bytes\nmore")

    monkeypatch.setattr(F, "grouped_mm", refuse)
    why = refusal(ffn, CUDA, torch.bfloat16)
    assert why == "torch refuses the grouped product: strides should be multiple of 16 bytes"

    def run_out(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(F, "grouped_mm", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        refusal(ffn, CUDA, torch.bfloat16)


def test_a_refusal_leaves_the_target_as_it_is(models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = models("gpt-oss").expanded.target
    monkeypatch.setattr(grouping, "refusal", lambda *_: "torch refuses")
    same, form = with_grouped_experts(target)
    assert same is target
    assert str(form) == f"{'looped' if target.device.type == 'cpu' else 'gathered'}: torch refuses"
    monkeypatch.setattr(grouping, "refusal", lambda *_: "")
    other, form = with_grouped_experts(target)
    assert other is not target
    assert str(form) == "grouped"


def test_the_form_of_each_kind_of_weights(models: Callable[..., Any]) -> None:
    model = models("gpt-oss")
    if model.reference.device.type == "cpu":
        assert str(with_grouped_experts(model.reference)[1]) == "looped: the grouped product is for GPUs"
    assert str(with_grouped_experts(model.packed.target)[1]) == "expanded: they stay as stored"


@pytest.mark.parametrize("family", ["gpt-oss", "qwen", "glm", "mimo"])
def test_grouping_copies_no_weight_and_leaves_the_model_alone(models: Callable[..., Any], family: str) -> None:
    target = models(family, "bf16").expanded.target
    other = group(target)
    held = dict(target.named_parameters())
    assert all(held[name] is parameter for name, parameter in other.named_parameters())
    assert all(ffn.groups is None for _, ffn in expert_layers(target))
    grouped = [ffn.groups for _, ffn in expert_layers(other)]
    assert grouped
    assert all(numbers is not None and numbers.tolist() == list(range(len(numbers))) for numbers in grouped)


@pytest.mark.parametrize("family", ["gpt-oss", "qwen", "glm", "mimo"])
@pytest.mark.parametrize("width", [1, 4, 16])
def test_a_grouped_step_has_the_numbers_of_a_gathered_one(models: Callable[..., Any], family: str, width: int) -> None:
    target = models(family, "bf16").reference
    text = torch.arange(width, device=target.device)[None] % target.spec.vocab
    steps = [
        EagerForward(target, CAPACITY),
        EagerForward(group(target), CAPACITY),
        StaticForward(
            PlainStep(group(target), CAPACITY + width),
            device=target.device,
            capacity=CAPACITY,
            widths=[width],
            capture=False,
        ),
    ]
    want, *others = [(fill_context(step, 9), step.score(text))[1] for step in steps]
    for got in others:
        result = agreement(got, want)
        assert result.same == width
        assert result.error < 1e-4


@pytest.mark.parametrize("rung", ["eager", "graph", "fused"])
def test_the_plain_rungs_are_built_grouped_where_they_can_be(
    models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, rung: str
) -> None:
    model, plain = models("gpt-oss", "bf16"), rung != "fused"
    held = Held(model.reference, None, ()) if plain else model.expanded
    init = StaticForward.__init__
    monkeypatch.setattr(StaticForward, "__init__", lambda *_, **named: init(*_, **named | {"capture": False}))
    text = f"name = 'v'\nmodel = {{ weights = 'random' }}\nengine = {{ rung = '{rung}' }}"
    variant = parse_scenario(text, source="test", folder=Path()).variants()[0]
    if held.target.device.type == "cpu":
        looped = ExpertForm("looped", "the grouped product is for GPUs")
        assert build.build_rung(variant, held, CAPACITY, None).experts == (looped if plain else None)
    calls: list[Tensor] = []
    product = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **named: calls.append(a[0]) or product(*a, **named))
    monkeypatch.setattr(build, "with_grouped_experts", lambda target: (group(target), ExpertForm("grouped")))
    runner = build.build_rung(variant, held, CAPACITY, None)
    runner.forward.score(torch.zeros(1, 1, dtype=torch.int64, device=held.target.device))
    assert runner.experts == (ExpertForm("grouped") if plain else None)
    assert len(calls) == (2 * model.spec.moe_layers if plain else 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "tp"), [("gpt-oss-20b", 1), ("qwen3-30b-a3b", 1), ("glm-5.2", 8), ("mimo-v2.5-pro", 8)]
)
@pytest.mark.parametrize("width", [1, 4, 16])
def test_the_product_in_a_graph(name: str, tp: int, width: int) -> None:
    """One layer of a true shape, captured once, replayed with other choices: experts that nobody or everybody chose."""
    device = torch.device("cuda")
    generator = torch.Generator(device=device).manual_seed(0)
    spec = rank_slice(load_preset(name), tp)
    assert spec.moe is not None
    experts, top_k, hidden = spec.moe.experts, spec.moe.top_k, spec.hidden
    with torch.device("meta"):
        built = Experts(hidden, spec.moe)
    built = built.to_empty(device=device).bfloat16()
    for parameter in built.parameters():
        parameter.data.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    assert refusal(built, device, torch.bfloat16) == ""
    built.forced = torch.zeros(64, top_k, dtype=torch.int64, device=device)
    x = torch.randn(width, hidden, device=device, generator=generator).bfloat16()
    positions = torch.zeros(width, dtype=torch.int64, device=device)
    numbers = torch.arange(experts, device=device)
    table = torch.rand(64, experts, device=device, generator=generator).argsort(1)[:, :top_k]
    with torch.inference_mode():
        built.groups = numbers
        built.forced.copy_(table)
        for _ in range(2):
            built.fixed(x, positions)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out, indices = built.fixed(x, positions)
        for start, step in ((0, 0), (3, 1), (20, 2)):  # all tokens alike, then each its own
            positions.copy_(start + step * torch.arange(width, device=device))
            graph.replay()
            got, chosen = out.clone(), indices.clone()
            graph.replay()
            assert torch.equal(out, got)
            assert torch.equal(chosen, table[positions % 64])
            built.groups = None
            want = built.fixed(x, positions)[0]
            built.groups = numbers
            assert float((got - want).float().norm() / want.float().norm()) < 1e-2

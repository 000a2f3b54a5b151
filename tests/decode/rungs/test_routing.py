"""Choices that do not come from the router: what they hold, where they are refused, that rungs follow them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.decode.bytes import distinct_experts
from workbench.decode.model import Target
from workbench.decode.presets import load_preset
from workbench.decode.rungs import collectives
from workbench.decode.rungs.collectives import with_collectives
from workbench.decode.rungs.forward import EagerForward
from workbench.decode.rungs.packed import expert_layers
from workbench.decode.rungs.plain import PlainStep
from workbench.decode.rungs.routing import PERIOD, drawn_choices, recorded_choices, with_choices
from workbench.decode.rungs.static import StaticForward
from workbench.errors import InputError

GPT_OSS = load_preset("gpt-oss-20b")


def mean_distinct(choices: torch.Tensor, width: int) -> float:
    windows = choices[: len(choices) // width * width].view(-1, width, choices.shape[1], choices.shape[2])
    counts = [len(set(window[:, layer].flatten().tolist())) for window in windows for layer in range(windows.shape[2])]
    return sum(counts) / len(counts)


def test_uniform_choices_touch_as_many_experts_as_the_byte_model_says() -> None:
    choices = drawn_choices(GPT_OSS, exponent=None, seed=1)
    assert choices.shape == (PERIOD, 24, 4)
    assert int(choices.min()) == 0
    assert int(choices.max()) == 31
    assert bool((choices.sort(-1).values.diff(dim=-1) > 0).all())
    for width in (1, 4, 16):
        assert mean_distinct(choices, width) == pytest.approx(distinct_experts(32, 4, width), rel=0.01)
    assert torch.equal(choices, drawn_choices(GPT_OSS, exponent=None, seed=1))
    assert not torch.equal(choices, drawn_choices(GPT_OSS, exponent=None, seed=2))


def test_skewed_choices_follow_zipf_and_touch_fewer() -> None:
    uniform = drawn_choices(GPT_OSS, exponent=None, seed=1)
    skewed = drawn_choices(GPT_OSS, exponent=1.0, seed=1)
    steep = drawn_choices(GPT_OSS, exponent=2.0, seed=1)
    assert mean_distinct(uniform, 8) > mean_distinct(skewed, 8) > mean_distinct(steep, 8)
    # One expert a token: the n-th most popular comes up in proportion to 1/n.
    one = GPT_OSS.model_copy(update={"moe": GPT_OSS.moe.model_copy(update={"top_k": 1})})
    counts = torch.stack(
        [drawn_choices(one, exponent=1.0, seed=3)[:, layer].flatten().bincount(minlength=32) for layer in range(24)]
    )
    ranked = counts.sort(-1, descending=True).values.sum(0)
    assert float(ranked[0] / ranked[3]) == pytest.approx(4, rel=0.15)


def test_recorded_choices_and_their_mistakes(tmp_path: Path) -> None:
    spec = load_preset("nano")
    assert spec.moe is not None
    layers, top_k = spec.moe_layers, spec.moe.top_k
    path = tmp_path / "routing.jsonl"
    steps = [[[list(range(top_k))] * 2] * layers, [[list(range(1, top_k + 1))]] * layers]
    path.write_text("\n".join(json.dumps({"step": i, "experts": step}) for i, step in enumerate(steps)) + "\n\n")
    choices = recorded_choices(path, spec)
    assert choices.shape == (3, layers, top_k)
    assert choices[:, 0, 0].tolist() == [0, 0, 1]
    good = json.dumps({"experts": steps[0]})
    for line, words in (
        ("{", "line 2: "),
        ("[]", "line 2: "),
        (json.dumps({"experts": steps[0][1:]}), rf"line 2: experts has shape .*, needs \({layers}, tokens, {top_k}\)"),
        (json.dumps({"experts": [[[99, *range(top_k - 1)]]] * layers}), "experts must be 0 to 15"),
        (json.dumps({"experts": [[[1] * top_k]] * layers}), "a token names one expert twice"),
    ):
        path.write_text(f"{good}\n{line}\n")
        with pytest.raises(InputError, match=words) as error:
            recorded_choices(path, spec)
        assert str(path) in str(error.value)
    path.write_text("\n")
    with pytest.raises(InputError, match="holds no step"):
        recorded_choices(path, spec)
    with pytest.raises(InputError, match="has no routed experts"):
        drawn_choices(load_preset("qwen3-8b"), exponent=None, seed=0)


def test_every_position_runs_its_row(models: Callable[..., Any]) -> None:
    model = models("gpt-oss")
    choices = drawn_choices(model.spec, exponent=None, seed=7)
    target: Target = with_choices(model.reference, choices)
    assert all(ffn.forced is None for _, ffn in expert_layers(model.reference))
    eager = EagerForward(target, 12)
    static = StaticForward(
        PlainStep(target, 16), device=target.device, capacity=12, widths=[4], capture=target.device.type == "cuda"
    )
    tokens = torch.arange(5, device=target.device)[None]
    for forward in (eager, static):
        forward.length = 0
        prompt = forward.prefill(tokens)
        assert torch.equal(prompt.experts.cpu(), choices[:5].transpose(0, 1))
        forward.length = 5
        assert torch.equal(forward.score(tokens[:, :3]).experts.cpu(), choices[5:8].transpose(0, 1))


def test_traces_tell_a_stand_in_by_its_name() -> None:
    from workbench.diagnose.kernel_kinds import kind_of
    from workbench.kernels.collective import collective_standin_kernel

    assert collective_standin_kernel.fn.__name__ == collectives.KERNEL
    assert kind_of(collectives.KERNEL) == "collective"


def test_collectives_run_twice_a_layer(models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.kernels import collective

    waits: list[int] = []
    monkeypatch.setattr(collective, "collective_standin", lambda _, nanoseconds: waits.append(nanoseconds))
    model = models("glm", "mxfp4-experts-fp8")
    target = with_collectives(model.reference, 8.5)
    EagerForward(target, 8).score(torch.zeros(1, 1, dtype=torch.int64, device=target.device))
    assert waits == [8500] * 2 * model.spec.layers
    EagerForward(model.reference, 8).score(torch.zeros(1, 1, dtype=torch.int64, device=target.device))
    assert len(waits) == 2 * model.spec.layers

"""The stages of training, one after the other, as the command runs them: a tiny model on the CPU."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.engine import EagerEngine, SamplingRule, SequenceRecord
from workbench.decode.pipeline import load_tokenizer
from workbench.decode.prompts import read_prompts
from workbench.decode.spec import ModelSpec
from workbench.decode.train import card
from workbench.decode.weights import load_dflash, load_target
from workbench.errors import InputError

CPU = ("--device", "cpu")
TARGET = ("--batch", "2", "--length", "32", *CPU)


@pytest.fixture(scope="module")
def spec(tiny_spec: Callable[..., ModelSpec]) -> ModelSpec:
    dflash = {"layers": 1, "block": 8, "window": 6, "inter": 32, "taps": (0, 1)}
    return tiny_spec(name="nano", vocab=300, max_positions=300, dflash=dflash, shipped="mxfp4-experts")


@pytest.fixture(scope="module")
def stages(spec: ModelSpec) -> ModuleType:
    module = importlib.import_module("workbench.decode.train.__main__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_preset", lambda name: spec)
        patch.setattr(card, "load_preset", lambda name: spec)
        patch.setattr(card, "NEW_TOKENS", 12)
        patch.setattr(card, "CAPACITY", 300)
        yield module


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stdlib")
    (folder / "package").mkdir()
    for number in range(120):
        body = "".join(f"def f_{number}_{line}(x):\n    return x + {line}\n\n\n" for line in range(70))
        (folder / "package" / f"module_{number}.py").write_text(body)
    return folder


@pytest.fixture(scope="module")
def run(stages: ModuleType) -> Callable[..., Result]:
    def invoke(*arguments: str | Path) -> Result:
        return CliRunner().invoke(stages.app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture(scope="module")
def work(run: Callable[..., Result], stdlib: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder in which every stage was run, two steps each."""
    folder = tmp_path_factory.mktemp("work")
    for stage in (
        ("corpus", "--work", folder, "--stdlib", stdlib),
        ("target", "--work", folder, "--steps", "2", *TARGET),
        ("text", "--work", folder, "--sequences", "6", "--length", "24", "--prompt", "8", "--batch", "4", *CPU),
        ("drafter", "--work", folder, "--steps", "2", "--batch", "2", "--anchors", "3", *CPU),
    ):
        result = run(*stage)
        assert result.exit_code == 0, result.output
    return folder


def test_the_stages_make_a_model_that_decodes(run: Callable[..., Result], work: Path, spec: ModelSpec) -> None:
    out = work / "shipped"
    assert run("ship", "--work", work, out).exit_code == 0
    assert {path.name for path in out.iterdir()} == {
        "target.safetensors",
        "dflash.safetensors",
        "tokenizer.json",
        "corpus.json",
        "target.log.jsonl",
        "dflash.log.jsonl",
    }
    assert json.loads((out / "corpus.json").read_text())["held_out"]["documents"] == 3
    assert np.load(work / "text.npy").shape == (6, 24)
    device = torch.device("cpu")
    target, head = load_target(spec, out, device=device, dtype=torch.float32)
    drafter = DFlashDrafter(target, load_dflash(spec, out, device=device, dtype=torch.float32))
    assert head.attention.window == 5
    tokens = load_tokenizer(out).encode("def f_1(x):\n").ids
    record = SequenceRecord(len(tokens))
    list(EagerEngine(target, drafter, SamplingRule(), capacity=64).decode(tokens, 8, record))
    assert len(record.tokens) == 8


def test_training_resumes_from_its_checkpoint(run: Callable[..., Result], work: Path) -> None:
    def steps(name: str) -> list[int]:
        return [json.loads(line)["step"] for line in (work / f"{name}.log.jsonl").read_text().splitlines()]

    def head() -> torch.Tensor:
        return load_file(work / "target.safetensors")["mtp.combine.weight"]

    before = head()
    assert run("target", "--work", work, "--steps", "2", *TARGET).exit_code == 0
    assert head().equal(before)  # nothing was left to do
    assert steps("target") == [2]
    assert run("target", "--work", work, "--steps", "5", *TARGET).exit_code == 0
    assert not head().equal(before)
    assert steps("target") == [2, 5]
    assert run("drafter", "--work", work, "--steps", "3", "--batch", "2", "--anchors", "3", *CPU).exit_code == 0
    assert steps("dflash") == [2, 3]


def test_the_card_states_what_was_measured(run: Callable[..., Result], work: Path, stdlib: Path) -> None:
    assert run("ship", "--work", work, work / "model").exit_code == 0
    prompts = work / "prompts.jsonl"
    assert "3 prompts in" in run("prompts", prompts, "--stdlib", stdlib).output
    rows = list(card.measure_acceptance(work / "model", read_prompts(prompts, 1), (0.0,)))
    assert [(row.drafter, row.depth) for row in rows] == [
        ("ngram", 5),
        *(("mtp", depth) for depth in (1, 2, 3, 5)),
        *(("dflash", depth) for depth in (3, 5, 7)),
    ]
    for row in rows:
        assert row.accept_length == pytest.approx(1 + sum(row.survival))
        assert list(row.survival) == sorted(row.survival, reverse=True)
    text = card.render_card(work / "model", rows)
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) < 200
    assert f"| dflash | 7 | 0 | {rows[-1].accept_length:.2f} |" in text
    assert "2 layers, hidden 32, 4 experts top-2" in text


def test_a_stage_without_its_input_says_which_to_run(
    run: Callable[..., Result],
    stages: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for stage, complaint in (
        (("target", "--work", tmp_path, *CPU), "no corpus; run 'python -m workbench.decode.train corpus"),
        (("text", "--work", tmp_path, *CPU), "target.safetensors: weights not found"),
        (("drafter", "--work", tmp_path, *CPU), "target.safetensors: weights not found"),
        (("ship", "--work", tmp_path, tmp_path / "out"), "target.safetensors: missing; run the stage that writes it"),
        (("corpus", "--work", tmp_path, "--stdlib", tmp_path), "no Python sources found"),
    ):
        result = run(*stage)
        assert isinstance(result.exception, InputError)
        assert complaint in str(result.exception)
    monkeypatch.setattr(sys, "argv", ["train", "corpus", "--work", str(tmp_path), "--stdlib", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        stages.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("train: ")
    assert error.count("\n") == 1

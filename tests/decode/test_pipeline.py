from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workbench.decode.engine import SequenceRecord
from workbench.decode.pipeline import build_pipeline, load_tokenizer, resolve_device
from workbench.decode.presets import load_preset
from workbench.decode.rungs import fit
from workbench.decode.weights import shipped_folder
from workbench.errors import InputError, UnfitError
from workbench.scenario import Variant, parse_scenario

SHAPE = """
name = "tiny"
hidden = 32
vocab = 64
layer_pattern = "sliding full"
window = 5
tied_head = true
max_positions = 64
attention = { kind = "gqa", heads = 4, kv_heads = 2, qk_dim = 8, v_dim = 8 }
moe = { experts = 4, top_k = 2, inter = 32 }
mtp = { modules = 1, dense_inter = 32 }
dflash = { layers = 1, block = 4, window = 6, inter = 32, taps = [1] }
"""
PROMPTS = '{"id": "short", "text": "abc"}\n{"id": "long", "text": "' + "x = 1; " * 90 + '"}\n'
MakeVariant = Callable[..., Variant]


@pytest.fixture
def variant(tmp_path: Path) -> MakeVariant:
    """``variant(*settings)``: a variant of the tiny shape with random weights on the CPU, changed by TOML settings."""
    (tmp_path / "tiny.toml").write_text(SHAPE)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    base = """
    name = "v"
    [model]
    shape = "tiny.toml"
    weights = "random"
    [precision]
    policy = "bf16"
    [engine]
    device = "cpu"
    [prompts]
    file = "prompts.jsonl"
    count = 2
    new_tokens = 10
    """

    def build(*settings: str) -> Variant:
        return parse_scenario(base, source="test", folder=tmp_path, overrides=settings).variants()[0]

    return build


@pytest.mark.parametrize("kind", ["none", "ngram", "simulated"])
def test_a_variant_with_random_weights_decodes(variant: MakeVariant, kind: str) -> None:
    settings = [f'drafter.kind="{kind}"', "drafter.depth=3"]
    built = build_pipeline(variant(*settings, *(["drafter.accept_length=2.5"] if kind == "simulated" else [])))
    assert built.spec.name == "tiny"
    assert built.device.type == "cpu"
    assert built.dtype == torch.float32
    assert built.engine.drafter.name == kind
    assert built.engine.end_token is None
    assert (built.engine.acceptance is not None) == (kind == "simulated")
    for prompt in built.prompts:
        record = SequenceRecord(len(prompt.tokens))
        steps = list(built.engine.decode(prompt.tokens, 10, record))
        assert len(record.tokens) == 10
        assert max(step.width for step in steps) <= 4


def test_prompts_are_cut_to_what_fits(variant: MakeVariant) -> None:
    # 64 positions less 10 new tokens less a width of 1 leave 53; 630 characters would be 210 tokens.
    lengths = {prompt.id: len(prompt.tokens) for prompt in build_pipeline(variant()).prompts}
    assert lengths == {"short": 1, "long": 53}
    built = build_pipeline(variant("prompts.max_prompt_tokens=20"))
    assert [len(prompt.tokens) for prompt in built.prompts] == [1, 20]
    assert all(0 <= token < 64 for prompt in built.prompts for token in prompt.tokens)


def test_the_same_variant_builds_the_same_pipeline(variant: MakeVariant) -> None:
    one, same, other = (build_pipeline(variant(f"model.seed={seed}")) for seed in (3, 3, 4))
    assert one.prompts == same.prompts != other.prompts
    outputs = []
    for built in (one, same, other):
        record = SequenceRecord(3)
        list(built.engine.decode([1, 2, 3], 10, record))
        outputs.append(record.tokens)
    assert outputs[0] == outputs[1] != outputs[2]


def test_sampling_settings_reach_the_engine(variant: MakeVariant) -> None:
    sampled = build_pipeline(
        variant('sampling.method="sample"', "sampling.temperature=0.7", "sampling.top_p=0.9", "sampling.seed=5")
    ).engine.rule
    assert (sampled.temperature, sampled.top_p, sampled.seed) == (0.7, 0.9, 5)
    assert build_pipeline(variant("sampling.temperature=0.7")).engine.rule.temperature == 0


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeVariant:
    """``trained(*settings)``: a variant of the shipped model, which is told that it has 96 positions."""
    spec = load_preset("nano").model_copy(update={"max_positions": 96})
    monkeypatch.setattr(fit, "load_preset", lambda name: spec)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    base = """
    name = "v"
    [engine]
    device = "cpu"
    [prompts]
    file = "prompts.jsonl"
    count = 2
    new_tokens = 12
    """

    def build(*settings: str) -> Variant:
        return parse_scenario(base, source="test", folder=tmp_path, overrides=settings).variants()[0]

    return build


@pytest.mark.parametrize(("kind", "depth"), [("none", 1), ("ngram", 5), ("mtp", 2), ("dflash", 1), ("dflash", 7)])
def test_the_trained_model_decodes_to_the_end_of_its_positions(trained: MakeVariant, kind: str, depth: int) -> None:
    variant = trained(f'drafter.kind="{kind}"', f"drafter.depth={depth}")
    built = build_pipeline(variant)
    tokens = built.prompts[1].tokens
    assert len(tokens) == 96 - 12 - variant.drafter.width
    assert built.engine.end_token == 0
    built.engine.end_token = None
    record = SequenceRecord(len(tokens))
    list(built.engine.decode(tokens, 12, record))
    assert len(record.tokens) == 12


def test_the_trained_model_comes_in_its_own_format_only(trained: MakeVariant) -> None:
    build_pipeline(trained('precision.policy="as-shipped"'))
    with pytest.raises(InputError, match="the trained nano is stored as 'mxfp4-experts'"):
        build_pipeline(trained('precision.policy="bf16"'))


@pytest.mark.parametrize(
    ("settings", "kind", "complaint"),
    [
        (['engine.rung="persistent"'], UnfitError, "engine.rung: persistent needs an NVIDIA GPU and torch sees none"),
        (['model.weights="trained"'], InputError, "variant 'v': model.weights: only 'nano' ships trained weights"),
        (['drafter.kind="mtp"'], InputError, "variant 'v': drafter.kind: 'mtp' needs trained weights"),
        (['drafter.kind="dflash"'], InputError, "variant 'v': drafter.kind: 'dflash' needs trained weights"),
        (["prompts.new_tokens=64"], InputError, "variant 'v': prompts.new_tokens: 64 leave no room for a prompt"),
        (["prompts.count=3"], InputError, "prompts.count: 3 asked for, the file has 2"),
        (['precision.policy="fp9"'], InputError, "precision 'fp9' is not known"),
    ],
)
def test_what_cannot_be_built_is_named_in_one_line(
    variant: MakeVariant, settings: list[str], kind: type[Exception], complaint: str
) -> None:
    with pytest.raises(kind) as error:
        build_pipeline(variant(*settings))
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", "v") == resolve_device("cpu", "v") == torch.device("cpu")
    with pytest.raises(UnfitError, match=r"v: engine.device: 'cuda' asks for an NVIDIA GPU .*; use 'cpu'"):
        resolve_device("cuda", "v")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto", "v").type == "cuda"


def test_a_tokenizer_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json: no tokenizer here"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a readable tokenizer") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert load_tokenizer(shipped_folder()).token_to_id("<|end|>") == 0

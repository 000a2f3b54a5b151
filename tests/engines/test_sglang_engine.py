"""SGLang as a variant of a scenario, with a stand-in for the engine itself."""

import shutil
from pathlib import Path

import pytest

from workbench.decode.presets import load_preset
from workbench.diagnose.summary import diagnose
from workbench.engines.sglang_engine import check, settings
from workbench.errors import InputError, UnfitError
from workbench.runner import run_scenario
from workbench.scenario import Variant, load_scenario, parse_scenario
from workbench.trace.bundle import Bundle

FAKE = Path(__file__).with_name("fake_sglang.py")

TEXT = """
name = "versus"
[model]
preset = "qwen3-30b-a3b"
weights = "random"
[precision]
policy = "bf16"
[engine]
kind = "sglang"
device = "cpu"
arguments = { attention_backend = "triton" }
[prompts]
count = 2
max_prompt_tokens = 8
new_tokens = 13
[measure]
warmup_steps = 1
traced_steps = 2
[[matrix]]
name = "plain"
[[matrix]]
name = "drafted"
drafter = { kind = "simulated", depth = 3, accept_length = 3.0 }
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(FAKE, folder / "sglang.py")
    (folder / "torch.py").write_text('__version__ = "0.0.fake"\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("FAKE_SGLANG_ACCEPT", "1")
    return folder


def variant(**changes: dict[str, object]) -> Variant:
    scenario = parse_scenario(TEXT, source="x", folder=Path())
    return scenario.variants()[0].model_copy(update=changes)


def test_both_variants_go_through_the_passes_of_a_run(site: Path, tmp_path: Path) -> None:
    scenario = parse_scenario(TEXT, source="x", folder=tmp_path)
    with Bundle.open(run_scenario(scenario, tmp_path / "b")) as bundle:
        assert bundle.manifest.state == "sealed"
        found = {one.name: one for one in diagnose(bundle).variants}
        assert found["plain"].tok_s.value > 0
        assert found["plain"].accept_length.value == 1
        steps = bundle.query("SELECT * FROM steps WHERE variant = 'plain' AND run_pass = 'clean'").to_pylist()
        assert len(steps) == 2 * 12  # the first token is the prefill's
        assert {step["width"] for step in steps} == {1}
        limits = {row["what"] for row in bundle.table("limits").to_pylist()}
        assert any("within a step" in what for what in limits)
        widths = bundle.query("SELECT DISTINCT width FROM tensors WHERE variant = 'drafted'").to_pylist()
        assert widths == [{"width": 4}]


def test_a_missing_engine_ends_the_run_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_SGLANG_PYTHON", "/nowhere/python")
    scenario = parse_scenario(TEXT, source="x", folder=tmp_path)
    with pytest.raises(UnfitError, match=r"engine\.python: '/nowhere/python' cannot be run"):
        run_scenario(scenario, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_speculation_and_arguments_reach_the_engine(tmp_path: Path) -> None:
    spec = load_preset("qwen3-30b-a3b")
    plain, drafted = parse_scenario(TEXT, source="x", folder=Path()).variants()
    arguments, environment = settings(plain, spec, tmp_path)
    assert environment == {}
    assert arguments["attention_backend"] == "triton"
    assert "speculative_algorithm" not in arguments
    assert (Path(arguments["model_path"]) / "config.json").is_file()
    arguments, environment = settings(drafted, spec, tmp_path)
    assert (arguments["speculative_algorithm"], arguments["speculative_num_draft_tokens"]) == ("DFLASH", 4)
    assert environment == {"SGLANG_SIMULATE_ACC_LEN": "3", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


@pytest.mark.parametrize("change", ["weights", "preset", "drafter", "method", "faults"])
def test_what_sglang_cannot_do_is_refused_at_once(change: str) -> None:
    plain = variant()
    changes = {
        "weights": {"model": plain.model.model_copy(update={"weights": "trained"})},
        "preset": {"model": plain.model.model_copy(update={"preset": "glm-5.2"})},
        "drafter": {"drafter": plain.drafter.model_copy(update={"kind": "ngram"})},
        "method": {"sampling": plain.sampling.model_copy(update={"method": "sample"})},
        "faults": {"engine": plain.engine.model_copy(update={"faults": ["item-per-step"]})},
    }[change]
    changed = plain.model_copy(update=changes)
    spec = load_preset(changed.model.preset or "")
    with pytest.raises(InputError, match=r"variant 'plain': ") as error:
        check(changed, spec)
    assert error.value.hint


@pytest.mark.parametrize("name", ["versus-sglang-gpt-oss-20b", "sglang-qwen3-30b-dflash"])
def test_the_built_in_scenarios_ask_for_what_sglang_can_do(name: str) -> None:
    for one in load_scenario(name).variants():
        if one.engine.kind == "sglang":
            check(one, load_preset(one.model.preset or ""))

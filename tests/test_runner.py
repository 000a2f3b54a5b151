import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import runner
from workbench.decode import engine
from workbench.decode.engine import Engine, SequenceRecord, StepRecord
from workbench.decode.rungs import build
from workbench.decode.rungs.grouping import ExpertForm
from workbench.diagnose.summary import diagnose
from workbench.errors import InputError, UnfitError
from workbench.quantity import Quantity
from workbench.runner import run_scenario
from workbench.scenario import Scenario, parse_scenario
from workbench.trace import writer
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle
from workbench.trace.spool import SpoolReader

SHAPE = """
name = "tiny"
hidden = 32
vocab = 16
layer_pattern = "sliding full"
window = 5
tied_head = true
max_positions = 128
attention = { kind = "gqa", heads = 4, kv_heads = 2, qk_dim = 8, v_dim = 8 }
moe = { experts = 4, top_k = 2, inter = 32 }
"""
SCENARIO = """
name = "small"
model = { shape = "tiny.toml", weights = "random" }
precision = { policy = "bf16" }
engine = { device = "cpu" }
prompts = { file = "prompts.jsonl", count = 2, new_tokens = 12 }
measure = { repetitions = 2, warmup_steps = 1, traced_steps = 15 }
[[matrix]]
name = "plain"
[[matrix]]
name = "ngram"
drafter = { kind = "ngram", depth = 3, order = 2 }
[[matrix]]
name = "simulated"
drafter = { kind = "simulated", depth = 3, accept_length = 2.5 }
measure = { repetitions = 1 }
"""
NEW, WARMUP, TRACED_STEPS = 12, 1, 15
CLEAN, TRACED = "clean", "traced"
MakeScenario = Callable[..., Scenario]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenario")
    (path / "tiny.toml").write_text(SHAPE)
    (path / "prompts.jsonl").write_text('{"id": "a", "text": "some text here"}\n{"id": "b", "text": "other words"}\n')
    return path


@pytest.fixture(scope="module", autouse=True)
def roof() -> Iterator[None]:
    """The roof, without the second that measuring it takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            runner, "measure_read_roof", lambda device: Quantity(12.5, "GB/s", "measured", note=f"of the {device}")
        )
        yield


@pytest.fixture(scope="module")
def scenario(folder: Path) -> MakeScenario:
    """``scenario(*settings)``: three variants of a tiny model with random weights, changed by TOML settings."""
    return lambda *settings: parse_scenario(SCENARIO, source="small.toml", folder=folder, overrides=settings)


@pytest.fixture(scope="module")
def reported() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def bundle(
    scenario: MakeScenario, tmp_path_factory: pytest.TempPathFactory, reported: list[tuple[str, int, int]]
) -> Iterator[Bundle]:
    out = tmp_path_factory.mktemp("runs") / "small"
    assert run_scenario(scenario(), out, progress=lambda *event: reported.append(event)) == out
    with Bundle.open(out) as opened:
        yield opened


def rows(bundle: Bundle, table: str, **where: object) -> Rows:
    found: Rows = bundle.table(table).to_pylist()
    return [row for row in found if all(row[key] == value for key, value in where.items())]


def test_the_bundle_is_sealed_whole_and_says_what_was_run(bundle: Bundle, scenario: MakeScenario) -> None:
    assert bundle.manifest.state == "sealed"
    assert check_bundle(bundle.path).ok
    assert {name for name in bundle.manifest.rows if bundle.rows(name)} == {
        "steps",
        "sequences",
        "host",
        "tensors",
        "roofs",
        "env",
        "limits",
    }
    wanted = scenario()
    assert bundle.manifest.scenario == wanted.to_json()
    assert bundle.manifest.scenario_sha256 == wanted.sha256
    assert {record.name: record.settings for record in bundle.manifest.variants} == {
        variant.name: variant.settings() for variant in wanted.variants()
    }
    assert bundle.manifest.environment["python"]
    assert bundle.manifest.device == {"name": "cpu"}
    assert [source.name for source in bundle.manifest.clock.sources] == [
        "host: plain",
        "host: ngram",
        "host: simulated",
    ]
    assert rows(bundle, "roofs") == [
        {"device": "cpu", "name": "read", "bytes_per_s": 12_500_000_000, "tag": "measured", "note": "of the cpu"}
    ]


def test_clean_passes_are_interleaved_and_come_before_any_instrument(bundle: Bundle) -> None:
    steps = rows(bundle, "steps")
    assert [row["step_id"] for row in steps] == list(range(len(steps)))
    assert [row["start_ns"] for row in steps] == sorted(row["start_ns"] for row in steps)
    assert all(row["end_ns"] <= after["start_ns"] for row, after in pairwise(steps))
    passes = [key for key, _ in groupby((row["run_pass"], row["variant"]) for row in steps)]
    clean = ["plain", "ngram", "simulated", "plain", "ngram"]  # the last one is repeated once less
    assert passes == [("clean", name) for name in clean] + [
        ("traced", name) for name in ("plain", "ngram", "simulated")
    ]


def test_steps_and_sequences_belong_together(bundle: Bundle) -> None:
    sequences = rows(bundle, "sequences")
    assert [row["sequence_id"] for row in sequences] == list(range(len(sequences)))
    for sequence in sequences:
        steps = rows(bundle, "steps", sequence_id=sequence["sequence_id"])
        assert {(row["variant"], row["run_pass"]) for row in steps} == {(sequence["variant"], sequence["run_pass"])}
        assert [row["index"] for row in steps] == list(range(len(steps)))
        assert [row["warmup"] for row in steps] == [index < WARMUP for index in range(len(steps))]
        assert sequence["prefill_start_ns"] < sequence["prefill_end_ns"] <= steps[0]["start_ns"]
        assert 1 + sum(row["committed"] for row in steps) == sequence["new_tokens"]
        context = sequence["prompt_tokens"]
        for row in steps:
            assert row["context"] == context
            assert row["width"] == row["drafted"] + 1
            assert row["committed"] == row["accepted"] + 1
            assert len(row["experts"]) == 2
            context += row["committed"]
        packed = array("i", sequence["output_tokens"])
        assert sys.byteorder == "little"
        assert sequence["output_sha256"] == hashlib.sha256(packed.tobytes()).hexdigest()
        if sequence["run_pass"] == CLEAN:
            assert sequence["finish"] == "length"
            assert len(sequence["output_tokens"]) == sequence["new_tokens"] == NEW
    prompts = [row["prompt_id"] for row in sequences if (row["variant"], row["run_pass"]) == ("plain", "clean")]
    assert prompts == ["a", "b", "a", "b"]


def test_no_more_steps_are_traced_than_asked_for(bundle: Bundle) -> None:
    counts = {name: len(rows(bundle, "steps", variant=name, run_pass=TRACED)) for name in ("plain", "simulated")}
    assert counts["plain"] == TRACED_STEPS  # of 11 and then 4 of another prompt
    assert counts["simulated"] < TRACED_STEPS  # both prompts were at their end
    finish = [row["finish"] for row in rows(bundle, "sequences", variant="plain", run_pass=TRACED)]
    assert finish == ["length", "aborted"]


def test_traced_rows_lie_in_the_step_and_phase_they_name(bundle: Bundle) -> None:
    steps = {row["step_id"]: row for row in rows(bundle, "steps", run_pass=TRACED)}
    residual = max(source.residual_ns for source in bundle.manifest.clock.sources)
    host = rows(bundle, "host")
    ids = {row["host_id"]: row for row in host}
    assert len(ids) == len(host)
    outside = 0
    for row in host:
        if row["parent_id"] is not None:
            parent = ids[row["parent_id"]]
            assert parent["variant"] == row["variant"]
            assert parent["start_ns"] <= row["start_ns"] <= row["end_ns"] <= parent["end_ns"]
        if row["step_id"] is None:
            outside += 1
            assert row["phase"] is None
            assert not any(step["start_ns"] <= row["start_ns"] < step["end_ns"] for step in steps.values())
            continue
        step = steps[row["step_id"]]
        assert step["variant"] == row["variant"]
        bounds = [step["start_ns"], step["draft_end_ns"], step["forward_end_ns"], step["end_ns"]]
        phase = ["draft", "forward", "verify"].index(row["phase"])
        assert bounds[phase] <= row["start_ns"] < bounds[phase + 1]
        if row["category"] == "annotation" and all(abs(row["start_ns"] - bound) > residual for bound in bounds):
            assert row["phase"] == row["name"]
    assert outside  # the prefills
    named = [row["name"] for row in host if row["category"] == "annotation"]
    assert {name: named.count(name) for name in set(named)} == dict.fromkeys(("draft", "forward", "verify"), len(steps))


def test_limits_and_the_byte_model_are_stated_for_every_variant(bundle: Bundle) -> None:
    names = {record.name for record in bundle.manifest.variants}
    for name in names:
        assert "HBM throughput" in {row["what"] for row in rows(bundle, "limits", variant=name)}
        tensors = rows(bundle, "tensors", variant=name)
        steps = [row for row in rows(bundle, "steps", variant=name, run_pass=CLEAN) if not row["warmup"]]
        experts = sum(sum(row["experts"]) for row in steps) / len(steps)
        (read,) = (row["read_bytes"] for row in tensors if row["tensor_class"] == "routed_experts")
        assert read == round(experts * 3 * 32 * 32 * 2)  # of the steps that count
        assert rows(bundle, "env", key=f"experts.{name}")[0]["value"] == "looped: the grouped product is for GPUs"


def test_gathered_experts_are_a_fact_and_a_limit(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "with_grouped_experts", lambda target: (target, ExpertForm("gathered", "too old")))
    run_scenario(scenario("measure.repetitions=1", "measure.traced_steps=0", "prompts.count=1"), tmp_path / "run")
    with Bundle.open(tmp_path / "run") as opened:
        assert rows(opened, "env", key="experts.plain")[0]["value"] == "gathered: too old"
        (row,) = rows(opened, "limits", variant="plain", what="experts as one grouped product")
        assert row["why"] == "too old"


def test_progress_ends_where_it_said_it_would(bundle: Bundle, reported: list[tuple[str, int, int]]) -> None:
    last = {what: (done, total) for what, done, total in reported}
    assert next(iter(last)) == "build"
    assert "roof of the cpu" in last
    assert {"plain: clean", "plain: traced", "simulated: clean"} <= set(last)
    assert all(done == total for done, total in last.values())


def test_the_bundle_can_be_diagnosed(bundle: Bundle) -> None:
    diagnosis = diagnose(bundle)
    assert [variant.name for variant in diagnosis.variants] == ["plain", "ngram", "simulated"]
    for variant in diagnosis.variants:
        assert sum(cause.total_ns for cause in variant.accounting.causes) == variant.accounting.wall_ns
    identity = diagnosis.variants[1].identity
    assert identity is not None
    assert identity.identical
    assert identity.compared == 8  # two prompts, two repetitions of each on both sides


def test_without_instruments_the_limits_say_so(scenario: MakeScenario, tmp_path: Path) -> None:
    for setting, why in (
        ("measure.traced_steps=0", "measure.traced_steps is 0"),
        ("instruments.host=false", "instruments.host is false"),
    ):
        out = tmp_path / setting
        run_scenario(scenario(setting, "measure.repetitions=1", "prompts.count=1"), out)
        with Bundle.open(out) as opened:
            assert opened.rows("host") == 0
            assert {row["run_pass"] for row in rows(opened, "steps")} == {"clean"}
            assert len(rows(opened, "limits", why=why)) == 3
            assert opened.manifest.clock.sources == []


class Fault:
    """Raises ``error`` at the ``at``-th verification, counted over the whole run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.calls, verify = 0, engine.verify_greedy

        def failing(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise error
            return verify(*arguments)

        monkeypatch.setattr(engine, "verify_greedy", failing)


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_was_measured_before_a_fault_is_kept_and_diagnosed(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    done = 2 * (NEW - 1)  # both prompts of the first variant
    Fault(monkeypatch, done + 3, error)
    out = tmp_path / "failed"
    with pytest.raises(type(error)):
        run_scenario(scenario(), out)
    with Bundle.open(out) as opened:
        assert opened.manifest.state == "failed"
        assert opened.manifest.failure in ("RuntimeError: out of luck", "interrupted by the user")
        steps = rows(opened, "steps")
        assert [row["step_id"] for row in steps] == list(range(done + 2))
        assert [(row["variant"], row["finish"]) for row in rows(opened, "sequences")] == [
            ("plain", "length"),
            ("plain", "length"),
            ("ngram", "aborted"),
        ]
        diagnosis = diagnose(opened)
        assert [variant.name for variant in diagnosis.variants] == ["plain", "ngram"]
        assert diagnosis.failed == ("simulated",)
        identity = diagnosis.variants[1].identity
        assert identity is not None
        assert identity.compared == 0  # a text that was cut off is compared with nothing


def test_a_fault_in_the_traced_pass_leaves_no_instrument_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCENARIO.split("[[matrix]]")[0]  # the plain variant alone
    settings = ["measure.repetitions=1", "prompts.new_tokens=6"]
    alone = parse_scenario(text, source="small.toml", folder=folder, overrides=settings)
    with monkeypatch.context() as patch:
        Fault(patch, 2 * (6 - 1) + 4, RuntimeError("out of luck"))
        with pytest.raises(RuntimeError, match="out of luck"):
            run_scenario(alone, tmp_path / "failed")
    with Bundle.open(tmp_path / "failed") as opened:
        assert len(rows(opened, "steps", run_pass=TRACED)) == 3
    run_scenario(alone, tmp_path / "again")
    with Bundle.open(tmp_path / "again") as opened:
        assert opened.rows("host")


def test_steps_reach_the_disk_while_the_run_goes_on(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "live"
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.0)
    monkeypatch.setattr("workbench.run.sequence.HOLD_SECONDS", 0.0)
    decode, held_back = Engine.decode, []
    done = 0

    def watched(self: Engine, *arguments: Any) -> Iterator[StepRecord]:
        nonlocal done
        for step in decode(self, *arguments):
            spool = out / "spool" / "steps.arrows"
            on_disk = sum(batch.num_rows for batch in SpoolReader(spool, "steps").batches()) if spool.exists() else 0
            held_back.append(done - on_disk)
            yield step
            done += 1

    monkeypatch.setattr(Engine, "decode", watched)
    run_scenario(scenario("measure.traced_steps=0"), out)
    assert len(held_back) > 60
    assert min(held_back) >= 0
    assert max(held_back) < 3


def test_what_cannot_run_is_said_before_anything_is_written(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for settings, kind in (
        (['engine.device="cuda"'], UnfitError),
        (["prompts.count=9"], InputError),
        (['model.weights="trained"'], InputError),
    ):
        with pytest.raises(kind) as error:
            run_scenario(scenario(*settings), tmp_path / "out")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()


def test_variants_cannot_ask_for_different_threads(folder: Path, tmp_path: Path) -> None:
    text = 'name = "t"\n[[matrix]]\nname = "a"\nengine.threads = 2\n[[matrix]]\nname = "b"'
    with pytest.raises(InputError, match=r"engine\.threads: variants ask for 2, None, a run has one thread pool"):
        run_scenario(parse_scenario(text, source="t", folder=folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_threads_are_set_for_the_run_alone(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = torch.get_num_threads(), []
    decode = Engine.decode

    def watched(self: Engine, prompt: list[int], new: int, record: SequenceRecord, *rest: Any) -> Any:
        seen.append(torch.get_num_threads())
        return decode(self, prompt, new, record, *rest)

    monkeypatch.setattr(Engine, "decode", watched)
    run_scenario(scenario("engine.threads=2", "prompts.new_tokens=2", "measure.traced_steps=0"), tmp_path / "out")
    assert set(seen) == {2}
    assert torch.get_num_threads() == before

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import runner
from workbench.errors import InputError
from workbench.run import fresh, probe_child
from workbench.run.fresh import fresh_costs, modes, processes
from workbench.run.paired_cost import PairedCost, paired_cost
from workbench.runner import run_scenario
from workbench.scenario import Scenario, Variant
from workbench.trace.bundle import Bundle

MakeScenario = Callable[..., Scenario]


class Processes:
    """Stands for subprocess.run: answers by the last mode of its process, and keeps the questions."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.questions = answers, list[dict[str, Any]]()

    def __call__(self, command: list[str], *, input: str, **more: Any) -> Any:
        question = json.loads(input)
        self.questions.append(question)
        answer = self.answers[question["modes"][-1]]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return subprocess.CompletedProcess(command, 1, "", answer)
        return subprocess.CompletedProcess(command, 0, f"a library's chatter\n{json.dumps(answer)}\n", "")


def asked(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> Processes:
    processes = Processes(answers)
    monkeypatch.setattr(subprocess, "run", processes)
    return processes


CLEAN = {"mode": "none", "walls": [["p", 0, 100], ["p", 1, 300], ["p", 2, 200], ["p", 3, 9000]], "instruments": []}
TRACED = {"mode": "traced", "walls": [["p", 0, 500], ["p", 1, 700], ["p", 2, 600]], "instruments": ["host"]}
GOOD = {"traced": {"passes": [CLEAN, TRACED]}}


def test_costs_of_processes_of_their_own_are_in_the_manifest(
    scenario: MakeScenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = asked(monkeypatch, GOOD)
    built: list[int] = []
    plain = runner.build_pipeline
    monkeypatch.setattr(
        runner, "build_pipeline", lambda *rest: (built.append(len(processes.questions)), plain(*rest))[1]
    )
    run_scenario(scenario("instruments.fresh_process=true"), tmp_path / "b")
    assert [question["modes"] for question in processes.questions] == [["none", "traced"]] * 2
    assert built[0] == 2  # before this process holds the model
    with Bundle.open(tmp_path / "b") as bundle:
        found = [cost for cost in bundle.manifest.perturbation if cost.fresh]
        assert [(cost.variant, cost.instrument, cost.clean_step_ns, cost.traced_step_ns) for cost in found] == [
            ("a", "host", 200, 600),
            ("b", "host", 200, 600),
        ]
        assert {cost.instrument for cost in bundle.manifest.perturbation if not cost.fresh} == {"host"}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("Traceback\nMemoryError: no room\n\n", "its process ended with 1: MemoryError: no room"),
        ({"error": "the machine has no GPU"}, "the machine has no GPU"),
        ({"passes": [CLEAN, {"mode": "traced", "error": "mode 'traced': it broke"}]}, "mode 'traced': it broke"),
        ({"passes": [{"mode": "none", "error": "no step was decoded"}, TRACED]}, "no step was decoded"),
        (
            {"passes": [CLEAN, {**TRACED, "walls": [["q", 0, 500]]}]},
            "mode 'traced': no clean step at the same place of the same prompt",
        ),
        (subprocess.TimeoutExpired("x", 600), "its process took longer than 600 s"),
    ],
)
def test_a_process_that_fails_costs_that_number_alone(
    scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch, answer: Any, why: str
) -> None:
    asked(monkeypatch, {**GOOD, "traced": answer})
    costs, missing = fresh_costs(scenario("instruments.fresh_process=true").variants()[:1], lambda *_: None)
    assert costs == []
    assert [(name, one.instrument, one.why) for name, one in missing] == [("a", "perturbation", why)]


def test_without_being_asked_no_process_is_started(scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = asked(monkeypatch, {})
    assert fresh_costs(scenario().variants(), lambda *_: None) == ([], [])
    assert processes.questions == []


def test_modes_are_those_that_the_device_has(scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch) -> None:
    (variant, _) = scenario().variants()
    assert modes(variant) == ["none", "traced"]
    monkeypatch.setattr(fresh, "resolve_device", lambda name, where: type("Device", (), {"type": "cuda"}))
    assert modes(variant) == ["none", "sampled", "traced"]
    (persistent, _) = scenario('engine.rung="persistent"').variants()
    assert modes(persistent) == ["none", "sampled", "laned", "traced"]


def test_the_sampler_takes_turns_and_the_profiler_shares_a_process_with_nothing() -> None:
    turns = ["none", "sampled"] * 5
    assert processes(["none", "sampled", "laned", "traced"], 5) == [
        [*turns, "none", "laned", "none"],
        ["none", "traced"],
    ]
    assert processes(["none", "sampled"], 5) == [[*turns, "none"]]
    assert processes(["none", "traced"], 5) == [["none", "traced"]]
    assert processes(["none"], 5) == []


def test_a_child_measures_one_variant_pass_by_pass(scenario: MakeScenario) -> None:
    variant = scenario().variants()[0]
    question = {"variant": variant.settings(), "folder": variant.folder, "modes": ["none", "traced", "laned", "none"]}
    passes = probe_child.measure(question)["passes"]
    assert [one["mode"] for one in passes] == ["none", "traced", "laned", "none"]
    for at, instruments in ((0, []), (1, ["host"]), (3, [])):
        assert passes[at]["instruments"] == instruments
        assert len(passes[at]["walls"]) == 5 - 1  # the first is warm-up
        assert all(wall > 0 for _, _, wall in passes[at]["walls"])
    assert passes[2] == {"mode": "laned", "error": "mode 'laned': not on cpu"}
    assert isinstance(paired_cost(passes, "traced"), PairedCost)


def test_a_child_says_why_it_has_no_answer(
    scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = scenario('engine.device="cpu"').variants()[0]
    question = {"variant": variant.settings(), "folder": variant.folder, "modes": ["none"]}

    def refuse(variant: Variant) -> None:
        raise InputError("no such weights")

    monkeypatch.setattr(probe_child, "build_pipeline", refuse)
    monkeypatch.setattr("json.load", lambda stream: question)
    assert probe_child.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"error": "no such weights"}

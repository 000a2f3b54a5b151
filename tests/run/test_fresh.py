import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench import runner
from workbench.errors import InputError
from workbench.run import fresh, probe_child
from workbench.run.fresh import fresh_costs, modes
from workbench.runner import run_scenario
from workbench.scenario import Scenario
from workbench.trace.bundle import Bundle

MakeScenario = Callable[..., Scenario]


class Processes:
    """Stands for subprocess.run: answers by mode, and keeps the questions."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.questions = answers, list[dict[str, Any]]()

    def __call__(self, command: list[str], *, input: str, **more: Any) -> Any:
        question = json.loads(input)
        self.questions.append(question)
        answer = self.answers[question["mode"]]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return subprocess.CompletedProcess(command, 1, "", answer)
        return subprocess.CompletedProcess(command, 0, f"a library's chatter\n{json.dumps(answer)}\n", "")


def asked(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> Processes:
    processes = Processes(answers)
    monkeypatch.setattr(subprocess, "run", processes)
    return processes


GOOD = {
    "none": {"walls": [100, 300, 200], "instruments": []},
    "traced": {"walls": [500, 700, 600], "instruments": ["host"]},
}


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
    assert [question["mode"] for question in processes.questions] == ["none", "traced"] * 2
    assert built[0] == 4  # before this process holds the model
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
        ({"error": "mode 'traced': no step was decoded"}, "mode 'traced': no step was decoded"),
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


@pytest.mark.parametrize(("mode", "steps", "instruments"), [("none", 5, []), ("traced", 5, ["host"])])
def test_a_child_measures_one_variant_under_one_mode(
    scenario: MakeScenario, mode: str, steps: int, instruments: list[str]
) -> None:
    variant = scenario().variants()[0]
    answer = probe_child.measure({"variant": variant.settings(), "folder": variant.folder, "mode": mode})
    assert answer["instruments"] == instruments
    assert len(answer["walls"]) == steps - 1  # the first is warm-up
    assert all(wall > 0 for wall in answer["walls"])


def test_a_child_says_why_it_has_no_answer(
    scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = scenario().variants()[0]
    question = {"variant": variant.settings(), "folder": variant.folder, "mode": "sampled"}
    with pytest.raises(InputError, match="mode 'sampled': not on cpu"):
        probe_child.measure(question)
    monkeypatch.setattr("json.load", lambda stream: question)
    assert probe_child.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"error": "mode 'sampled': not on cpu"}

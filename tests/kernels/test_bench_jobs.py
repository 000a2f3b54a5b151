import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.kernels import bench_jobs
from workbench.kernels.budget import DeviceHangError


class FakeBudget:
    def __init__(self, left: list[float]) -> None:
        self._left = left
        self.notes: list[str] = []
        self.elapsed = 1.5
        self.finished = False

    @property
    def left(self) -> float:
        return self._left.pop(0) if self._left else 100.0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self) -> None:
        self.finished = True


def row(**fields: Any) -> dict[str, Any]:
    return fields


def failing(error: Exception) -> dict[str, Any]:
    raise error


def started(monkeypatch: pytest.MonkeyPatch, *left: float) -> tuple[Any, dict[str, Any]]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Abacus")
    budget: Any = FakeBudget(list(left))
    return budget, bench_jobs.new_report(budget, 3)


def test_each_row_is_kept_as_it_comes_and_a_failure_costs_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    budget, report = started(monkeypatch)
    jobs: list[bench_jobs.Job] = [
        ("checks", "tiny", lambda: row(name="tiny", ok=True)),
        ("checks", "odd", lambda: failing(ValueError("wrong shape"))),
        ("roof", "roof", lambda: row(best=4.5e12)),
        ("timings", "base", lambda: row(variant="base", us=12.5, rows=[0] * 1000)),
    ]
    assert bench_jobs.run_jobs(jobs, report, budget, "bench.json", ("rows",)) is False
    assert [check["ok"] for check in report["checks"]] == [True, False]
    assert report["checks"][1]["error"] == "ValueError: wrong shape"
    assert report["roof"] == {"best": 4.5e12}
    assert json.loads((tmp_path / "bench.json").read_text()) == report
    assert budget.notes[-1] == 'timings {"variant": "base", "us": 12.5}'
    assert bench_jobs.end(report, budget, hung=False) == 1
    assert budget.finished


@pytest.mark.parametrize("error", [DeviceHangError("the step"), RuntimeError("CUDA error: an illegal memory access")])
def test_after_a_hang_or_a_lost_context_nothing_else_is_tried(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    budget, report = started(monkeypatch)
    jobs: list[bench_jobs.Job] = [("timings", "a", lambda: failing(error)), ("timings", "b", lambda: row(us=1.0))]
    assert bench_jobs.run_jobs(jobs, report, budget, "bench.json", ()) is True
    assert len(report["timings"]) == 1
    assert budget.notes[-1] == "not run: b"


def test_jobs_are_not_started_when_the_time_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    budget, report = started(monkeypatch, 50.0, 1.0)
    jobs: list[bench_jobs.Job] = [("checks", name, lambda: row(ok=True)) for name in ("first", "second")]
    assert bench_jobs.run_jobs(jobs, report, budget, "bench.json", ()) is False
    assert report["checks"] == [{"ok": True}]
    assert budget.notes[-1] == "not run: second"
    assert bench_jobs.end(report, budget, hung=False) == 0


def test_compilations_run_together_and_a_failure_is_raised() -> None:
    done: list[int] = []
    jobs: list[Any] = [functools.partial(done.append, number) for number in range(40)]
    assert bench_jobs.compile_together(jobs) == 40
    assert sorted(done) == list(range(40))
    with pytest.raises(ValueError, match="no such macro"):
        bench_jobs.compile_together([functools.partial(failing, ValueError("no such macro"))])

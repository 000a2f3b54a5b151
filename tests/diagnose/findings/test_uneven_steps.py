"""Uneven steps: what is the step's own, what other work took, and what the whole run has."""

from collections.abc import Callable
from typing import Any

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find_in
from workbench.diagnose.speculation import break_even
from workbench.trace.bundle import Bundle

Make = Callable[..., Bundle]
MS = 1_000_000
CPU = {"engine": {"device": "cpu", "threads": 1}}


def steps(walls: list[int], variant: str = "v", first: int = 0, **columns: Any) -> list[dict[str, Any]]:
    rows, moment = [], first * 1000 * MS
    for number, wall in enumerate(walls):
        own = {name: value(number) if callable(value) else value for name, value in columns.items()}
        times = {"start_ns": moment, "draft_end_ns": moment, "forward_end_ns": moment + wall, "end_ns": moment + wall}
        rows.append(times | {"variant": variant, "step_id": first + number, "index": number} | own)
        moment += wall + 1000
    return rows


def even(count: int = 60, ms: int = 10) -> list[int]:
    return [ms * MS + (number % 7 - 3) * 50_000 for number in range(count)]


def with_tail(at: list[int], count: int = 60, ms: int = 60) -> list[int]:
    walls = even(count)
    for number in at:
        walls[number] = ms * MS
    return walls


def used(walls: list[int], *, taken: bool, sleeps: int = 0) -> dict[str, Any]:
    """The scheduler's columns: what is beyond 10 ms was taken by other work, or was the thread's own computing."""

    def beyond(number: int) -> int:
        return max(walls[number] - 10 * MS, 0)

    ready = beyond if taken else lambda number: 0
    cpu = (lambda number: walls[number] - beyond(number)) if taken or sleeps else (lambda number: walls[number])
    return {"cpu_ns": cpu, "process_cpu_ns": cpu, "ready_ns": ready, "sleeps": sleeps}


def found(bundle: Bundle, variant: str = "v") -> dict[str, Finding]:
    return {one.id: one for one in find_in(Facts(bundle, variant))}


def test_steps_that_had_no_cpu_are_the_machines(make_bundle: Make) -> None:
    walls = with_tail([7, 20, 41])
    one = found(make_bundle({"steps": steps(walls, **used(walls, taken=True))}, {"v": CPU}))
    assert "step-outliers" not in one
    assert one["cpu-contention"].severity == "note"
    assert one["cpu-contention"].recoverable is None
    assert one["cpu-contention"].evidence[0].ids[0] in (7, 20, 41)
    assert "3 of 60" in one["cpu-contention"].sentence


def test_steps_that_the_hypervisor_took_are_the_machines(make_bundle: Make) -> None:
    walls = with_tail([7, 20, 41])
    columns = used(walls, taken=True) | {"ready_ns": 0}  # neither run, nor waited, nor slept
    one = found(make_bundle({"steps": steps(walls, **columns)}, {"v": CPU}))
    assert set(one) & {"step-outliers", "cpu-contention"} == {"cpu-contention"}


def test_steps_that_compute_or_sleep_are_their_own(make_bundle: Make) -> None:
    walls = with_tail([7, 20, 41])
    computes = found(make_bundle({"steps": steps(walls, **used(walls, taken=False))}, {"v": CPU}))["step-outliers"]
    assert computes.severity == "major"
    assert "computes in them" in computes.sentence
    sleeps = found(make_bundle({"steps": steps(walls, **used(walls, taken=False, sleeps=1))}, {"v": CPU}))
    assert "gives up the CPU" in sleeps["step-outliers"].sentence
    assert "cpu-contention" not in sleeps


def test_what_all_variants_lose_is_not_one_variants(make_bundle: Make) -> None:
    rows = steps(with_tail([7, 20, 41])) + steps(with_tail([3, 30, 44]), "other", 100)
    one = found(make_bundle({"steps": rows}, {"v": CPU, "other": CPU}))["step-outliers"]
    assert one.severity == "note"
    assert one.recoverable is None
    assert "other variants" in one.sentence
    alone = found(
        make_bundle({"steps": steps(with_tail([7, 20, 41])) + steps(even(), "other", 100)}, {"v": CPU, "other": CPU})
    )
    assert alone["step-outliers"].severity == "major"


def test_a_burst_may_be_the_machines_where_the_scheduler_was_not_recorded(make_bundle: Make) -> None:
    burst = found(make_bundle({"steps": steps(with_tail([40, 41, 44]))}, {"v": CPU}))["step-outliers"]
    assert burst.severity == "note"
    assert "burst" in burst.sentence
    walls = with_tail([40, 41, 44])
    seen = found(make_bundle({"steps": steps(walls, **used(walls, taken=False))}, {"v": CPU}))["step-outliers"]
    assert seen.severity == "major"


def test_wide_steps_are_no_outliers(make_bundle: Make) -> None:
    at = [5, 17, 29, 41, 53, 54]
    walls = with_tail(at)
    rows = steps(walls, width=lambda number: 8 if number in at else 1)
    assert "step-outliers" not in found(make_bundle({"steps": rows}, {"v": CPU}))


def test_more_threads_than_cpus(make_bundle: Make) -> None:
    walls = even()
    columns = {"cpu_ns": 5 * MS, "process_cpu_ns": 20 * MS, "ready_ns": 4 * MS, "sleeps": 0}
    env = [{"key": "cpu.usable_threads", "value": "2"}, {"key": "torch.threads", "value": "2"}]
    settings = {"v": {"engine": {"device": "cpu", "threads": 8}}}
    one = found(make_bundle({"steps": steps(walls, **columns), "env": env}, settings))
    assert one["thread-oversubscription"].recoverable is not None
    assert "8 threads share 2 CPUs" in one["thread-oversubscription"].sentence
    idle = columns | {"process_cpu_ns": 5 * MS}  # other work has the CPUs
    one = found(make_bundle({"steps": steps(walls, **idle), "env": env}, settings))
    assert "thread-oversubscription" not in one
    assert "cpu-contention" in one


def test_speculation_is_judged_by_the_steps_own_time(make_bundle: Make) -> None:
    """A drafter whose prompts fell on a busy machine does not cost what the machine took."""
    plain, own = even(40), [30 * MS] * 40
    rows = steps(plain, "plain", **used(plain, taken=True))
    rows += steps(own, "own", 100, committed=2, drafted=1, accepted=1, width=2, **used(own, taken=True))
    rows = [row | {"sequence_id": number // 10} for number, row in enumerate(rows)]
    names = {"plain": range(4), "own": range(4, 8)}
    sequences = [
        {"variant": name, "sequence_id": number, "prompt_id": f"p{number % 4}"}
        for name in names
        for number in names[name]
    ]
    settings = {"plain": CPU | {"drafter": {"kind": "none"}}, "own": CPU | {"drafter": {"kind": "mtp", "depth": 1}}}
    bundle = make_bundle({"steps": rows, "sequences": sequences}, settings, device={"name": "cpu"})
    result = break_even(bundle, "own", "plain")
    assert result is not None
    assert abs(result.speedup.value - 2.0) < 0.05

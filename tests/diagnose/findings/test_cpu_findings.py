"""Losses of steps that run on the host itself: places without an operator, copies, pauses between steps, twins."""

from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find_in
from workbench.diagnose.findings.cpu_host import growth
from workbench.trace.bundle import Bundle

Make = Callable[..., Bundle]
Row = dict[str, Any]
MS = 1_000_000
CPU = {"engine": {"device": "cpu", "threads": 1}, "drafter": {"kind": "none"}, "sampling": {"method": "greedy"}}
TAKES = {"aten::mm": 100_000, "aten::add": 100_000, "aten::mul": 100_000, "aten::copy_": 20_000}
NAMES = tuple(TAKES)


def run(
    variant: str = "v",
    *,
    first: int = 0,
    pauses: dict[int, int] | None = None,
    long: dict[str, int] | None = None,
    twice: str = "",
    phase: str = "forward",
    between: int = 100_000,
    slower: float = 1.0,
    hit: Callable[[int], int] = lambda step: 0,
) -> dict[str, list[Row]]:
    """40 clean and 8 traced steps of about 3.6 ms; a traced forward runs 40 operators with pauses of 10 us.

    ``pauses``: ns before operators, by place; ``long``: ns of operators, by name; ``hit``: ns by which the pause before
    operator 20 of a traced step is longer.
    """
    steps: list[Row] = []
    host: list[Row] = []
    extra = sum((pauses or {}).values()) + 10 * sum(ns - TAKES[name] for name, ns in (long or {}).items())
    moment = (first + 1) * 10_000 * MS
    for number in range(48):
        traced = number >= 40
        start = at = moment
        if traced:
            for place in range(40):
                at += 10_000 + (pauses or {}).get(place, 0) + (hit(number - 40) if place == 20 else 0)
                name = NAMES[place % 4]
                for _ in range(2 if name == twice else 1):
                    ns = (long or {}).get(name, TAKES[name])
                    host.append({"variant": variant, "name": name, "category": "op", "start_ns": at, "end_ns": at + ns})
                    at += ns
            end = at + 10_000
        else:
            end = start + round((3_610_000 + extra + number % 5 * 2_000) * slower)
        marks = {"draft_end_ns": start, "forward_end_ns": end, "end_ns": end}
        if phase == "draft":
            marks = {"draft_end_ns": end, "forward_end_ns": end, "end_ns": end}
        elif phase == "verify":
            marks = {"draft_end_ns": start, "forward_end_ns": start, "end_ns": end}
        steps.append(
            marks
            | {"variant": variant, "run_pass": "traced" if traced else "clean", "step_id": first + number}
            | {"index": number % 40, "sequence_id": first + traced, "start_ns": start}
        )
        moment = end + between
    sequences = [
        {"variant": variant, "run_pass": kind, "sequence_id": first + number, "prompt_id": "p"}
        for number, kind in enumerate(("clean", "traced"))
    ]
    return {"steps": steps, "host": [row | {"host_id": first * 1000 + at} for at, row in enumerate(host)]} | {
        "sequences": sequences
    }


def found(make: Make, *parts: dict[str, list[Row]], of: str = "v") -> dict[str, Finding]:
    tables: dict[str, list[Row]] = {}
    for part in parts:
        for name, rows in part.items():
            tables.setdefault(name, []).extend(rows)
    variants = {row["variant"]: CPU for row in tables["steps"]}
    return {one.id: one for one in find_in(Facts(make(tables, variants, device={"name": "cpu"}), of))}


def test_even_steps_have_no_finding(make_bundle: Make) -> None:
    assert found(make_bundle, run()) == {}


def test_a_place_without_an_operator_in_each_phase(make_bundle: Make) -> None:
    for phase, name in (("draft", "draft"), ("forward", "verify forward"), ("verify", "acceptance")):
        one = found(make_bundle, run(pauses={10: 2 * MS}, phase=phase))["host-bound"]
        assert one.location == f"between aten::add and aten::mul of the {name}"
        assert one.recoverable is not None
        assert 0.4 < one.recoverable.value / (1e9 / (5.6 * MS)) < 0.7


def test_a_wait_in_every_layer_is_one_place(make_bundle: Make) -> None:
    one = found(make_bundle, run(pauses=dict.fromkeys(range(2, 40, 4), 400_000)))["host-bound"]
    assert "10 times a step" in one.sentence
    assert "4.10 ms a step" in one.sentence


def test_a_pause_that_hits_half_of_the_traced_steps_is_no_place(make_bundle: Make) -> None:
    assert "host-bound" not in found(make_bundle, run(hit=lambda step: 3 * MS * (step % 2)))


def test_sleep_is_told_from_computing(make_bundle: Make) -> None:
    def with_use(slept: int, sleeps: int) -> str:
        tables = run(pauses={10: 2 * MS})
        for row in tables["steps"]:
            cpu = row["end_ns"] - row["start_ns"] - slept
            row |= {"cpu_ns": cpu, "process_cpu_ns": cpu, "ready_ns": 0, "sleeps": sleeps}
        return found(make_bundle, tables)["host-bound"].sentence

    assert "gives up the CPU" in with_use(2 * MS, 1)
    assert "computes there" in with_use(0, 0)


def test_copies(make_bundle: Make) -> None:
    one = found(make_bundle, run(long={"aten::copy_": 500_000}))["data-movement"]
    assert one.location == "aten::copy_"
    assert one.evidence[0].table == "host"
    assert one.evidence[0].ids
    # Products may take what they take.
    assert found(make_bundle, run(long={"aten::mm": 500_000})) == {}


def test_between_steps(make_bundle: Make) -> None:
    one = found(make_bundle, run(between=4 * MS))["between-steps"]
    assert one.confidence == "high"
    assert "4.00 ms pass" in one.sentence
    assert found(make_bundle, run(between=400_000)) == {}


def test_a_slower_twin_and_what_runs_beside(make_bundle: Make) -> None:
    clean, faulty = run("clean", first=100), run(slower=1.2, twice="aten::mm")
    one = found(make_bundle, clean, faulty)["slower-than-twin"]
    assert "1.20 times as long as in clean" in one.sentence
    assert "aten::mm runs 20.0 times a step instead of 10.0" in one.sentence
    assert "the verify forward" in one.sentence
    assert found(make_bundle, clean, faulty, of="clean") == {}


def test_a_slower_twin_on_a_busy_machine_is_no_finding(make_bundle: Make) -> None:
    clean, slow = run("clean", first=100), run(slower=1.3)
    assert "slower-than-twin" in found(make_bundle, clean, slow)
    for row in slow["steps"]:
        wall = row["end_ns"] - row["start_ns"]
        row |= {"cpu_ns": wall * 9 // 10, "process_cpu_ns": wall, "ready_ns": wall // 10, "sleeps": 0}
    assert "slower-than-twin" not in found(make_bundle, clean, slow)


def test_a_twin_that_runs_more_is_found_without_the_clock(make_bundle: Make) -> None:
    one = found(make_bundle, run("clean", first=100), run(twice="aten::mm"))["slower-than-twin"]
    assert one.seen
    assert one.recoverable is not None
    assert one.recoverable.low == 0
    assert "24 % of what runs" in one.sentence


def test_a_slower_twin_that_another_finding_explains_is_not_told_twice(make_bundle: Make) -> None:
    ids = set(found(make_bundle, run("clean", first=100), run(pauses={10: 2 * MS})))
    assert ids == {"host-bound"}


def test_growth_is_looked_for_within_sequences() -> None:
    context = np.arange(60.0)
    rising = [(context + 10 * n, 1e6 + 2e4 * context + (context % 3) * 1e4) for n in range(4)]
    seen = growth(rising)
    assert seen is not None
    assert abs(seen.slope - 2e4) < 2e3
    assert 0 < seen.low <= seen.slope * 1.1
    # Longer prompts that ran while the machine was slow are no growth.
    apart = [(context + 50 * n, 1e6 * (1 + n) + (context % 3) * 1e4) for n in range(4)]
    assert growth(apart) is None
    assert growth(rising[:1]) is not None
    assert growth([(context, np.where((context > 20) & (context < 40), 2e6, 1e6))]) is None


def test_a_variant_that_reads_more_experts_is_no_twin(make_bundle: Make) -> None:
    clean, slow = run("clean", first=100), run(slower=1.3)
    for tables, experts in ((clean, [4, 4]), (slow, [6, 6])):
        for row in tables["steps"]:
            row["experts"] = experts
    assert "slower-than-twin" not in found(make_bundle, clean, slow)
    for row in clean["steps"]:
        row["experts"] = [6, 6]
    assert "slower-than-twin" in found(make_bundle, clean, slow)

from collections.abc import Callable
from typing import Any

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding
from workbench.diagnose.findings import find_in
from workbench.trace.bundle import Bundle

Make = Callable[..., Bundle]
MS = 1_000_000


def steps(walls: list[int], *, context: int = 64, grows: bool = False) -> list[dict[str, Any]]:
    rows, moment = [], 0
    for number, wall in enumerate(walls):
        end = moment + wall
        rows.append(
            {
                "start_ns": moment,
                "draft_end_ns": moment,
                "forward_end_ns": end,
                "end_ns": end,
                "index": number,
                "context": context + number if grows else None,
            }
        )
        moment = end + 1000
    return rows


def found(bundle: Bundle) -> dict[str, Finding]:
    return {one.id: one for one in find_in(Facts(bundle, "v"))}


def even(count: int = 60) -> list[int]:
    return [10 * MS + (number % 7 - 3) * 50_000 for number in range(count)]


def test_even_steps_have_no_finding(make_bundle: Make) -> None:
    assert found(make_bundle({"steps": steps(even())})) == {}


def test_step_outliers_with_their_period(make_bundle: Make) -> None:
    walls = even(100)
    for at in range(9, 100, 20):
        walls[at] = 40 * MS
    one = found(make_bundle({"steps": steps(walls)}))["step-outliers"]
    assert "every 20 steps" in one.sentence
    assert one.evidence[0].ids == (9, 29, 49, 69, 89)
    # Wide spread without a tail is noise, not outliers.
    wild = [(5 + number * 37 % 20) * MS for number in range(100)]
    assert "step-outliers" not in found(make_bundle({"steps": steps(wild)}))


def test_noisy_run(make_bundle: Make) -> None:
    wild = [(2 if number % 30 < 25 else 30) * MS for number in range(100)]
    assert "noisy-run" in found(make_bundle({"steps": steps(wild)}))


def test_clock_throttled(make_bundle: Make) -> None:
    def run(flag: float, clock: float) -> dict[str, Finding]:
        rows = [
            {"source": "nvml", "name": name, "unit": "", "start_ns": at * MS, "end_ns": at * MS, "value": value}
            for at in range(0, 500, 50)
            for name, value in (("throttle_power_cap", flag), ("sm_clock", clock))
        ]
        env = [{"key": "gpu0.sm_clock_max_mhz", "value": "1980"}]
        return found(make_bundle({"steps": steps(even()), "counters": rows, "env": env}))

    held = run(1.0, 1.4e9)["clock-throttled"]
    assert "1400 of 1980 MHz" in held.sentence
    assert held.recoverable is not None
    assert "clock-throttled" not in run(0.0, 1.98e9)
    assert "clock-throttled" not in run(1.0, 1.97e9)


def test_foreign_process(make_bundle: Make) -> None:
    def run(value: str) -> dict[str, Finding]:
        env = [{"key": "gpu0.other_processes", "value": value}]
        return found(make_bundle({"steps": steps(even()), "env": env}))

    assert "gpu_burn" in run("4711 gpu_burn (30000 MiB)")["foreign-process"].sentence
    assert run("none") == {}
    assert run("12 /usr/bin/python3 (500 MiB)") == {}


def test_data_quality(make_bundle: Make) -> None:
    kernels = [{"start_ns": 0, "end_ns": 20 * 10**9}]
    one = found(make_bundle({"steps": steps(even()), "kernels": kernels}))["data-quality"]
    assert one.severity == "critical"
    assert one.location == "impossible-duration"


def cpu(make_bundle: Make, stall_ns: int) -> dict[str, Finding]:
    """CPU steps of 10 ms: 50 operators; before the first one, the host takes ``stall_ns``."""
    rows = steps([10 * MS] * 40)
    host = []
    for number in range(8):
        start = 10**9 + number * 20 * MS
        traced = {"run_pass": "traced", "start_ns": start, "draft_end_ns": start}
        rows.append(traced | {"forward_end_ns": start + 10 * MS, "end_ns": start + 10 * MS})
        each = (10 * MS - stall_ns) // 50
        for op in range(50):
            begin = start + stall_ns + op * each
            host.append({"name": "aten::mm", "start_ns": begin, "end_ns": begin + each - 10_000})
    return found(make_bundle({"steps": rows, "host": host}))


def test_host_stall_on_a_cpu(make_bundle: Make) -> None:
    one = cpu(make_bundle, 3 * MS)["host-bound"]
    assert "the start and aten::mm" in one.location
    assert cpu(make_bundle, 20_000) == {}


def test_context_cost(make_bundle: Make) -> None:
    model = {
        "tensors": [{"read_bytes": 10**6}, {"role": "kv", "tensor_class": "kv_cache", "read_bytes": 10**4}],
        "roofs": [{"bytes_per_s": 10**10}],
    }
    growing = [2 * MS + number * 50_000 for number in range(200)]
    one = found(make_bundle(model | {"steps": steps(growing, grows=True)}))["context-cost"]
    assert "50 us longer" in one.sentence
    flat = found(make_bundle(model | {"steps": steps(even(200), grows=True)}))
    assert "context-cost" not in flat


def test_steps_faster_than_memory(make_bundle: Make) -> None:
    """Times in microseconds that were taken for nanoseconds."""
    tables = {"tensors": [{"read_bytes": 2 * 10**9}], "roofs": [{"device": "cpu", "bytes_per_s": 400 * 10**9}]}
    one = found(make_bundle(tables | {"steps": steps([wall // 1000 for wall in even()])}))["byte-model-mismatch"]
    assert one.severity == "critical"
    assert "500 times as fast as memory" in one.sentence
    assert "byte-model-mismatch" not in found(make_bundle(tables | {"steps": steps(even())}))

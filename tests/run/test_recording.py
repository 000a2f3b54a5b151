import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from workbench.decode.engine import StepRecord
from workbench.errors import ExitCode, UnfitError
from workbench.probes.protocol import Capture
from workbench.run import recording as module
from workbench.run.guard import ProbeError, guarded
from workbench.run.recording import Recording
from workbench.run.state import Run

Fake = Callable[..., Any]


def limits(run: Run, variant: str = "a") -> list[tuple[str, str]]:
    return [(missing.instrument, missing.why) for missing in run.missing.get(variant, [])]


def test_probes_stop_in_the_reverse_order_and_all_is_written(
    run: Run, fake_probe: Fake, make_step: Callable[..., StepRecord], counter: Callable[..., Any]
) -> None:
    log: list[str] = []
    seen = Capture({"counters": [counter("sm_active", 5, 6, 0.5)]})
    recording = Recording(run, "a", [fake_probe("outer", log, seen), fake_probe("inner", log)])
    assert recording.start()
    with recording.annotate("forward"):
        pass
    finished = recording.stop()
    assert log == ["outer available", "outer start", "inner available", "inner start", "inner stop", "outer stop"]
    assert [probe.name for probe, _ in recording.write(finished, [(0, make_step(0))])] == ["outer", "inner"]
    assert run.writer.manifest.variants
    assert run.missing.get("a", []) == []


@pytest.mark.parametrize("fail", ["available", "start", "stop"])
def test_a_probe_that_fails_is_a_row_of_limits_and_the_others_go_on(run: Run, fake_probe: Fake, fail: str) -> None:
    log: list[str] = []
    recording = Recording(run, "a", [fake_probe("pm_sampler", log, fail=fail), fake_probe("nvml", log)])
    assert recording.start()
    finished = recording.stop()
    assert [probe.name for probe, _ in finished] == ["nvml"]
    assert limits(run) == [("pm_sampler", f"pm_sampler: {fail}: RuntimeError: {fail} went wrong")]
    assert run.missing["a"][0].fallback.startswith("NVML")


def test_what_is_not_available_is_not_started(run: Run, fake_probe: Fake) -> None:
    log: list[str] = []
    recording = Recording(run, "a", [fake_probe("pm_sampler", log, lacking=True)])
    assert not recording.start()
    assert recording.stop() == []
    assert log == ["pm_sampler available"]
    assert limits(run) == [("pm_sampler", "not on this machine")]


def test_rows_that_do_not_fit_the_schema_are_that_instrument_s_failure(run: Run, fake_probe: Fake) -> None:
    log: list[str] = []
    wrong = Capture({"counters": [{"name": "x", "start_ns": 5}]})
    recording = Recording(run, "a", [fake_probe("pm_sampler", log, wrong), fake_probe("nvml", log)])
    recording.start()
    assert [probe.name for probe, _ in recording.write(recording.stop(), [])] == ["nvml"]
    assert "counters" in limits(run)[0][1]


def test_probes_that_show_no_spans_take_no_time_of_a_step(run: Run, fake_probe: Fake) -> None:
    recording = Recording(run, "a", [fake_probe("pm_sampler", []), fake_probe("nvml", [])])
    recording.start()
    assert type(recording.annotate("forward")) is nullcontext
    shown: list[str] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        shown.append(name)
        yield

    tracer = fake_probe("kernels", [])
    tracer.annotate = span
    recording = Recording(run, "a", [fake_probe("nvml", []), tracer])
    recording.start()
    with recording.annotate("forward"):
        assert shown == ["forward"]


def test_a_probe_that_hangs_is_given_up(run: Run, fake_probe: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    probe = fake_probe("kernels", log)
    monkeypatch.setattr(probe, "stop", lambda: time.sleep(60))
    monkeypatch.setattr(module, "STOP_SECONDS", 0.2)
    recording = Recording(run, "a", [probe])
    recording.start()
    began = time.monotonic()
    assert recording.stop() == []
    assert time.monotonic() - began < 5
    assert limits(run) == [("kernels", "kernels: stop: took longer than 0.2 s")]


def test_what_a_call_returns_and_says_passes_through() -> None:
    assert guarded("x: stop", lambda: 5, 10.0) == 5

    def unfit() -> None:
        raise UnfitError("no counters", hint="ask root")

    with pytest.raises(ProbeError, match=r"^x: start: no counters; ask root$") as error:
        guarded("x: start", unfit, 10.0)
    assert (error.value.message, error.value.hint) == ("x: start: no counters", "ask root")
    with pytest.raises(KeyboardInterrupt):
        guarded("x: start", lambda: (_ for _ in ()).throw(KeyboardInterrupt()), 10.0)


def test_an_alarm_of_somebody_else_s_goes_on() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert guarded("x", lambda: "done", 10.0) == "done"
        time.sleep(0.5)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_off_the_main_thread_calls_still_pass_through() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(guarded("x", lambda: 3, 10.0)))
    thread.start()
    thread.join()
    assert found == [3]


def test_a_hang_that_no_signal_interrupts_ends_the_process_with_a_word() -> None:
    """As a library's would: the alarm is blocked."""
    code = (
        "import signal, time\n"
        "from workbench.run.guard import guarded\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "guarded('kernels: stop', lambda: time.sleep(60), 0.2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.UNFIT
    assert "kernels: stop: hangs in a library" in done.stderr
    assert "--salvage" in done.stderr

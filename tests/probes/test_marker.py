import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import UnfitError
from workbench.probes import marker
from workbench.probes.marker import PAUSES_NS, EventAnchor, Marker
from workbench.probes.marker_brackets import event_brackets, rate, stamp_brackets
from workbench.trace.clocks import Fit, fit

CPU = torch.device("cpu")


def ptx(name: str) -> str:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from workbench.kernels.contract import INTERPRETED

    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    from workbench.probes import marker_kernels

    types = {"out": "*i64", "request": "*i64", "reply": "*i64", "length_ns": "i64", "count": "i32", "limit_ns": "i64"}
    kernel = getattr(marker_kernels, name)
    source = ASTSource(kernel, {argument: types[argument] for argument in kernel.arg_names}, {})
    options = {"num_warps": 1}
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return text


def test_a_stamp_reads_the_clock_before_each_store() -> None:
    text = ptx("clock_stamp")
    order = [line.split()[0] for line in text.splitlines() if "%globaltimer" in line or "st.global" in line]
    assert order == ["mov.u64", "@%p1", "mov.u64", "@%p1"]


def test_the_echo_reads_the_clock_only_once_it_knows_that_it_was_asked() -> None:
    """A load from host memory takes a microsecond, and reading the clock does not wait for it: a branch does."""
    text = ptx("clock_echo")
    answer = text.index("st.global.wt")
    read = text.rindex("%globaltimer", 0, answer)
    label = text.rindex("$L__BB", 0, read)
    assert "ld.volatile.global" not in text[label:answer]
    assert text.count("%globaltimer") == 3


def test_a_pulse_waits_for_memory_before_it_looks_at_the_clock_again() -> None:
    """So that counters of warps that wait for memory see it, not only those of busy SMs."""
    text = ptx("clock_pulse")
    loop = text[text.index("%globaltimer", text.index("%globaltimer") + 1) :]
    assert loop.index("ld.volatile.global") < loop.index("max.s64") < loop.index("bra") < loop.rindex("%globaltimer")
    assert text.count("%globaltimer") == 3


def test_the_marker_needs_a_gpu_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Marker(CPU).available()
    assert missing is not None
    assert missing.why == "the run is on the CPU"
    monkeypatch.setattr(marker, "find_spec", lambda name: None)
    missing = Marker(torch.device("cuda")).available()
    assert missing is not None
    assert (missing.why, missing.fix) == ("Triton is not installed", "pip install triton")


def test_kernels_that_do_not_run_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Marker(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 4}))

    def broken(self: Marker) -> None:
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(Marker, "stamp", broken)
    with pytest.raises(UnfitError, match=r"^marker kernels do not run: no kernel image is available$"):
        one.prepare()


def capture(rng: random.Random, offset: int, pauses: tuple[int, ...], start: int) -> tuple[list[Any], list[Any]]:
    """Rows of an instrument and stamps by %globaltimer of some kernels, the true offset between the two."""
    rows, stamps, moment = [], [], start
    for pause in pauses:
        before, inside, after = rng.randrange(600), rng.randrange(32, 100), rng.randrange(900)
        rows.append((moment, moment + before + inside + after))
        stamps.append((moment + before + offset, moment + before + inside + offset))
        moment += pause + rng.randrange(20_000, 40_000)
    return rows, stamps


@given(st.integers(0, 2**32), st.integers(-(10**18), 10**18), st.integers(0, 2), st.booleans())
def test_stamps_place_an_instrument_s_clock_even_where_kernels_were_lost(
    seed: int, offset: int, lost: int, last: bool
) -> None:
    rng = random.Random(seed)  # noqa: S311
    begin = capture(rng, offset, PAUSES_NS[0], 10**9)
    end = capture(rng, offset, PAUSES_NS[1], 10**9 + 50_000_000)
    rows = [*begin[0][lost:], *end[0]]
    brackets = stamp_brackets(rows, (end if last else begin)[1], Fit())
    assert len(brackets) >= (5 if last else 5 - lost)
    placed = fit(brackets)
    assert abs(placed.offset_ns - offset) <= placed.residual_ns
    assert placed.residual_ns <= 900


def test_stamps_that_fit_no_kernel_place_nothing() -> None:
    rng = random.Random(3)  # noqa: S311
    rows, _ = capture(rng, 0, PAUSES_NS[0], 10**9)
    _, stamps = capture(rng, 0, PAUSES_NS[1], 10**9)
    assert stamp_brackets(rows, stamps, Fit()) == []
    assert stamp_brackets([], stamps, Fit()) == []
    assert stamp_brackets(rows, [], Fit()) == []


TICK = 32


def queued_events(rng: random.Random, offset: int, count: int = 16) -> tuple[list[int], list[Any], list[int], int]:
    """Return what ``event_brackets`` takes, of events whose clock is ``%globaltimer`` less ``offset``, and the first
    event's true time by ``%globaltimer``. Latencies are those of kernels one behind another on a GPU."""

    def read(moment: int) -> int:
        return moment // TICK * TICK

    moment = 10**18 + rng.randrange(10**6)
    edges, events, seen = [(read(moment), read(moment + 40))], [], []
    for _ in range(count):
        moment += rng.randrange(900, 1_800)  # the kernel drains
        events.append(moment)
        seen.append(read(moment + rng.randrange(500, 1_100)))
        moment += rng.randrange(1_000, 2_500)  # the next is launched
        edges.append((read(moment), read(moment + 40)))
    first = read(events[0] - offset)
    return [read(event - offset) - first for event in events], edges, seen, events[0]


@given(st.integers(0, 2**32), st.integers(0, 10**15))
def test_events_are_placed_by_all_that_bounds_any_of_them(seed: int, offset: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    passed, edges, seen, true = queued_events(rng, offset)
    by_kernels = fit(event_brackets(passed, edges, [0] * len(seen)))
    by_words = fit(event_brackets(passed, edges, seen))
    for placed in (by_kernels, by_words):
        assert abs(placed.place(0) - true) <= placed.residual_ns + TICK
    assert by_words.residual_ns < by_kernels.residual_ns <= 1_500
    assert by_words.residual_ns <= 1_150
    alone = fit(event_brackets(passed[:1], edges[:2], seen[:1]))
    assert by_words.residual_ns <= alone.residual_ns


def test_the_rate_of_two_clocks_is_told_only_after_a_while() -> None:
    first, later = Fit(origin_ns=10**18, offset_ns=7), Fit(origin_ns=10**18 + 4 * 10**9, offset_ns=7 - 16_000)
    assert rate(first, later) == -4_000
    assert rate(first, Fit(origin_ns=10**18 + 10**9, offset_ns=7)) is None


def test_an_anchor_wider_than_those_before_is_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one, slept = Marker(CPU), []
    left = iter([2_000, 1_700, 1_600, 9_000, 1_800])
    monkeypatch.setattr(Marker, "_anchored", lambda self: EventAnchor(None, 0, next(left), None))
    monkeypatch.setattr(marker.time, "sleep", slept.append)
    monkeypatch.setattr(marker.time, "perf_counter_ns", lambda: 500_000_000)
    assert one.anchor().residual_ns == 1_600  # the first has nothing to be compared to: the best of three
    assert one.anchor().residual_ns == 1_800
    assert slept == [1.5, 1.5]
    assert next(left, None) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_s_clock_and_events_are_known_to_two_microseconds() -> None:
    """An H200 gave 0.8 to 0.9 us for the echo, and 1.5 for an event from the stamp before to the word seen behind."""
    one = Marker(torch.device("cuda", 0))
    assert one.available() is None
    one.prepare()
    first, event = one.clock(), one.anchor()
    again = one.clock()
    assert one.comparisons.host_residual_ns <= 2_000
    assert again.residual_ns == one.comparisons.wander_ns <= 1_000
    assert abs(again.place(again.origin_ns) - first.place(again.origin_ns)) <= 50_000  # the clocks' rate, carried
    assert event.residual_ns <= 2_000
    assert event.host_residual_ns <= 2_000
    assert event.drift_ppb is not None
    assert abs(event.drift_ppb) < 50_000
    start, end = one.pulse(200_000)
    assert end - start == pytest.approx(200_000, abs=5_000)
    one.marks()
    stamps = one.stamps()
    assert len(stamps) == len(PAUSES_NS[0])
    assert all(begin <= stop for begin, stop in stamps)

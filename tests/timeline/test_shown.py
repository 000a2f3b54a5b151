"""Which tracks of a window have a row, and how the others are named."""

from collections.abc import Callable
from typing import Any

from workbench.timeline.shown import choose
from workbench.timeline.tracks import load_timeline
from workbench.trace.bundle import Bundle

US = 1_000
Rows = dict[str, list[dict[str, Any]]]


def _reading(name: str, unit: str, value: float, at: int) -> dict[str, Any]:
    common = {"variant": "v", "source": "nvml", "device": 0}
    return common | {"name": name, "unit": unit, "value": value, "start_ns": at, "end_ns": at}


def _tables() -> Rows:
    steps = [
        {"variant": "v", "run_pass": "clean", "step_id": 0, "index": 0, "warmup": False, "start_ns": 0}
        | {"draft_end_ns": 0, "forward_end_ns": 90 * US, "end_ns": 100 * US}
    ]
    counters = []
    for at in (10 * US, 60 * US):
        counters += [
            _reading("throttle_sw_power_cap", "flag", float(at > 50 * US), at),
            _reading("clocks_gpu_idle", "flag", 0.0, at),
            _reading("ecc_corrected", "errors", 3.0, at),
            _reading("ecc_uncorrected", "errors", float(at), at),
            _reading("temperature", "degC", 40.0, at),
            _reading("power", "W", 300.0, at),
        ]
    counters.append(_reading("sm_clock", "Hz", 1.98e9, 10 * US))
    return {"steps": steps, "counters": counters}


def _drawn(bundle: Bundle, start: int, end: int, *, every: bool = False) -> list[str]:
    shown = choose(load_timeline(bundle, "v"), start, end, 50, every=every)
    return [row.track.label for row in shown.window.rows if row.track.group == "counters"]


def test_what_never_changed_is_named_and_what_did_is_drawn(make_bundle: Callable[..., Bundle]) -> None:
    bundle = make_bundle(_tables())
    shown = choose(load_timeline(bundle, "v"), 0, 100 * US, 50)
    assert shown.never_set == ("clocks gpu idle",)
    assert shown.never_rose == ("corrected ECC errors",)
    assert shown.folded == ("temperature",)
    assert shown.elsewhere == ()
    assert _drawn(bundle, 0, 100 * US) == ["power", "SM clock", "uncorrected ECC errors", "throttle sw power cap"]


def test_a_row_without_a_sample_in_the_window_is_named(make_bundle: Callable[..., Bundle]) -> None:
    bundle = make_bundle(_tables())
    shown = choose(load_timeline(bundle, "v"), 50 * US, 100 * US, 50)
    assert shown.elsewhere == ("SM clock",)
    assert "SM clock" not in _drawn(bundle, 50 * US, 100 * US)


def test_every_counter_is_drawn_on_demand(make_bundle: Callable[..., Bundle]) -> None:
    bundle = make_bundle(_tables())
    assert len(_drawn(bundle, 50 * US, 100 * US, every=True)) == 7


def test_a_run_of_foreign_counters_alone_shows_them(make_bundle: Callable[..., Bundle]) -> None:
    tables = _tables() | {"counters": [_reading("tokens_waiting", "tokens", 3.0, 10 * US)]}
    assert _drawn(make_bundle(tables), 0, 100 * US) == ["tokens waiting"]


def test_rows_of_another_pass_are_named_and_spills_are_always_said(bundle: Bundle) -> None:
    shown = choose(load_timeline(bundle, "v"), 999_500, 1_000_000, 50)  # after the last kernel
    assert {"kernels of stream 7", "kernels of stream 8", "gaps"} <= set(shown.elsewhere)
    assert "spills" in [row.track.key for row in shown.window.rows]

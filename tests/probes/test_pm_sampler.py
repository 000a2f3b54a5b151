import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from workbench.errors import InputError
from workbench.probes.pm_sampler import PmSampler
from workbench.probes.protocol import Capture, Probe
from workbench.probes.sampler_environment import CUPTI_PYTHON, SamplerEnvironment
from workbench.probes.sidecar_link import SidecarError
from workbench.trace.rows import conform, from_rows

FAKE = Path(__file__).parent / "fake_sidecar.py"
READ_BYTES = 44_000_000
LEAST = 350
"""Samples of 10 us in the 4 ms of a capture, less what a late stop hides."""


@pytest.fixture
def installed(tmp_path: Path) -> SamplerEnvironment:
    environment = SamplerEnvironment(tmp_path / "sampler")
    (environment.folder / f"cupti_python-{CUPTI_PYTHON}.dist-info").mkdir(parents=True)
    environment.cupti.parent.mkdir(parents=True)
    environment.cupti.touch()
    (environment.folder / "cupti").mkdir()
    tag = f"{sys.implementation.name}-{sys.version_info.major}{sys.version_info.minor}"
    (environment.folder / "cupti" / f"cupti.{tag}-x86_64-linux-gnu.so").touch()
    return environment


@pytest.fixture
def sampler(installed: SamplerEnvironment) -> Iterator[Any]:
    made: list[PmSampler] = []

    def make(mode: str, **options: Any) -> PmSampler:
        command = (sys.executable, "-S", str(FAKE), mode)
        limits = {"ready_seconds": 20.0, "stop_seconds": 20.0} | options
        made.append(PmSampler(3, uuid="GPU-fake", environment=installed, command=command, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _capture(sampler: PmSampler, seconds: float = 0.004) -> Capture:
    sampler.start()
    time.sleep(seconds)
    return sampler.stop()


def _values(capture: Capture, name: str) -> list[float]:
    table = capture.columns["counters"]
    values: list[float] = table.filter(pc.equal(table.column("name"), name)).column("value").to_pylist()
    return values


def _kinds(capture: Capture) -> list[str]:
    return [row["kind"] for row in capture.losses]


def test_samples_become_rows_of_the_counters_table_on_the_runs_clock(sampler: Any) -> None:
    probe: Probe = sampler("good")
    assert probe.available() is None
    before = time.perf_counter_ns()
    probe.start()
    time.sleep(0.004)
    capture = probe.stop()
    after = time.perf_counter_ns()
    table = capture.columns["counters"]
    kept = len(_values(capture, "dram_read_bytes"))
    assert kept > LEAST
    assert conform("counters", table).num_rows == kept * 7
    assert set(table.column("source").to_pylist()) == {"pm_sampler"}
    assert set(table.column("device").to_pylist()) == {3}
    assert before < pc.min(table.column("start_ns")).as_py()
    assert pc.max(table.column("end_ns")).as_py() < after
    assert _values(capture, "dram_read_bytes") == [READ_BYTES] * kept  # sectors of 32 bytes
    assert _values(capture, "ctas_per_sm") == [2.0] * kept
    assert _values(capture, "sm_active") == [0.5] * kept
    assert _values(capture, "warps_active") == [0.25] * kept  # 16 warps of 64, over the two SMs of a TPC
    assert not capture.losses
    assert not capture.missing
    assert 0 < capture.residual_ns < 2_000


def test_another_set_is_a_source_of_its_own(sampler: Any) -> None:
    """Its samples begin when those of the first have ended: in one series that would be a gap."""
    table = _capture(sampler("good", set_name="stalls")).columns["counters"]
    assert set(table.column("source").to_pylist()) == {"pm_sampler, stalls"}
    assert "stalled_long_scoreboard" in set(table.column("name").to_pylist())


def test_a_sidecar_serves_one_capture_after_another(sampler: Any) -> None:
    probe = sampler("good")
    first, second = _capture(probe), _capture(probe)
    ends = [capture.columns["counters"].column("start_ns") for capture in (first, second)]
    assert pc.max(ends[0]).as_py() < pc.min(ends[1]).as_py()
    pid = probe.pid
    probe.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("mode", ["unix-only", "cupti-clock"])
def test_the_clock_is_the_one_by_which_samples_fall_inside_the_capture(sampler: Any, mode: str) -> None:
    capture = _capture(sampler(mode))
    assert len(_values(capture, "dram_read_bytes")) > LEAST


@pytest.mark.parametrize(
    ("mode", "words", "fix"),
    [
        ("no-permission", "ERR_NVGPUCTRPERM", "load the driver"),
        ("crash", "SIGSEGV: Fatal Python error: Segmentation fault", ""),
        ("exits", "status 1: ModuleNotFoundError", ""),
        ("babble", "no JSON object", ""),
        ("empty", "counts nothing", "another set"),
    ],
)
def test_a_sidecar_that_cannot_sample_is_missing_with_its_reason(sampler: Any, mode: str, words: str, fix: str) -> None:
    missing = sampler(mode).available()
    assert words in missing.why
    assert fix in missing.fix
    assert "dram_read_bytes" in missing.what
    assert missing.fallback
    from_rows("limits", [{"variant": None, **{name: getattr(missing, name) for name in missing.__slots__}}])


def test_a_silent_sidecar_is_ended(sampler: Any) -> None:
    probe = sampler("hang", ready_seconds=0.3)
    missing = probe.available()
    assert "did not answer in 0.3 s and was ended" in missing.why
    assert probe.pid is None


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("hang-at-stop", "did not answer"),
        ("crash-at-stop", "SIGABRT"),
        ("zero", "no samples"),
        ("truncated", "fewer than"),
        ("strange-clock", "outside the capture by every clock known (unix, cupti)"),
    ],
)
def test_a_capture_that_fails_is_a_loss_and_not_the_end_of_the_run(sampler: Any, mode: str, words: str) -> None:
    probe = sampler(mode, stop_seconds=0.3 if mode == "hang-at-stop" else 20.0)
    capture = _capture(probe)
    assert "counters" not in capture.columns
    (loss,) = capture.losses
    assert (loss["kind"], loss["severity"]) == ("capture-lost", "error")
    assert words in loss["detail"]
    assert words in capture.missing[0].why
    assert probe.pid is None
    _valid(capture)


def test_readings_that_make_a_set_count_nothing_are_left_out_and_said(sampler: Any) -> None:
    capture = _capture(sampler("empty-with-pcie"))
    assert len(_values(capture, "dram_read_bytes")) > LEAST
    assert [missing.why for missing in capture.missing] == [
        "pcie_read_bytes: the set counts nothing with it",
        "pcie_write_bytes: the set counts nothing with it",
    ]


def test_readings_that_make_a_set_be_refused_are_left_out_with_the_reason(sampler: Any) -> None:
    capture = _capture(sampler("unfit-with-pcie"))
    assert len(_values(capture, "dram_read_bytes")) > LEAST
    assert [missing.why for missing in capture.missing] == [
        "pcie_read_bytes: CUPTI refuses the set: not supported",
        "pcie_write_bytes: CUPTI refuses the set: not supported",
    ]


def test_readings_that_do_not_fit_the_pass_are_said(sampler: Any) -> None:
    capture = _capture(sampler("refuses"))
    assert [missing.why for missing in capture.missing] == [
        "pcie_read_bytes: needs 2 passes beside the others",
        "pcie_write_bytes: needs 2 passes beside the others",
    ]


def test_a_gap_is_a_loss_with_its_time_and_the_samples_it_cost(sampler: Any) -> None:
    capture = _capture(sampler("gap"))
    (loss,) = capture.losses
    assert (loss["kind"], loss["count"], loss["severity"]) == ("counter-gap", 10, "data_loss")
    assert abs(loss["last_ns"] - loss["first_ns"] - 100_000) < 10
    _valid(capture)


@pytest.mark.parametrize(("mode", "kind"), [("late", "late-start"), ("early", "early-end")])
def test_a_capture_that_samples_do_not_cover_is_a_loss(sampler: Any, mode: str, kind: str) -> None:
    (loss,) = _capture(sampler(mode), 0.03).losses  # 20 ms are missing: more than a busy machine delays an answer
    assert (loss["kind"], loss["severity"]) == (kind, "data_loss")
    assert loss["last_ns"] - loss["first_ns"] > 200_000


def test_samples_left_over_from_before_are_dropped_and_do_no_harm(sampler: Any) -> None:
    capture = _capture(sampler("stale"))
    (loss,) = capture.losses
    assert (loss["kind"], loss["count"], loss["severity"]) == ("stale-samples", 5, "info")


def test_a_sample_that_stands_for_several_is_said(sampler: Any) -> None:
    (loss,) = _capture(sampler("long")).losses
    assert (loss["kind"], loss["count"], loss["severity"]) == ("long-samples", 1, "info")


def test_a_full_buffer_is_a_loss(sampler: Any) -> None:
    capture = _capture(sampler("overflow"))
    assert _kinds(capture) == ["overflow", "ended-early"]
    assert capture.losses[1]["detail"] == "the hardware buffer stayed full"
    assert len(_values(capture, "dram_read_bytes")) > LEAST  # what was decoded before is kept
    _valid(capture)


def test_damaged_samples_are_dropped_and_counted(sampler: Any) -> None:
    capture = _capture(sampler("damaged"))
    assert capture.losses[0]["kind"] == "damaged-samples"
    assert capture.losses[0]["count"] == 3
    assert _kinds(capture)[1:] == ["counter-gap"] * 3
    read, written = (len(_values(capture, name)) for name in ("dram_read_bytes", "dram_write_bytes"))
    assert LEAST < read == written + 1  # one is not a number
    assert np.isfinite(capture.columns["counters"].column("value").to_numpy()).all()
    _valid(capture)


def test_bins_add_bytes_and_average_shares(sampler: Any) -> None:
    capture = _capture(sampler("good", bin_ns=100_000))
    read = _values(capture, "dram_read_bytes")
    assert sum(read) % READ_BYTES == 0
    assert sum(read) > LEAST * READ_BYTES
    assert len(read) == -(-sum(read) // READ_BYTES // 10)
    assert _values(capture, "sm_active") == [0.5] * len(read)


def test_nothing_is_started_where_it_is_not_installed(tmp_path: Path) -> None:
    probe = PmSampler(uuid="GPU-fake", environment=SamplerEnvironment(tmp_path / "none"), command=("/nonexistent",))
    missing = probe.available()
    assert missing is not None
    assert "not installed" in missing.why
    assert missing.fix == "workbench doctor --install-sampler"


def test_a_program_that_cannot_be_started_is_said(installed: SamplerEnvironment) -> None:
    probe = PmSampler(uuid="GPU-fake", environment=installed, command=("/nonexistent/python",))
    missing = probe.available()
    assert missing is not None
    assert "cannot be started" in missing.why


def test_misuse_is_refused(sampler: Any) -> None:
    with pytest.raises(InputError, match="counter set 'trafic' is not known"):
        PmSampler(set_name="trafic")
    with pytest.raises(InputError, match="interval_ns"):
        PmSampler(interval_ns=10)
    with pytest.raises(SidecarError, match="not running"):
        sampler("good").stop()


def _valid(capture: Capture) -> None:
    from_rows("losses", [{"variant": None, "probe": "pm_sampler", **row} for row in capture.losses])
    for name, table in capture.columns.items():
        assert isinstance(conform(name, table), pa.Table)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_bytes_of_a_read_loop_are_seen() -> None:
    from workbench.probes.pm_check import check

    result = check(seconds=0.5)
    assert abs(result.measured_bytes / result.known_bytes - 1) < 0.03
    assert result.samples > 1000

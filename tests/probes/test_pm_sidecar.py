"""The sidecar's own logic, on a CUPTI and a CUDA driver made of Python."""

import ctypes
import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.probes import pm_sidecar
from workbench.probes.counter_sets import SETS, counter_set, plan
from workbench.probes.pm_samples import read_spool

UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
DECODE_FULL, DECODE_ALL = 1, 2


class CuptiError(Exception):
    pass


class Chip:
    """A GPU with one pass of ``slots`` counters, which yields samples in chunks."""

    def __init__(self) -> None:
        self.slots = 20
        self.unknown: set[str] = set()
        self.refused: set[str] = set()
        self.waiting = 0
        self.per_start = 30
        self.chunk: list[tuple[int, int]] = []
        self.taken = 0
        self.overflows = 0
        self.decode_status = 0
        self.timed: int | None = None
        self.told = 0
        self.enable_error: Exception | None = None
        self.running = False
        self.configured: dict[str, Any] = {}
        self.log: list[str] = []

    # The library, as ctypes would call it: the argument is a pointer to a parameter block.
    def cuptiPmSamplingGetCounterDataSize(self, pointer: Any) -> int:  # noqa: N802
        pointer._obj.data_size = 64
        return 0

    def cuptiPmSamplingCounterDataImageInitialize(self, pointer: Any) -> int:  # noqa: N802
        self.chunk = []
        return 0

    def cuptiPmSamplingDecodeData(self, pointer: Any) -> int:  # noqa: N802
        if self.decode_status:
            return self.decode_status
        taken = min(self.waiting, 20)
        self.waiting -= taken
        self.chunk = [(1000 + 10 * (self.taken + index), 1010 + 10 * (self.taken + index)) for index in range(taken)]
        self.taken += taken
        pointer._obj.stop_reason = DECODE_FULL if self.waiting else DECODE_ALL
        if self.overflows:
            self.overflows -= 1
            return pm_sidecar.OUT_OF_MEMORY
        return 0

    def cuptiPmSamplingGetCounterDataInfo(self, pointer: Any) -> int:  # noqa: N802
        pointer._obj.completed = len(self.chunk)
        return 0

    def cuptiPmSamplingCounterDataGetSampleInfo(self, pointer: Any) -> int:  # noqa: N802
        self.told += 1
        bare = self.timed is not None and self.told > self.timed
        pointer._obj.start, pointer._obj.end = (0, 0) if bare else self.chunk[pointer._obj.index]
        return 0

    def cuptiProfilerHostEvaluateToGpuValues(self, pointer: Any) -> int:  # noqa: N802
        block = pointer._obj
        values = (ctypes.c_double * block.count).from_address(block.values)
        for index in range(block.count):
            values[index] = self.chunk[block.index][0] + index / 10
        return 0


class Cuda:
    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = self.count
            elif name == "cuDeviceGet":
                arguments[0]._obj.value = arguments[1]
            elif name == "cuDeviceGetUuid_v2":
                raw = bytes(range(16)) if arguments[1].value == 1 else bytes(16)
                ctypes.memmove(arguments[0]._obj, raw, 16)
            elif name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {16: 132, 39: 2048}[arguments[1]]
            elif name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA Abacus"
            return 0

        return call


class ProfilerType(enum.IntEnum):
    PM_SAMPLING = 1


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Chip:
    chip = Chip()

    class Host:
        def __init__(self, name: str, kind: int, single_pass_metric_set_name: str | None = None) -> None:
            self._p_host_object = 7

        def initialize(self) -> None: ...

        def deinitialize(self) -> None: ...

        def create_config_image(self, metrics: list[str]) -> list[str]:
            if unknown := set(metrics) & chip.unknown:
                raise ValueError(f"Metric {unknown} is invalid")
            return metrics

    class Collector:
        def __init__(self, index: int) -> None:
            chip.log.append(f"device {index}")
            self._chip_name, self._pm_sampling_object = "GH100", 5

        def enable(self) -> None:
            if chip.enable_error:
                raise chip.enable_error

        def configure(self, **options: Any) -> None:
            chip.configured = options
            if refused := chip.refused & set(options["metrics"]):
                raise CuptiError(f"not supported: {', '.join(sorted(refused))}")

        def start(self) -> None:
            chip.running = True
            chip.told = 0
            chip.waiting += chip.per_start
            chip.log.append("start")

        def stop(self) -> None:
            if not chip.running:
                raise RuntimeError("PM Sampling collection has already stopped")
            chip.running = False
            chip.log.append("stop")

        def disable(self) -> None:
            chip.log.append("disable")

    cupti = ModuleType("cupti")
    raw = SimpleNamespace(cuptiError=CuptiError, get_timestamp=lambda: 123_456)
    host = SimpleNamespace(
        ProfilerHost=Host,
        ProfilerType=ProfilerType,
        get_num_of_passes=lambda metrics: -(-len(metrics) // chip.slots),
        get_single_pass_sets=lambda _: ["TriageGraphics", "TriageCompute"],
    )
    for name, module in (
        ("cupti", raw),
        ("profiler_host", host),
        ("pm_sampling", SimpleNamespace(Collector=Collector)),
    ):
        setattr(cupti, name, module)
        monkeypatch.setitem(sys.modules, f"cupti.{name}", module)
    monkeypatch.setitem(sys.modules, "cupti", cupti)
    cuda = Cuda()
    libraries = {"libcuda.so.1": cuda, "libcupti.so.13": chip}
    monkeypatch.setattr(pm_sidecar.ctypes, "CDLL", lambda name, mode: libraries[name])
    monkeypatch.setattr(pm_sidecar, "SELF_TEST_SECONDS", 0.0)
    return chip


@pytest.fixture
def talk(
    chip: Chip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., list[dict[str, Any]]]:
    """Run the sidecar on the given lines and return its answers. ``wait``: no line for that many drains."""

    def run(*lines: str, set_name: str = "traffic", left_out: int = 0) -> list[dict[str, Any]]:
        waiting: list[str | None] = [json.dumps(plan(counter_set(set_name), left_out))]
        waiting += [None if line == "wait" else line for line in (*lines, "quit")]
        monkeypatch.setattr(pm_sidecar.Lines, "next", lambda _self, _timeout: waiting.pop(0))
        code = pm_sidecar.main(["--device", UUID, "--spool", str(tmp_path)])
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert code == (3 if answers[-1]["event"] == "failed" else 0)
        return answers

    return run


def test_a_capture_holds_every_sample_decoded_while_it_ran_and_after(talk: Any, chip: Chip, tmp_path: Path) -> None:
    chip.per_start = 50
    ready, started, stopped = talk("start", "wait", "stop")
    assert (ready["event"], started["event"], stopped["event"]) == ("ready", "started", "stopped")
    assert ready["self_test_samples"] == 50
    assert ready["device"] == {
        "uuid": UUID,
        "index": 1,
        "name": "NVIDIA Abacus",
        "chip": "GH100",
        "sms": 132,
        "warps_per_sm": 64,
    }
    assert chip.log == ["device 1", "start", "stop", "start", "stop", "disable"]
    assert stopped["samples"] == 50
    samples = read_spool(tmp_path, 50, len(ready["metrics"]))
    assert samples.times[:, 0].tolist() == [1000 + 10 * index for index in range(50, 100)]
    assert np.allclose(samples.values, samples.times[:, :1] + np.arange(len(ready["metrics"])) / 10)
    for moment in stopped["anchors"]:
        assert all(low <= high for _, low, high in moment["unix"])
        assert moment["cupti"][0][0] == 123_456


def test_samples_without_a_time_are_counted_on_from_those_that_have_one(talk: Any, chip: Chip, tmp_path: Path) -> None:
    chip.per_start, chip.timed = 50, 30  # the second image of 20 is cut within, the third has none
    ready, _, stopped = talk("start", "wait", "stop")
    assert stopped["counted"] == 20
    times = read_spool(tmp_path, 50, len(ready["metrics"])).times
    assert times[:30, 0].tolist() == [1000 + 10 * index for index in range(50, 80)]
    assert (times[1:, 0] == times[:-1, 1]).all()
    assert (np.diff(times[30:, 1]) == 10_000).all()


def test_the_first_metric_of_each_reading_is_taken_where_all_fit(talk: Any, chip: Chip) -> None:
    (ready,) = talk()
    assert ready["metrics"] == {reading.name: reading.metrics[0].name for reading in SETS["traffic"].readings}
    assert ready["refused"] == {}
    assert chip.configured["metrics"] == list(ready["metrics"].values())
    assert chip.configured["single_pass_metric_set_name"] is None


def test_another_metric_is_taken_where_the_chip_lacks_the_first(talk: Any, chip: Chip) -> None:
    chip.unknown = {"dramc__sectors_op_read.sum", "pcie__read_bytes.sum"}
    (ready,) = talk()
    assert ready["metrics"]["dram_read_bytes"] == "dram__bytes_read.sum"
    assert ready["metrics"]["pcie_write_bytes"] == "pcie__write_bytes.sum"
    assert ready["refused"] == {"pcie_read_bytes": "pcie__read_bytes.sum: not a metric of GH100"}


def test_what_does_not_fit_the_pass_is_refused_last_first(talk: Any, chip: Chip) -> None:
    chip.slots = 5
    (ready,) = talk()
    assert list(ready["metrics"]) == [reading.name for reading in SETS["traffic"].readings[:5]]
    assert "needs 2 passes beside the others" in ready["refused"]["pcie_write_bytes"]


def test_the_vendors_single_pass_set_is_found_by_part_of_its_name(talk: Any, chip: Chip) -> None:
    (ready,) = talk(set_name="whole")
    assert ready["vendor_set"] == chip.configured["single_pass_metric_set_name"] == "TriageCompute"


def test_a_set_that_fits_one_pass_and_is_refused_is_empty_with_the_reason(talk: Any, chip: Chip) -> None:
    chip.refused = {"pcie__write_bytes.sum"}
    (answer,) = talk()
    assert answer["event"] == "empty"
    assert answer["why"] == "CUPTI refuses the set: not supported: pcie__write_bytes.sum"


def test_an_accepted_set_that_counts_nothing_is_empty(talk: Any, chip: Chip) -> None:
    chip.per_start = 0
    (answer,) = talk("start")
    assert answer["event"] == "empty"


def test_a_full_buffer_is_told_and_sampling_goes_on(talk: Any, chip: Chip) -> None:
    chip.per_start = 90  # five decodes each
    chip.overflows = 6
    *_, stopped = talk("start", "wait", "stop")
    assert len(stopped["overflows"]) == 1
    assert stopped["samples"] == 90
    assert stopped["failure"] == ""


def test_a_buffer_that_stays_full_ends_the_capture_early(talk: Any, chip: Chip) -> None:
    chip.per_start = 90
    chip.overflows = 100
    *_, stopped = talk("start", "stop")
    assert stopped["failure"] == "the hardware buffer stayed full"
    assert stopped["samples"] == 60


def test_samples_outlive_a_decode_that_fails(talk: Any, chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = pm_sidecar.Capture.stop

    def stop(capture: pm_sidecar.Capture) -> dict[str, Any]:
        chip.decode_status = 999
        return kept(capture)

    monkeypatch.setattr(pm_sidecar.Capture, "stop", stop)
    *_, stopped = talk("start", "wait", "stop")
    assert "CUPTI error 999" in stopped["failure"]
    assert stopped["samples"] == 20


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError("see the web"), "ERR_NVGPUCTRPERM"),
        (RuntimeError("PM sampling is already enabled on this device."), "already enabled"),
        (CuptiError("MIG_DEVICE_NOT_SUPPORTED"), "MIG_DEVICE_NOT_SUPPORTED"),
        (ZeroDivisionError("boom"), "ZeroDivisionError: boom"),
    ],
)
def test_every_failure_is_one_line_with_a_reason(talk: Any, chip: Chip, error: Exception, words: str) -> None:
    chip.enable_error = error
    (answer,) = talk()
    assert answer["event"] == "failed"
    assert words in answer["why"]


def test_a_gpu_is_found_by_uuid_or_refused_with_those_there_are(
    talk: Any, chip: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_one = {"libcuda.so.1": Cuda(count=1), "libcupti.so.13": chip}
    monkeypatch.setattr(pm_sidecar.ctypes, "CDLL", lambda name, mode: only_one[name])
    (answer,) = talk()
    assert f"no GPU {UUID} here: CUDA lists GPU-00000000-0000" in answer["why"]


def test_a_missing_library_is_named(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pm_sidecar.ctypes, "CDLL", missing)
    (answer,) = talk()
    assert "no NVIDIA driver here" in answer["why"]


def test_commands_out_of_order_are_refused(talk: Any) -> None:
    assert "'stop' makes no sense here" in talk("stop")[-1]["why"]


def test_parameter_blocks_have_the_sizes_of_cuptis_headers() -> None:
    # offsetof(last member) + sizeof(last member), CUDA 13.4: not rounded up to the alignment.
    sizes = {"_DataSize": 56, "_Initialize": 40, "_Decode": 45, "_Info": 56, "_SampleInfo": 64, "_Evaluate": 72}
    assert {name: getattr(pm_sidecar, name)().struct_size for name in sizes} == sizes

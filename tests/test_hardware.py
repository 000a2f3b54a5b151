"""Device descriptions hold together, and a roof is a real read of real memory."""

from typing import Any

import pytest

import workbench.hardware as hardware
from workbench.errors import InputError, UnfitError
from workbench.hardware import Hardware, hardware_names, load_hardware, match_hardware, measure_read_roof


@pytest.mark.parametrize("name", hardware_names())
def test_every_device_states_its_sources(name: str) -> None:
    device = load_hardware(name)
    assert device.name == name
    assert "TB/s" in device.hbm_source
    assert device.read_fraction_source
    assert device.datasheet_bandwidth.note == device.hbm_source
    assert device.practical_bandwidth.value == pytest.approx(device.datasheet_bandwidth.value * device.read_fraction)
    assert device.fp8_tflops is not None
    assert device.fp8_tflops == pytest.approx(2 * device.bf16_tflops, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "terabytes", "sms"),
    [("h100", 3.35, 132), ("h200", 4.8, 132), ("b200", 7.7, 148), ("b300", 7.75, 148), ("gb300", 8.0, 152)],
)
def test_published_peaks(name: str, terabytes: float, sms: int) -> None:
    device = load_hardware(name)
    assert device.hbm_bytes_per_s == terabytes * 1e12
    assert device.sms == sms


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_driver_names_find_their_description(reported: str, name: str) -> None:
    device = match_hardware(reported)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize("reported", ["Tesla T4", "NVIDIA H100 PCIe", "NVIDIA GB200", ""])
def test_other_devices_are_not_guessed(reported: str) -> None:
    assert match_hardware(reported) is None


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="h200"):
        load_hardware("h300")


def test_unknown_fields_are_refused() -> None:
    fields: dict[str, Any] = load_hardware("h200").model_dump()
    with pytest.raises(ValueError, match="colour"):
        Hardware.model_validate({**fields, "colour": "green"})


def test_cpu_roof_reads_memory_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CPU_SECONDS", 0.1)
    roof = measure_read_roof("cpu")
    assert (roof.unit, roof.tag) == ("GB/s", "measured")
    assert "threads" in roof.note
    # slower than any cache of this size could be, faster than a disk
    assert 1 < roof.value < 1500


def test_cpu_roof_does_not_shrink_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "last_level_cache_bytes", lambda: 1 << 50)
    with pytest.raises(UnfitError, match="last-level cache"):
        measure_read_roof("cpu")


def test_roof_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "find_spec", lambda _: None)
    with pytest.raises(UnfitError, match="decode-workbench"):
        measure_read_roof("cpu")


def test_gpu_roof_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnfitError, match="none"):
        measure_read_roof("cuda")


@pytest.mark.gpu
def test_gpu_roof_lies_below_the_datasheet() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    roof = measure_read_roof("cuda")
    device = match_hardware(torch.cuda.get_device_name())
    assert roof.tag == "measured"
    if device is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not described")
    assert 0.5 * device.datasheet_bandwidth.value < roof.value < 1.02 * device.datasheet_bandwidth.value

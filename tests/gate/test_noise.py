from pathlib import Path
from typing import Any

import msgspec
import pytest

from workbench.errors import InputError
from workbench.gate.fingerprint import class_id, machine_of, settings_of
from workbench.gate.noise import Noise, NoiseTable, find_noise, read_noise, write_noise

FACTS = {"machine.device": "cpu", "settings.depth": 3, "prompts": "p"}


def _noise(**changes: Any) -> Noise:
    entry = Noise(
        scenario="s",
        variant="mtp",
        metric="tok_s",
        sd_launch=0.01,
        sd_pair=0.014,
        pairs=8,
        settings_id=class_id(settings_of(FACTS)),
        machine_id=class_id(machine_of(FACTS)),
        machine="made up",
        created="2026-01-01T00:00:00+00:00",
    )
    return msgspec.structs.replace(entry, **changes)


def test_a_table_is_read_back_and_extended(tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    write_noise(path, [_noise()])
    write_noise(path, [_noise(metric="step_p50", sd_pair=0.02), _noise(sd_pair=0.03)])
    assert [(entry.metric, entry.sd_pair) for entry in read_noise(path).entries] == [
        ("step_p50", 0.02),
        ("tok_s", 0.03),
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["noise.json"]


def test_noise_holds_for_its_variant_metric_and_machine_only() -> None:
    table = NoiseTable(entries=[_noise()])
    assert find_noise(table, FACTS, "tok_s") == _noise()
    assert find_noise(table, FACTS, "step_p50") is None
    assert find_noise(table, FACTS | {"machine.device": "cuda"}, "tok_s") is None
    assert find_noise(table, FACTS | {"settings.depth": 4}, "tok_s") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not a noise table"),
        (b"[]", "not a noise table"),
        (b'{"schema": "workbench.noise/1", "entries": [{"sd_pair": "much"}]}', "not a noise table"),
        (b'{"schema": "workbench.noise/9", "entries": []}', "schema 'workbench.noise/9' is not"),
    ],
)
def test_another_file_is_one_clear_line_and_is_not_overwritten(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "noise.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_noise(path)
    with pytest.raises(InputError, match=message):
        write_noise(path, [_noise()])
    assert path.read_bytes() == content


def test_a_missing_table_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run: workbench gate calibrate"):
        read_noise(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be written"):
        write_noise(tmp_path / "no folder" / "noise.json", [_noise()])

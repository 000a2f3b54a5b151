"""The all-reduce measurement says what it lacks; on two GPUs it runs."""

import json
from pathlib import Path

import pytest
import torch

from workbench.decode.rungs import collective_bench
from workbench.errors import UnfitError


@pytest.mark.parametrize(("gpus", "asked"), [(0, []), (1, []), (1, ["--gpus", "2"])])
def test_fewer_than_two_gpus_is_one_line(monkeypatch: pytest.MonkeyPatch, gpus: int, asked: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UnfitError, match=f"needs two GPUs of one host, torch sees {gpus}") as error:
        collective_bench.main(asked)
    assert "\n" not in str(error.value)
    assert ("2 were asked for" in str(error.value)) == bool(asked)


def test_the_table_names_a_wrong_sum() -> None:
    row = {"width": 4, "bytes": 49152, "us": 9.5, "spread": 0.02, "eager_us": 21.0, "correct": True}
    text = collective_bench.table([row, {**row, "correct": False}], 2, 6144)
    assert text.splitlines()[-2].endswith("ok")
    assert text.splitlines()[-1].endswith("WRONG")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_agree_on_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert collective_bench.main(["--gpus", "2", "--hidden", "512", "--count", "4", "--rounds", "3"]) == 0
    rows = json.loads((tmp_path / "collective_bench.json").read_text())
    assert all(row["correct"] and row["us"] > 0 for row in rows)

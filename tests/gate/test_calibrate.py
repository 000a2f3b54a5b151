import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.gate.calibrate import calibrate
from workbench.gate.judge import Request, gate
from workbench.gate.noise import NoiseTable
from workbench.scenario import parse_scenario

MakeCode = Callable[..., Any]
Launches = Callable[..., list[str]]

ONE = parse_scenario('name = "mtp"\n', source="one", folder=Path())


def test_noise_is_that_of_the_launches(launches: Launches, tmp_path: Path) -> None:
    names = launches(noise=0.02)
    found = calibrate(ONE, 16, tmp_path / "out", tmp_path)
    assert len(names) == 16
    assert [(entry.variant, entry.metric, entry.pairs) for entry in found.noise] == [
        ("mtp", "tok_s", 8),
        ("mtp", "step_p50", 8),
        ("mtp", "wall_tok_s", 8),
    ]
    entry = found.noise[0]
    assert entry.sd_launch == pytest.approx(0.02, rel=0.5)
    assert entry.sd_pair == pytest.approx(math.sqrt(2) * 0.02, rel=0.5)
    assert entry.machine == "made up"
    assert (found.stopped, found.rejected, found.drifts("mtp")) == ({}, (), False)


def test_it_holds_for_a_later_gate(launches: Launches, tmp_path: Path) -> None:
    launches()
    found = calibrate(ONE, 8, tmp_path / "out", tmp_path)
    table = NoiseTable(entries=list(found.noise))
    request = Request((".",), (".",), scenario=ONE, out=tmp_path / "gate", noise=table)
    assert gate(request, tmp_path).variants[0].noise == found.noise[0]


def test_a_side_that_is_always_slower_is_drift(launches: Launches, code: MakeCode, tmp_path: Path) -> None:
    # Same code on both sides in truth; here the second of each pair's names is slower, as a warming machine would be.
    launches(head=code(forward=1.5))
    assert calibrate(ONE, 8, tmp_path / "out", tmp_path).drifts("mtp")


def test_a_variant_that_does_not_run_has_no_entry(launches: Launches, tmp_path: Path) -> None:
    launches(problems=dict.fromkeys(range(1, 99), "ended with -9: no memory"))
    found = calibrate(ONE, 8, tmp_path / "out", tmp_path)
    assert found.noise == ()
    assert found.stopped == {"mtp": "pair 1 has no valid launches in 3 tries: base ended with -9: no memory"}
    assert len(found.rejected) == 3


@pytest.mark.parametrize("launches_asked", [0, 6, 9])
def test_too_few_launches_are_refused(launches_asked: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be even and 8 at least"):
        calibrate(ONE, launches_asked, tmp_path / "out", tmp_path)


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no variant 'fast'; the scenario has mtp"):
        calibrate(ONE, 8, tmp_path / "out", tmp_path, variants=("fast",))

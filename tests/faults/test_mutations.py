from pathlib import Path

import pytest

from workbench.diagnose.findings import find
from workbench.errors import InputError
from workbench.faults.case import recorded_folder
from workbench.faults.mutations import MUTATIONS, SKEW_NS, mutate
from workbench.trace.bundle import Bundle
from workbench.trace.validity import verdict

OF_RUNS = ("repeat-steps", "set-clock-back")
"""Done to the steps that a run wrote; in a foreign trace they are found."""


@pytest.fixture(scope="module")
def mutated(trace_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mutated")
    done = {name: mutate(trace_bundle, name, folder / name) for name in MUTATIONS if name not in OF_RUNS}
    recorded = recorded_folder()
    if recorded is not None:
        with Bundle.open(recorded / "gpu-h200") as run:
            done |= {name: mutate(run, name, folder / name) for name in OF_RUNS}
    return done


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("drop-kernels", "launch-without-kernel"),
        ("drop-first-kernels", "head-loss"),
        ("skew-clock", "kernel-before-launch"),
        ("lose-graph-nodes", "missing-graph-nodes"),
        ("empty-device", "second-profiler"),
        ("stretch-kernel", "impossible-duration"),
        ("throttle", "throttled"),
        ("zero-counters", "counter-zero"),
        ("overlap-launches", "overlap-on-stream"),
        ("repeat-steps", "steps-twice"),
        ("set-clock-back", "steps-out-of-order"),
    ],
)
def test_the_verdict_names_it(mutated: dict[str, Path], name: str, check: str) -> None:
    if name not in mutated:
        pytest.skip("no run is recorded beside this checkout")
    with Bundle.open(mutated[name]) as bundle:
        assert check in {one.id for one in verdict(bundle).checks}


def test_overlap_is_no_doubt_and_no_loss(mutated: dict[str, Path], trace_bundle: Bundle) -> None:
    before = {(one.id, one.location) for one in find(trace_bundle, "trace") if one.severity != "note"}
    with Bundle.open(mutated["overlap-launches"]) as bundle:
        after = {(one.id, one.location) for one in find(bundle, "trace") if one.severity != "note"}
        assert not [check for check in verdict(bundle).checks if check.severity == "error"]
    assert after <= before


def test_nothing_else_changes(mutated: dict[str, Path], trace_bundle: Bundle) -> None:
    with Bundle.open(mutated["skew-clock"]) as bundle:
        assert bundle.table("host").equals(trace_bundle.table("host"))
        moved = trace_bundle.table("kernels")["start_ns"].to_numpy() - bundle.table("kernels")["start_ns"].to_numpy()
        assert set(moved.tolist()) == {SKEW_NS}
    with Bundle.open(mutated["drop-kernels"]) as bundle:
        assert bundle.rows("kernels") == round(0.8 * trace_bundle.rows("kernels"))


def test_a_mutated_bundle_is_of_no_scenario(mutated: dict[str, Path]) -> None:
    """It must not be scored in place of the recording that it was made from."""
    for name, path in mutated.items():
        with Bundle.open(path) as bundle:
            assert str(bundle.manifest.scenario["name"]).startswith(f"{name}: ")


def test_an_unknown_mutation(trace_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no mutation 'drop-kernel'; did you mean 'drop-kernels'"):
        mutate(trace_bundle, "drop-kernel", tmp_path / "x")

"""A recording that says what its instruments cost, from fresh processes, and how well all of it is placed."""

import pytest

from workbench.commands.demo import recorded_folder
from workbench.diagnose.quality import InstrumentCost, instrument_costs
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle
from workbench.trace.manifest import Manifest, read_manifest

NAME = "six-signals-gpt-oss-20b-h200"
SAMPLER = "nvml, pm_sampler"
VARIANTS = ("graph", "splitk", "persistent", "persistent-ahead", "splitk-8")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return read_manifest(recorded_folder() / NAME)


@pytest.fixture(scope="module")
def fresh() -> dict[tuple[str, str], InstrumentCost]:
    with Bundle.open(recorded_folder() / NAME) as bundle:
        own = "; processes of their own"
        return {
            (cost.variant, cost.instruments.removesuffix(own)): cost
            for cost in instrument_costs(bundle)
            if cost.instruments.endswith(own)
        }


def test_it_is_small_whole_and_says_nothing_of_the_machine_it_ran_on(manifest: Manifest) -> None:
    folder = recorded_folder() / NAME
    assert check_bundle(folder).ok
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_400_000
    assert not any(part.startswith("/") for part in manifest.command)


def test_what_the_sampler_costs_a_process_that_never_profiled(fresh: dict[tuple[str, str], InstrumentCost]) -> None:
    """At most 0.5 % in the median of sixteen rounds, but for the rung whose passes differ by several percent."""
    shares = {name: fresh[name, SAMPLER].cost for name in VARIANTS}
    for name in VARIANTS[:-1]:
        assert shares[name].value <= 0.005, name
    within = {name: (share.low, share.high) for name, share in shares.items()}
    low, high = within["persistent-ahead"]  # the host lengthens none of its steps: this one is known
    assert low is not None
    assert high is not None
    assert -0.001 < low < high < 0.003
    low, high = within["splitk-8"]
    assert low is not None
    assert high is not None
    assert low < 0 < 0.005 < high


def test_what_the_profiler_costs(fresh: dict[tuple[str, str], InstrumentCost]) -> None:
    shares = {name: fresh[name, "kernels"].cost.value for name in VARIANTS}
    assert shares == {
        "graph": pytest.approx(0.467, abs=0.001),
        "splitk": pytest.approx(0.145, abs=0.001),
        "persistent": pytest.approx(0.131, abs=0.001),
        "persistent-ahead": pytest.approx(0.002, abs=0.001),
        "splitk-8": pytest.approx(0.120, abs=0.001),
    }


def test_every_clock_is_placed_to_under_two_microseconds(manifest: Manifest) -> None:
    residuals: dict[str, int] = {}
    for source in manifest.clock.sources:
        kind = source.name.rsplit(":", 1)[0]
        residuals[kind] = max(residuals.get(kind, 0), source.residual_ns)
    assert residuals == {
        "pm_sampler, samples, moved from where Unix time puts them": pytest.approx(656, abs=1),
        "lanes, device": pytest.approx(137, abs=1),
        "kernels, host": pytest.approx(1_391, abs=1),
        "kernels, device": pytest.approx(442, abs=1),
        "steps, CUDA events": pytest.approx(1_550, abs=1),
        "the host's clock, by the device's": pytest.approx(858, abs=1),
    }

"""A recording with four sets of counters, each over steps of its own: traffic, pipes, stalls, local memory."""

from collections.abc import Iterator

import pytest

from workbench.commands.demo import recorded_folder
from workbench.diagnose.facts import Facts
from workbench.diagnose.findings import find_in
from workbench.diagnose.step_picture import step_pictures
from workbench.probes.counter_sets import SETS
from workbench.trace.bundle import Bundle

NAME = "counter-sets-gpt-oss-20b-h200"
SETS_RUN = ("traffic", "pipes", "stalls", "local")
VARIANTS = ("splitk", "persistent-ahead", "splitk-8")


@pytest.fixture(scope="module")
def bundle() -> Iterator[Bundle]:
    with Bundle.open(recorded_folder() / NAME) as opened:
        yield opened


def source_of(chosen: str) -> str:
    return "pm_sampler" if chosen == "traffic" else f"pm_sampler, {chosen}"


def test_every_set_holds_its_readings_and_is_placed_to_under_two_microseconds(bundle: Bundle) -> None:
    query = "SELECT DISTINCT variant, source, name FROM counters WHERE source LIKE 'pm_sampler%'"
    found = {(row["variant"], row["source"], row["name"]) for row in bundle.query(query, []).to_pylist()}
    wanted = {
        (variant, source_of(chosen), reading.name)
        for variant in VARIANTS
        for chosen in SETS_RUN
        for reading in SETS[chosen].readings
        if reading.name != "sm_cycles"
    }
    assert found == wanted
    residuals = {one.name: one.residual_ns for one in bundle.manifest.clock.sources}
    for variant in VARIANTS:
        for chosen in SETS_RUN:
            placed = f"{source_of(chosen)}, samples, moved from where Unix time puts them: {variant}"
            assert 500 < residuals[placed] < 1_100, placed
    assert max(residuals.values()) < 1_700


def test_no_step_of_a_set_is_lost(bundle: Bundle) -> None:
    for variant in VARIANTS:
        verdict = Facts(bundle, variant).verdict
        assert verdict.allows("counters")
        assert not {"counter-gap", "counter-zero", "counter-empty", "clock-residual"} & {
            check.id for check in verdict.checks
        }


@pytest.mark.parametrize(
    ("variant", "memory", "shared", "issue"),
    [("splitk", 1.45, 0.19, 0.26), ("persistent-ahead", 1.19, 0.17, 0.29), ("splitk-8", 2.0, 0.25, 0.40)],
)
def test_what_warps_wait_for_and_how_much_they_issue(
    bundle: Bundle, variant: str, memory: float, shared: float, issue: float
) -> None:
    counted = Facts(bundle, variant).step_counters
    assert counted.stalled == {
        "global or local memory": pytest.approx(memory, rel=0.05),
        "shared memory or the XU": pytest.approx(shared, rel=0.1),
    }
    assert counted.issue == pytest.approx(issue, rel=0.05)
    assert counted.local_bytes == 0.0
    busiest = [counted.issue_of_busiest(share) or 0.0 for share in (0.02, 0.1, 0.5, 1.0)]
    assert busiest == sorted(busiest, reverse=True)
    assert busiest[-1] == pytest.approx(counted.issue)


def test_four_bit_products_are_confirmed_by_the_busiest_samples(bundle: Bundle) -> None:
    (finding,) = (one for one in find_in(Facts(bundle, "splitk")) if one.id == "instruction-bound")
    said = [row.what for row in finding.evidence]
    assert any("gate_up_kernel" in what and "schedulers issue in up to 60% of cycles" in what for what in said)
    assert "warps of a scheduler that wait for global or local memory, mean of the step" in said


def test_a_step_s_picture_shows_waits_and_issue_and_that_nothing_spills(bundle: Bundle) -> None:
    picture = step_pictures(Facts(bundle, "persistent-ahead"))[0]
    waits, issued = (
        next(one for one in picture.signals if one.name.startswith(name)) for name in ("warps waiting", "instructions")
    )
    head = picture.wall_ns * 0.9  # the head streams: warps wait for memory, and few instructions are issued
    layers = picture.wall_ns * 0.5
    assert waits.value[waits.start > head].max() > 2 * waits.value[waits.start < layers].mean()
    assert issued.value[issued.start < layers].max() > 2 * issued.value[issued.start > head].mean()
    remark = {row.key: row.remark for row in picture.rows}["spills"]
    assert remark == "0 MB of local memory moved a step (measured)"

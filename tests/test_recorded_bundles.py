"""All bundles and traces that the repository holds, and those beside it: their causes add up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.commands.demo import recorded_folder
from workbench.diagnose.attached import Attached, attached
from workbench.diagnose.facts import Facts
from workbench.diagnose.ladder import ladder
from workbench.ingest.bundle import ingest_kineto
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle
from workbench.trace.manifest import read_manifest

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "traces"
"""Real traces, where they are beside the repository."""

BUNDLES = sorted(
    path.parent for folder in (recorded_folder(), ROOT / "tests/data") for path in folder.rglob("manifest.json")
)
TIMED = [path for path in BUNDLES if read_manifest(path).source != "attach"]
WATCHED = [path for path in BUNDLES if read_manifest(path).source == "attach"]
TRACES = sorted(path for folder in (ROOT / "tests/data", SHARED) for path in folder.glob("*.json.gz"))

GPT_OSS = "attach-sglang-gpt-oss-20b-h200"
PLAIN = "attach-sglang-qwen3-30b-h200"
DFLASH = "attach-sglang-qwen3-30b-dflash-h200"
"""SGLang on an H200 while it decoded, watched from outside."""

HELD_UP = {"sglang_qwen3_8b_decode_mi300": 0.98, "sglang-qwen3-30b-dflash-h200": 0.1}
"""Traces with time that nothing in them accounts for. In the first a kernel was launched onto an idle device and began
463 ms later, while the host waited for it; in the second steps lengthen with the context, and the traced ones are the
first of a request."""

UNEXPLAINED = 0.05


@pytest.mark.parametrize("path", [*TIMED, *TRACES], ids=lambda path: path.name.split(".")[0])
def test_causes_add_up_to_the_wall_time(path: Path, tmp_path: Path) -> None:
    folder = path if path.is_dir() else ingest_kineto(path, tmp_path / "bundle").path
    with Bundle.open(folder) as bundle:
        variants = [record.name for record in bundle.manifest.variants]
        assert variants
        for name in variants:
            facts = Facts(bundle, name)
            steps = facts.steps
            assert len(steps)
            causes = {cause.name: cause for cause in facts.accounting.causes}
            assert sum(cause.total_ns for cause in causes.values()) == int((steps.end - steps.start).sum())
            assert all(cause.total_ns >= 0 for cause in causes.values())
            unexplained = causes.get("unexplained")
            share = facts.accounting.share(unexplained) if unexplained else 0.0
            if facts.split is None:
                assert share == 0 or (unexplained and "no trace of what ran" in unexplained.note)
            else:
                most = HELD_UP.get(path.name.split(".")[0], UNEXPLAINED)
                assert share <= most, name
                assert facts.split.mapping.residual <= max(0.05, most if path.is_dir() else 0.0), name


def test_the_repository_holds_a_recording_for_each_use() -> None:
    assert {path.name for path in TIMED} >= {
        "gpt-oss-20b-h200",
        "gpu-h200",
        "ladder-gpt-oss-20b-h200",
        "ladder-gpt-oss-120b-h200",
        "ladder-mimo-rank-h200",
        "ladder-glm-5.2-rank-h200",
        "six-signals-gpt-oss-20b-h200",
        "counter-sets-gpt-oss-20b-h200",
        "slope-gpt-oss-20b-h200",
        "versus-sglang-gpt-oss-20b-h200",
        "sglang-qwen3-30b-dflash-h200",
    }
    assert {path.name for path in WATCHED} >= {GPT_OSS, PLAIN, DFLASH}
    for path in BUNDLES:
        assert check_bundle(path).ok
        assert sum(file.stat().st_size for file in path.iterdir()) < 3_000_000


def test_all_six_signals_of_every_step() -> None:
    with Bundle.open(recorded_folder() / "gpt-oss-20b-h200") as bundle:
        for record in bundle.manifest.variants:
            facts = Facts(bundle, record.name)
            traced, sampled = facts.steps_of("traced"), facts.steps_of("sampled")
            assert len(traced) >= 6
            assert len(sampled) >= 8
            assert (facts.steps.committed >= 1).all()  # accept length
            for name in ("ctas_per_sm", "dram_read_bytes"):
                own = facts.counters.where(facts.counters.matches("name", name))
                start = own.ints("start_ns")
                for first, last in zip(sampled.start.tolist(), sampled.end.tolist(), strict=True):
                    assert ((start >= first) & (start < last)).sum() > 20, (record.name, name)
            assert facts.split is not None  # launch gaps
            assert {"launch-gap", "host-bound"} & {cause.name for cause in facts.accounting.causes}
            syncs = facts.syncs.ints("start_ns")
            late = 2_000_000  # a step ends on the device; the host's wait for it may begin after
            for first, last in zip(traced.start.tolist(), traced.end.tolist(), strict=True):
                assert ((syncs >= first) & (syncs < last + late)).any(), record.name
            own_kernels = set(facts.static.texts("kernel")) & set(facts.kernels.texts("name"))
            assert own_kernels or record.name == "graph"  # spills; the graph rung runs library kernels alone
        lanes = bundle.query("SELECT count(DISTINCT kernel_id) AS n FROM lanes").to_pylist()
        assert 1 <= lanes[0]["n"] <= 2


def test_what_copies_write_is_no_spill() -> None:
    with Bundle.open(recorded_folder() / "gpt-oss-20b-h200") as bundle:
        for record in bundle.manifest.variants:
            facts = Facts(bundle, record.name)
            assert facts.split is not None
            assert not facts.split.of("spill")
        written = Facts(bundle, "graph").step_counters.written_bytes
        assert written is not None
        assert written > 4e9  # experts gathered and expanded, a copy each


def test_measured_bytes_are_those_of_the_model_where_kernels_read_the_stored_format() -> None:
    with Bundle.open(recorded_folder() / "gpt-oss-20b-h200") as bundle:
        for name, most in (("splitk", 0.03), ("splitk-8", 0.04), ("persistent", 0.05)):
            facts = Facts(bundle, name)
            measured, floor = facts.step_counters.read_bytes, facts.floor
            assert measured is not None
            assert floor is not None
            assert measured / (floor.target_bytes + floor.draft_bytes) == pytest.approx(1, abs=most), name


def watched(name: str) -> Attached:
    with Bundle.open(recorded_folder() / name) as bundle:
        return attached(bundle)


@pytest.mark.parametrize("path", WATCHED, ids=lambda path: path.name)
def test_a_watched_server_is_kept_small_and_says_nothing_of_the_machine_it_ran_on(path: Path) -> None:
    assert sum(file.stat().st_size for file in path.iterdir()) < 1_000_000
    assert not any(part.startswith("/") for part in read_manifest(path).command)
    with Bundle.open(path) as bundle:
        found = attached(bundle)
    assert {check.id for check in found.verdict.checks} == {"watched-from-outside", "counter-bursts"}
    assert not found.verdict.allows("steps")
    assert found.verdict.allows("counters")


def test_bytes_a_step_of_a_watched_server_are_those_of_the_model() -> None:
    found = watched(GPT_OSS)
    assert found.bytes_per_step is not None
    assert found.model_bytes is not None
    assert found.bytes_per_step.tag == "measured"
    assert found.bytes_per_step.value == pytest.approx(3.730e9, rel=0.005)  # of the whole recording
    assert found.bytes_per_step.value / found.model_bytes.value == pytest.approx(1, abs=0.03)
    assert found.model_bytes.low == found.model_bytes.high == found.model_bytes.value  # width 1 leaves nothing open
    assert found.experts is None
    assert found.idle is not None
    assert found.idle.value == pytest.approx(0.4100, rel=0.005)
    assert found.roof_share is not None
    assert found.roof_share.value == pytest.approx(0.2038, rel=0.005)
    assert found.ctas_per_sm is not None
    assert found.ctas_per_sm.value == pytest.approx(0.3617, rel=0.005)
    assert [finding.id for finding in found.findings] == ["device-idle", "slow-kernels"]


def test_a_server_that_counts_says_its_own_speed() -> None:
    with Bundle.open(recorded_folder() / GPT_OSS) as bundle:
        found = attached(bundle)
        assert bundle.manifest.scenario["name"].startswith("attached to http://127.0.0.1:")
    assert found.tok_s is not None
    assert (found.tok_s.note, found.tok_s.value) == ("the engine's counter", pytest.approx(294.2, rel=0.001))
    assert found.step is not None
    assert found.step.note == "decode forwards the engine counted"


def test_bytes_a_step_of_a_dense_read_mixture_are_those_of_the_model_too() -> None:
    found = watched(PLAIN)
    assert found.bytes_per_step is not None
    assert found.model_bytes is not None
    assert found.bytes_per_step.value == pytest.approx(6.106e9, rel=0.005)  # of the whole recording
    assert found.bytes_per_step.value / found.model_bytes.value == pytest.approx(1, abs=0.03)
    assert [finding.id for finding in found.findings] == ["slow-kernels", "device-idle"]


def test_bytes_of_a_verified_block_say_how_many_experts_it_chose() -> None:
    found = watched(DFLASH)
    assert found.bytes_per_step is not None
    assert found.model_bytes is not None
    assert found.bytes_per_step.value == pytest.approx(10.56e9, rel=0.005)  # of the whole recording
    low, high = found.model_bytes.low, found.model_bytes.high
    assert low == pytest.approx(6.115e9, rel=0.001)  # a plain step
    assert high == pytest.approx(25.87e9, rel=0.001)
    assert found.experts is not None
    assert (found.experts.value, found.experts.tag) == (pytest.approx(17.8, rel=0.01), "estimated")
    assert found.period is not None
    assert found.period.value == pytest.approx(7.7, rel=0.02)
    assert not {finding.id for finding in found.findings} & {"byte-model-mismatch", "over-fetch"}


LADDER = "ladder-gpt-oss-20b-h200"
"""All rungs on one H200 in one run, eager torch to one launch a step."""


@pytest.fixture(scope="module")
def rungs() -> Iterator[dict[str, Facts]]:
    with Bundle.open(recorded_folder() / LADDER) as bundle:
        yield {record.name: Facts(bundle, record.name) for record in bundle.manifest.variants}


def test_the_ladder_climbs_from_eager_to_two_thirds_of_the_roof(rungs: dict[str, Facts]) -> None:
    speeds = {name: facts.tok_s.value for name, facts in rungs.items() if facts.tok_s}
    assert len(speeds) == 19
    for name, tok_s in {
        "eager": 18.2,
        "graph": 122.1,
        "fused": 337.6,
        "fp4": 465.0,
        "splitk": 479.1,
        "persistent": 780.1,
        "persistent-ahead": 830.3,
        "persistent-8-ahead": 1310.0,
    }.items():
        assert speeds[name] == pytest.approx(tok_s, rel=0.002), name
    accounting = rungs["persistent-ahead"].accounting
    floor = next(cause for cause in accounting.causes if cause.name == "floor")
    assert accounting.share(floor) >= 0.65


def test_bytes_of_every_rung_are_those_of_the_model_with_what_it_holds_wider(rungs: dict[str, Facts]) -> None:
    for name, facts in rungs.items():
        measured, floor = facts.step_counters.read_bytes, facts.floor
        assert measured is not None
        assert floor is not None
        assert (floor.expanded_bytes > 0) == (name.split("-")[0] in ("eager", "graph", "fused"))
        known = floor.target_bytes + floor.draft_bytes + floor.expanded_bytes
        assert measured / known == pytest.approx(1, abs=0.03), name


def test_running_ahead_and_overlap_change_no_text(rungs: dict[str, Facts]) -> None:
    bundle = rungs["persistent"].bundle
    texts = {
        name: set(
            bundle.query(
                "SELECT DISTINCT output_sha256 FROM sequences WHERE variant = ? AND output_sha256 IS NOT NULL", [name]
            )
            .column(0)
            .to_pylist()
        )
        for name in rungs
    }
    assert texts["persistent"]
    for name, other in (
        ("persistent", "persistent-ahead"),
        ("persistent-8", "persistent-8-ahead"),
        ("splitk", "splitk-overlap"),
    ):
        assert texts[name] == texts[other], name
    watched = {row.variant for row in bundle.manifest.perturbation}
    assert watched == set(rungs)  # what each instrument cost, for each variant


def test_the_ladder_predicts_where_rungs_differ_in_what_they_remove(rungs: dict[str, Facts]) -> None:
    steps = {(step.lower, step.higher): step for step in ladder([rungs[name] for name in rungs])}
    for pair in (
        ("eager", "graph"),
        ("fused", "fp4"),
        ("fp4", "splitk"),
        ("splitk", "splitk-overlap"),
        ("livequant-naive", "livequant-fused"),
        ("persistent", "persistent-ahead"),
        ("fused-8", "splitk-8"),
        ("persistent-8", "persistent-8-ahead"),
    ):
        error = steps[pair].error
        assert error is not None
        assert abs(error) <= 0.1, pair
    # The rest differ in more than what is removed, and it is said in what.
    for pair in (("graph", "fused"), ("splitk", "persistent")):
        assert steps[pair].differs.startswith("compute -"), pair

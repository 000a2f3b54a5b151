"""Recorded on an H200: gpt-oss-120b, one rank of eight of MiMo-V2.5-Pro and one of GLM-5.2, and gpt-oss-20b at verify
widths 1 to 16."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from workbench.commands.demo import recorded_folder
from workbench.diagnose.facts import Facts
from workbench.diagnose.ladder import ladder
from workbench.trace.bundle import Bundle

LARGE, RANK, SLOPE = "ladder-gpt-oss-120b-h200", "ladder-mimo-rank-h200", "slope-gpt-oss-20b-h200"
LATENT = "ladder-glm-5.2-rank-h200"
WIDTHS = (1, 2, 4, 8, 16)


def variants(name: str) -> Iterator[dict[str, Facts]]:
    with Bundle.open(recorded_folder() / name) as bundle:
        yield {record.name: Facts(bundle, record.name) for record in bundle.manifest.variants}


@pytest.fixture(scope="module")
def large() -> Iterator[dict[str, Facts]]:
    yield from variants(LARGE)


@pytest.fixture(scope="module")
def rank() -> Iterator[dict[str, Facts]]:
    yield from variants(RANK)


@pytest.fixture(scope="module")
def latent() -> Iterator[dict[str, Facts]]:
    yield from variants(LATENT)


@pytest.fixture(scope="module")
def slope() -> Iterator[dict[str, Facts]]:
    yield from variants(SLOPE)


def ms(facts: Facts, cause: str = "") -> float:
    """Return the mean clean step of a variant, or what of it a cause takes."""
    accounting = facts.accounting
    taken = sum(one.total_ns for one in accounting.causes if not cause or one.name == cause)
    return taken / len(facts.steps) / 1e6


def read_over_model(facts: Facts) -> float:
    """Return DRAM bytes counted in a step over those of the model, with what is held wider than stored."""
    measured, floor = facts.step_counters.read_bytes, facts.floor
    assert measured is not None
    assert floor is not None
    return measured / (floor.target_bytes + floor.draft_bytes + floor.expanded_bytes)


@pytest.mark.parametrize("name", [LARGE, RANK, LATENT, SLOPE])
def test_it_is_small_and_its_command_has_no_path(name: str) -> None:
    folder = recorded_folder() / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_600_000
    with Bundle.open(folder) as bundle:
        command = bundle.manifest.command
        assert command[:2] == ["workbench", "run"]
        assert command[2] == name.removesuffix("-h200")
        assert not any(part.startswith("/") for part in command)
        assert bundle.manifest.device["gpu"] == "NVIDIA H200"


def test_speeds_of_the_large_model(large: dict[str, Facts]) -> None:
    for name, tok_s in {
        "eager": 9.73,
        "graph": 13.47,
        "fp4": 327.3,
        "splitk": 331.8,
        "splitk-overlap": 376.8,
        "splitk-4": 471.2,
        "splitk-8": 482.2,
    }.items():
        facts = large[name]
        assert facts.tok_s is not None
        assert facts.tok_s.value == pytest.approx(tok_s, rel=0.002), name
        assert facts.tok_s.tag == ("modelled" if name[-1].isdigit() and name != "fp4" else "measured")
    overlap = large["splitk-overlap"]
    assert ms(overlap, "floor") / ms(overlap) == pytest.approx(0.416, abs=0.002)


def test_bytes_of_the_large_model_are_counted_where_the_sampler_kept_up(large: dict[str, Facts]) -> None:
    for name in ("fp4", "splitk", "splitk-overlap", "splitk-4", "splitk-8"):
        assert read_over_model(large[name]) == pytest.approx(1, abs=0.03), name
    for name in ("eager", "graph"):  # steps of 0.1 s: its buffer ran full, and the next capture gave nothing
        assert large[name].step_counters.read_bytes is None
        assert "damaged" in {check.id for check in large[name].verdict.checks}


def test_overlap_changes_no_text(large: dict[str, Facts], rank: dict[str, Facts]) -> None:
    for held in (large, rank):
        texts = {
            name: set(
                held[name]
                .bundle.query("SELECT DISTINCT output_sha256 FROM sequences WHERE variant = ?", [name])
                .column(0)
                .to_pylist()
            )
            for name in ("splitk", "splitk-overlap")
        }
        assert texts["splitk"] == texts["splitk-overlap"]


def test_speeds_of_the_rank(rank: dict[str, Facts]) -> None:
    for name, tok_s in {
        "eager": 4.52,
        "graph": 15.5,
        "fp4": 155.8,
        "splitk": 162.6,
        "splitk-overlap": 176.1,
        "livequant-naive": 138.9,
        "livequant-fused": 168.9,
        "livequant-pq": 130.4,
        "splitk-8": 334.7,
        "livequant-fused-8": 303.4,
    }.items():
        facts = rank[name]
        assert facts.tok_s is not None
        assert facts.tok_s.value == pytest.approx(tok_s, rel=0.002), name


def test_only_live_quantisation_reads_the_rank_s_projections_as_they_are_stored(rank: dict[str, Facts]) -> None:
    for name, facts in rank.items():
        floor = facts.floor
        assert floor is not None
        if name.startswith("livequant"):
            assert floor.expanded_bytes == 0, name
        else:
            assert floor.expanded_bytes == pytest.approx(1.496e9, rel=0.001), name
        if name in ("eager", "graph"):
            continue
        # Two of the eight clean steps of 8 tokens are narrower and run padded, which no byte model holds.
        assert read_over_model(facts) == pytest.approx(1, abs=0.03 if "-8" not in name else 0.08), name


def test_a_fifth_of_the_rank_s_step_is_its_collectives(rank: dict[str, Facts]) -> None:
    assert ms(rank["splitk-overlap"], "collective") / ms(rank["splitk-overlap"]) == pytest.approx(0.22, abs=0.003)
    per_step = rank["splitk-overlap"].bundle.query(
        "SELECT count(*) / count(DISTINCT step_id) AS n FROM kernels "
        "WHERE variant = 'splitk-overlap' AND name LIKE 'collective%' AND step_id IS NOT NULL"
    )
    assert per_step.to_pylist() == [{"n": 140}]  # two a layer, 70 layers


def test_what_the_ladder_predicted_of_the_larger_models(large: dict[str, Facts], rank: dict[str, Facts]) -> None:
    for held, pairs in (
        (large, [("eager", "graph"), ("fp4", "splitk"), ("splitk", "splitk-overlap")]),
        (rank, [("eager", "graph"), ("fp4", "splitk"), ("splitk", "splitk-overlap"), ("fp4-4", "splitk-4")]),
        (rank, [("livequant-naive", "livequant-fused")]),
    ):
        steps = {(step.lower, step.higher): step for step in ladder(list(held.values()))}
        for pair in pairs:
            error = steps[pair].error
            assert error is not None
            assert abs(error) <= 0.1, pair
    wide = {(step.lower, step.higher): step for step in ladder(list(rank.values()))}["splitk-8", "livequant-fused-8"]
    assert wide.error is not None
    assert wide.error > 0.1  # slower, not faster: it is said by what they differ
    assert wide.differs.startswith("under-fill +")


def test_one_launch_a_step_is_the_fastest_way_through_the_latent_rank_and_half_way_to_the_roof(
    latent: dict[str, Facts],
) -> None:
    for name, tok_s in {
        "graph": 13.63,
        "splitk-overlap": 119.9,
        "splitk-overlap-alone": 147.2,
        "livequant-fused": 121.5,
        "persistent": 288.6,
        "persistent-ahead": 289.9,
        "persistent-alone": 431.0,
        "splitk-4": 224.3,
        "livequant-fused-8": 292.4,
    }.items():
        facts = latent[name]
        assert facts.tok_s is not None
        assert facts.tok_s.value == pytest.approx(tok_s, rel=0.002), name
        assert facts.tok_s.tag == ("modelled" if name[-1].isdigit() else "measured")
    for end, gain in (("", 2.41), ("-alone", 2.93)):
        assert ms(latent[f"splitk-overlap{end}"]) / ms(latent[f"persistent{end}"]) == pytest.approx(gain, abs=0.01)
    for name, share in {"splitk-overlap": 0.141, "persistent": 0.339, "persistent-alone": 0.506}.items():
        assert ms(latent[name], "floor") / ms(latent[name]) == pytest.approx(share, abs=0.002), name


def test_bytes_of_the_latent_rank_are_those_of_the_model(latent: dict[str, Facts]) -> None:
    for name, facts in latent.items():
        if name == "graph":  # it expands the chosen experts in every step
            assert facts.step_counters.read_bytes == pytest.approx(48.0e9, rel=0.01)
            assert ms(facts, "over-fetch") == pytest.approx(26.4, rel=0.01)
            continue
        assert read_over_model(facts) == pytest.approx(1, abs=0.02 if "-8" not in name else 0.08), name
        assert facts.floor is not None
        held_wider = 3.344e9 if name.startswith("splitk") else 0.143e9
        assert facts.floor.expanded_bytes == pytest.approx(held_wider, rel=0.001), name


def test_collectives_and_running_ahead_change_no_text_of_the_latent_rank(latent: dict[str, Facts]) -> None:
    def texts(name: str) -> dict[str, str]:
        rows = latent[name].bundle.query("SELECT run_pass, output_sha256 FROM sequences WHERE variant = ?", [name])
        return {row["run_pass"]: row["output_sha256"] for row in rows.to_pylist()}

    assert texts("splitk-overlap") == texts("splitk-overlap-alone")
    assert texts("persistent") == texts("persistent-ahead") == texts("persistent-alone")


def growth(facts: dict[str, Facts], first: Facts, cause: str = "") -> dict[str, float]:
    """Return each variant's mean step, or what of it ``cause`` takes, over that of ``first``."""
    return {name: ms(one, cause) / ms(first, cause) for name, one in facts.items()}


def test_a_wider_step_grows_as_its_floor_does(slope: dict[str, Facts]) -> None:
    """The share of the roof that one token has, wider steps have too: up to 16 tokens launched, 8 in one launch."""
    for rung, widths, within in (("width", WIDTHS, 0.035), ("persistent", WIDTHS[:-1], 0.08)):
        held = {f"{rung}-{width}": slope[f"{rung}-{width}"] for width in widths}
        first = held[f"{rung}-1"]
        floors = growth(held, first, "floor")
        assert growth(held, first) == pytest.approx(floors, rel=within), rung
        assert floors[f"{rung}-{widths[-1]}"] > 2.3


def test_in_milliseconds_a_wider_step_costs_about_twice_its_bytes(slope: dict[str, Facts]) -> None:
    steps = {width: ms(slope[f"width-{width}"]) for width in WIDTHS}
    floors = {width: ms(slope[f"width-{width}"], "floor") for width in WIDTHS}
    assert steps == pytest.approx({1: 1.762, 2: 2.358, 4: 3.166, 8: 4.269, 16: 5.244}, rel=0.001)
    assert floors == pytest.approx({1: 0.819, 2: 1.062, 4: 1.456, 8: 1.987, 16: 2.482}, rel=0.001)
    ratio = {last: (steps[last] - steps[first]) / (floors[last] - floors[first]) for first, last in pairwise(WIDTHS)}
    assert ratio == pytest.approx({2: 2.45, 4: 2.05, 8: 2.08, 16: 1.97}, rel=0.01)
    for name, facts in slope.items():
        assert read_over_model(facts) == pytest.approx(1, abs=0.02), name


def test_decoding_four_bits_is_most_of_what_a_wide_step_costs_above_the_floor(slope: dict[str, Facts]) -> None:
    for first, last, share in ((1, 8, 0.74), (8, 16, 0.90)):
        low, high = slope[f"width-{first}"], slope[f"width-{last}"]
        above = ms(high) - ms(low) - (ms(high, "floor") - ms(low, "floor"))
        decoding = ms(high, "instruction-bound") - ms(low, "instruction-bound")
        assert decoding / above == pytest.approx(share, abs=0.02), last


def test_the_latent_step_is_known_for_a_kernel_that_streams_weights(latent: dict[str, Facts]) -> None:
    compute = next(cause for cause in latent["persistent-alone"].accounting.causes if cause.name == "compute")
    assert compute.note.startswith("latent_step: beyond the floor")

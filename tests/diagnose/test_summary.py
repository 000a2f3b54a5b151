"""A bundle built by hand, and everything that is said of it."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.errors import UnfitError
from workbench.trace.bundle import Bundle
from workbench.trace.manifest import VariantRecord

MS = 1_000_000
US = 1_000


def step(start_us: int, draft: int, forward: int, verify: int, **more: Any) -> dict[str, Any]:
    moments = [start_us, start_us + draft, start_us + draft + forward, start_us + draft + forward + verify]
    names = ("start_ns", "draft_end_ns", "forward_end_ns", "end_ns")
    return dict(zip(names, (US * moment for moment in moments), strict=True)) | more


@pytest.fixture
def golden(make_bundle: Callable[..., Bundle]) -> Bundle:
    """Plain decoding at 1 ms a token, MTP at 2 ms for 1 to 4 tokens, and a variant that never ran."""
    plain = [step(1000 * at, 0, 900, 100, experts=[2, 2], sequence_id=at // 5) for at in range(10)]
    plain[0] |= {"warmup": True, "end_ns": plain[0]["end_ns"] + 50 * US}
    accepted = [3, 1, 0, 2, 3, 1]
    mtp = [
        step(
            20_000 + 3000 * at,
            400,
            1500,
            100,
            variant="mtp",
            sequence_id=2 + at // 3,
            width=4,
            drafted=3,
            accepted=kept,
            committed=kept + 1,
            experts=[4, 4 + (at % 2)],
        )
        for at, kept in enumerate(accepted)
    ]
    traced = [step(90_000, 0, 2000, 100, run_pass="traced", sequence_id=4)]  # noqa: S106
    sequences = [
        {"prompt_id": "a", "output_sha256": "a" * 64},
        {"prompt_id": "b", "output_sha256": "b" * 64},
        {"prompt_id": "a", "output_sha256": "a" * 64, "variant": "mtp"},
        {"prompt_id": "b", "output_sha256": "b" * 64, "variant": "mtp"},
        {"prompt_id": "a", "output_sha256": "c" * 64, "run_pass": "traced"},
    ]
    operators = [(90_000, 90_500), (90_400, 90_900), (91_500, 91_600)]  # 1000 of 2000 us
    tensors = [
        {"tensor_class": "qkv", "read_bytes": 60_000, "tag": "estimated"},
        {"tensor_class": "routed_experts", "read_bytes": 40_000, "tag": "estimated"},
        {"tensor_class": "qkv", "read_bytes": 60_000, "tag": "estimated", "variant": "mtp", "width": 4},
        {"tensor_class": "routed_experts", "read_bytes": 85_000, "tag": "estimated", "variant": "mtp", "width": 4},
        {"tensor_class": "mtp_proj", "read_bytes": 10_000, "variant": "mtp", "role": "draft", "width": 3},
    ]
    return make_bundle(
        {
            "steps": plain + mtp + traced,
            "sequences": sequences,
            "host": [{"start_ns": US * start, "end_ns": US * end} for start, end in operators],
            "tensors": tensors,
            "roofs": [{"bytes_per_s": 1_000_000_000}],  # 1 ns a byte
        },
        {"v": {}, "mtp": {"drafter": {"kind": "mtp"}}, "never": {"drafter": {"kind": "ngram"}}},
        scenario={"name": "golden"},
    )


@pytest.fixture
def diagnosis(golden: Bundle) -> Diagnosis:
    return diagnose(golden)


def test_the_headline_numbers_of_the_golden_bundle(diagnosis: Diagnosis) -> None:
    assert diagnosis.scenario == "golden"
    assert diagnosis.failed == ("never",)
    plain, mtp = diagnosis.variants
    assert (plain.name, plain.device, plain.drafter, plain.steps, plain.tokens) == ("v", "cpu", "none", 9, 9)
    assert (mtp.name, mtp.drafter, mtp.steps, mtp.tokens) == ("mtp", "mtp", 6, 16)
    assert plain.tok_s.value == pytest.approx(1000)  # 9 tokens in 9 ms, the warm-up step left out
    assert mtp.tok_s.value == pytest.approx(16 / 0.012)
    assert (plain.tok_s.tag, plain.tok_s.unit) == ("measured", "tok/s")
    assert plain.accept_length.value == 1
    assert mtp.accept_length.value == pytest.approx(16 / 6)
    assert (mtp.step_p50.value, mtp.step_p90.value) == (2.0, 2.0)
    assert [(at.reached, at.accepted) for at in mtp.positions] == [(6, 5), (6, 3), (6, 2)]
    assert plain.positions == ()
    assert plain.identity is None
    assert mtp.identity is not None
    assert (mtp.identity.baseline, mtp.identity.compared, mtp.identity.same) == ("v", 2, 2)


def test_the_floor_and_the_share_of_the_roof(diagnosis: Diagnosis) -> None:
    plain, mtp = diagnosis.variants
    assert plain.roof_share is not None
    assert plain.bytes_per_step is not None
    assert plain.roof_share.value == pytest.approx(0.1)  # 100 us of bytes in steps of 1 ms
    assert plain.bytes_per_step.value == pytest.approx(100_000)
    assert plain.roof_share.tag == "estimated"
    # 155 us of bytes in steps of 2 ms, on the average step; the drafter's share is arithmetic alone.
    assert mtp.roof_share is not None
    assert mtp.roof_share.value == pytest.approx(0.0775)
    assert mtp.roof_share.tag == "modelled"


def test_where_the_time_went(diagnosis: Diagnosis) -> None:
    plain, mtp = diagnosis.variants
    # Operators cover half of the traced forward: 450 of 900 us, of which 100 are floor.
    assert {cause.name: cause.total_ns for cause in plain.accounting.causes} == {
        "floor": 9 * 100 * US,
        "compute": 9 * 350 * US,
        "host-bound": 9 * 450 * US,
        "draft": 0,
        "verify-and-sampling": 9 * 100 * US,
    }
    assert plain.accounting.wall_ns == 9 * MS
    # The forward of a variant that was not traced is not split.
    assert {cause.name: cause.total_ns for cause in mtp.accounting.causes} == {
        "floor": 6 * 155 * US,
        "unexplained": 6 * (1500 - 145) * US,
        "draft": 6 * 390 * US,
        "verify-and-sampling": 6 * 100 * US,
    }
    assert mtp.accounting.wall_ns == 12 * MS


def test_the_diagnosis_is_plain_data(diagnosis: Diagnosis) -> None:
    data = json.loads(json.dumps(diagnosis.to_json()))
    assert data["scenario"] == "golden"
    assert data["without_steps"] == ["never"]
    assert list(data["variants"]) == ["v", "mtp"]
    mtp = data["variants"]["mtp"]
    assert mtp["accept_length"]["note"] == "committed tokens per step, bonus token included"
    assert mtp["greedy_identical_to_plain"] == {"identical": True, "same": 2, "compared": 2, "baseline": "v"}
    assert mtp["acceptance_by_position"][1] == {"position": 2, "reached": 6, "accepted": 3, "rate": 0.5}
    assert sum(cause["total_ns"] for cause in mtp["causes"]) == mtp["wall_ns"]
    assert sum(cause["share"] for cause in mtp["causes"]) == pytest.approx(1)
    assert data["variants"]["v"]["greedy_identical_to_plain"] is None


def test_simulated_acceptance_is_never_called_measured(make_bundle: Callable[..., Bundle]) -> None:
    bundle = make_bundle({"steps": [step(0, 1, 5, 1, committed=3)]}, {"v": {"drafter": {"kind": "simulated"}}})
    (variant,) = diagnose(bundle).variants
    assert variant.tok_s.tag == variant.accept_length.tag == "modelled"
    assert variant.step_p50.tag == "measured"
    assert variant.roof_share is variant.bytes_per_step is None


def test_an_automatic_device_is_the_one_the_run_took(make_bundle: Callable[..., Bundle]) -> None:
    tables = {
        "steps": [step(0, 0, 5, 1)],
        "tensors": [{"read_bytes": 3}],
        "roofs": [{"device": "gpu", "bytes_per_s": 1000}],
    }
    auto = {"v": {"engine": {"device": "auto"}}}
    (variant,) = diagnose(make_bundle(tables, auto, device={"name": "gpu"})).variants
    assert variant.device == "gpu"
    assert variant.roof_share is not None
    (variant,) = diagnose(make_bundle(tables, {"v": {}}, device={"name": "gpu"})).variants
    assert variant.device == "cpu"
    assert variant.roof_share is None


def test_nothing_measured_is_refused_in_one_line(make_bundle: Callable[..., Bundle]) -> None:
    with pytest.raises(UnfitError, match="no variant has a measured step; run the scenario again"):
        diagnose(make_bundle({"steps": [step(0, 0, 5, 1, warmup=True)]}))
    foreign = make_bundle({"steps": [step(0, 0, 5, 1), step(9, 0, 5, 1, committed=None)]})
    with pytest.raises(UnfitError, match="variant 'v': 1 of 2 steps do not say how many tokens they committed"):
        diagnose(foreign)


def test_a_bundle_that_lost_its_settings_is_diagnosed_with_what_is_left(golden: Bundle) -> None:
    stripped = [VariantRecord(name=record.name) for record in golden.manifest.variants]
    golden.manifest = msgspec.structs.replace(golden.manifest, variants=stripped)
    for variant in diagnose(golden).variants:
        assert (variant.drafter, variant.identity) == ("unknown", None)
        assert variant.accounting.wall_ns > 0

"""What SGLang's recorded runs say: speeds, bytes, causes and the break-even that the case studies quote."""

from collections.abc import Iterator

import pytest

from workbench.commands.demo import recorded_folder
from workbench.diagnose.facts import Facts
from workbench.diagnose.findings import find_in
from workbench.diagnose.headline import headline
from workbench.diagnose.summary import Diagnosis, diagnose
from workbench.trace.bundle import Bundle

VERSUS = "versus-sglang-gpt-oss-20b-h200"
DFLASH = "sglang-qwen3-30b-dflash-h200"
DRAFTING = ("dflash-2", "dflash-3", "dflash-4", "dflash-6")


@pytest.fixture(scope="module")
def versus() -> Iterator[Bundle]:
    with Bundle.open(recorded_folder() / VERSUS) as bundle:
        yield bundle


@pytest.fixture(scope="module")
def dflash() -> Iterator[Bundle]:
    with Bundle.open(recorded_folder() / DFLASH) as bundle:
        yield bundle


@pytest.fixture(scope="module")
def dflash_diagnosis(dflash: Bundle) -> Diagnosis:
    return diagnose(dflash)


def causes(facts: Facts) -> dict[str, float]:
    """ms a step by cause."""
    return {cause.name: cause.total_ns / facts.accounting.steps / 1e6 for cause in facts.accounting.causes}


@pytest.mark.parametrize("name", [VERSUS, DFLASH])
def test_recordings_are_small_and_name_no_folder(name: str) -> None:
    folder = recorded_folder() / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    with Bundle.open(folder) as bundle:
        assert not any(part.startswith("/") for part in bundle.manifest.command)
        assert not any(str(value).startswith("/") for value in bundle.table("env")["value"].to_pylist())


def test_three_engines_in_one_table(versus: Bundle) -> None:
    found = {one.name: one for one in diagnose(versus).variants}
    tok_s = {name: one.tok_s.value for name, one in found.items()}
    assert tok_s == pytest.approx({"splitk": 538.6, "persistent": 787.4, "sglang": 290.0}, rel=0.001)
    shares = {name: one.roof_share.value for name, one in found.items() if one.roof_share}
    assert shares == pytest.approx({"splitk": 0.431, "persistent": 0.631, "sglang": 0.232}, abs=0.002)
    wall = {name: one.wall_tok_s.value for name, one in found.items() if one.wall_tok_s}
    assert wall == pytest.approx({"splitk": 491, "persistent": 694}, rel=0.002)  # an engine's pauses are in its steps


@pytest.mark.parametrize("variant", ["splitk", "persistent", "sglang"])
def test_all_three_read_what_the_model_says(versus: Bundle, variant: str) -> None:
    facts = Facts(versus, variant)
    assert facts.step_counters.read_bytes == pytest.approx(3.716e9, rel=0.005)


def test_sglang_s_step_is_explained(versus: Bundle) -> None:
    facts = Facts(versus, "sglang")
    split = facts.split
    assert split is not None
    assert split.mapping.residual < 0.005
    found = causes(facts)
    wanted = {"floor": 0.801, "under-fill": 1.131, "small-kernels": 0.480, "launch-gap": 0.449, "compute": 0.332}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=0.02)
    assert "unexplained" not in found
    assert [one.id for one in find_in(facts)][:3] == ["under-fill", "small-kernels", "launch-gap"]
    layers = {one.name: one.per_step for one in split.classes}
    assert layers["_reduce"] == layers["_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1"] == 24  # once a layer, exactly
    assert max(split.of("under-fill"), key=lambda loss: loss.ns).source == "_reduce"


def test_drafting_breaks_even_at_the_ratio_of_step_times(dflash_diagnosis: Diagnosis) -> None:
    found = {one.name: one for one in dflash_diagnosis.variants}
    assert found["plain"].tok_s.value == pytest.approx(248.4, rel=0.001)
    plain = 1 / found["plain"].tok_s.value
    for name, accepted in zip(DRAFTING, (1.99, 3.00, 3.98, 5.91), strict=True):
        one = found[name]
        assert one.tok_s.tag == "modelled"  # its acceptance is simulated
        assert one.accept_length.value == pytest.approx(accepted, abs=0.01)
        assert one.accept_length.value / one.tok_s.value / plain == pytest.approx(1.713, abs=0.01)


def test_the_headline_names_what_is_faster(dflash_diagnosis: Diagnosis) -> None:
    text = headline(dflash_diagnosis)
    assert text.startswith("plain, the only variant with real acceptance, decodes at 248 tok/s (measured)")
    assert text.endswith("; dflash-6, whose acceptance is simulated, reaches 854 tok/s.")


def test_bytes_of_a_wide_step_are_those_of_fewer_experts_than_the_bound(dflash: Bundle) -> None:
    assert Facts(dflash, "plain").step_counters.read_bytes == pytest.approx(6.103e9, rel=0.03)
    for name in DRAFTING:
        assert Facts(dflash, name).step_counters.read_bytes == pytest.approx(10.5e9, rel=0.01)


@pytest.mark.parametrize("variant", DRAFTING)
def test_kernels_of_a_drafted_step_are_those_of_one_step(dflash: Bundle, variant: str) -> None:
    """Traced steps are the engine's, not its client's: one head of the target and one of the drafter, 48 layers."""
    facts = Facts(dflash, variant)
    assert facts.split is not None
    counts = {one.short_name: one.per_step for one in facts.split.classes}
    assert counts["triton_per_fused_copy__mul_sum_0"] == pytest.approx(48, abs=0.5)
    assert counts["_fwd_kernel"] == pytest.approx(53, abs=0.5)  # five layers more: the drafter's
    assert counts["nvjet_sm90_tst_384x8_64x4_2x1_v_bz_TNT"] == pytest.approx(2, abs=0.1)
    assert causes(facts).get("unexplained", 0.0) < 0.65
    ids = {one.id for one in find_in(facts)}
    assert ids >= {"under-fill", "small-kernels", "slow-kernels"}
    assert "graph-break" not in ids  # the drafter has a graph of its own

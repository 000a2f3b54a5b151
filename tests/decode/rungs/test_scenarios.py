"""The built-in scenarios of the ladder fit one H200, and say what they need where there is none."""

from pathlib import Path

import pytest
import torch

from workbench.decode.rungs import fit
from workbench.decode.rungs.fit import check_variants, variant_spec
from workbench.decode.rungs.plan import PLANS
from workbench.errors import UnfitError
from workbench.runner import run_scenario
from workbench.scenario import load_scenario, scenario_names

LADDERS = [
    "ladder-gpt-oss-20b",
    "ladder-gpt-oss-120b",
    "ladder-qwen3-30b",
    "ladder-glm-5.2-rank",
    "ladder-glm-5.2-rank-fp8",
    "ladder-mimo-rank",
    "slope-gpt-oss-20b",
    "nano-acceptance",
]
H200_FREE = 139 << 30


def test_the_ladders_ship() -> None:
    assert set(LADDERS) <= set(scenario_names())


@pytest.mark.parametrize("name", LADDERS)
def test_a_ladder_fits_one_h200(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (H200_FREE, H200_FREE))
    variants = load_scenario(name).variants()
    check_variants(variants)
    monkeypatch.setattr(fit, "SPARE_BYTES", H200_FREE)
    with pytest.raises(UnfitError, match="exceed the 0 bytes free on the cuda"):
        check_variants(variants)


@pytest.mark.parametrize("name", LADDERS)
def test_without_a_gpu_it_says_which_rungs_need_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scenario = load_scenario(name)
    needing = {variant.engine.rung for variant in scenario.variants() if PLANS[variant.engine.rung].needs_gpu}
    with pytest.raises(UnfitError) as error:
        run_scenario(scenario, tmp_path / "out")
    assert all(rung in str(error.value) for rung in needing)
    assert not (tmp_path / "out").exists()


def test_the_gpt_oss_ladder_has_every_rung_and_three_widths() -> None:
    variants = load_scenario("ladder-gpt-oss-20b").variants()
    assert {variant.engine.rung for variant in variants} == set(PLANS)
    assert {variant.drafter.width for variant in variants} == {1, 4, 8}
    assert all(variant_spec(variant).name == "gpt-oss-20b" for variant in variants)


def test_nano_acceptance_pairs_w4a16_with_w4a8() -> None:
    variants = {variant.name: variant for variant in load_scenario("nano-acceptance").variants()}
    for kind in ("none", "ngram", "mtp", "dflash"):
        wide, narrow = variants[f"{kind}-w4a16"], variants[f"{kind}-w4a8"]
        assert (wide.engine.faults, narrow.engine.faults) == ([], ["w4a8"])
        assert wide.drafter == narrow.drafter


@pytest.mark.parametrize(
    ("name", "spec_name"),
    [
        ("ladder-glm-5.2-rank", "glm-5.2 tp8"),
        ("ladder-glm-5.2-rank-fp8", "glm-5.2 tp8"),
        ("ladder-mimo-rank", "mimo-v2.5-pro tp8"),
    ],
)
def test_rank_ladders_run_one_slice_with_collectives_of_stated_length(name: str, spec_name: str) -> None:
    variants = load_scenario(name).variants()
    assert {variant_spec(variant).name for variant in variants} == {spec_name}
    alone = {variant.name for variant in variants if not variant.engine.collective_us}
    assert alone == ({"splitk-overlap-alone", "persistent-alone"} if name == "ladder-glm-5.2-rank" else set())
    assert {variant.engine.collective_us for variant in variants if variant.name not in alone} == {8.0}
    assert {variant.model.routing for variant in variants} == {"uniform"}
    assert {variant.drafter.width for variant in variants} == {1, 4, 8}
    rungs = {variant.engine.rung for variant in variants}
    assert {"eager", "graph", "splitk", "livequant-naive", "livequant-fused", "livequant-pq"} <= rungs
    assert ("fused" in rungs) == (name == "ladder-glm-5.2-rank-fp8")


def test_the_glm_ladder_ends_in_one_launch_a_step_with_and_without_running_ahead_and_collectives() -> None:
    variants = {variant.name: variant for variant in load_scenario("ladder-glm-5.2-rank").variants()}
    names = ("persistent", "persistent-ahead", "persistent-alone")
    assert {variants[name].engine.rung for name in names} == {"persistent"}
    assert [variants[name].engine.run_ahead for name in names] == [False, True, False]
    assert [variants[name].engine.collective_us for name in names] == [8.0, 8.0, 0.0]
    assert {variants[name].drafter.width for name in names} == {1}


def test_the_slope_covers_widths_up_to_16_launched_and_up_to_8_in_one_launch() -> None:
    variants = load_scenario("slope-gpt-oss-20b").variants()
    widths: dict[tuple[str, str], list[int]] = {}
    for variant in variants:
        widths.setdefault((variant.engine.rung, variant.model.routing), []).append(variant.drafter.width)
    assert widths == {("splitk", "uniform"): [1, 2, 4, 8, 16], ("persistent", "router"): [1, 2, 4, 8]}

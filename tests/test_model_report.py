"""What `workbench model show` prints and writes as JSON."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from workbench.decode.bytes import draft_bytes, step_bytes
from workbench.decode.precision import load_policy, policy_names
from workbench.decode.presets import load_preset, preset_names
from workbench.errors import InputError
from workbench.hardware import hardware_names
from workbench.model_report import COLUMNS, SCHEMA, model_report

# Stable within the schema: readers rely on them.
KEYS = {
    "schema",
    "model",
    "source",
    "policy",
    "tp",
    "width",
    "batch",
    "context",
    "drafter",
    "hardware",
    "totals",
    "rows",
}
TOTALS = {
    "params",
    "active_params",
    "stored_bytes",
    "resident_bytes_per_rank",
    "read_bytes_per_rank",
    "read_bytes_per_rank_per_token",
    "weight_read_bytes_per_rank",
    "cache_read_bytes_per_rank",
    "replicated_read_bytes_per_rank",
    "replicated_weight_tax",
    "flops_per_rank",
    "floor_ms_datasheet",
    "floor_ms_practical",
    "compute_ms_bf16",
    "resident_share",
}
ROW = {
    "name",
    "tensor_class",
    "part",
    "format",
    "placement",
    "parts",
    "params",
    "active_params",
    "stored_bytes",
    "resident_bytes_per_rank",
    "read_bytes_per_rank",
    "read_share",
    "written_bytes_per_rank",
    "flops_per_rank",
}


def test_json_of_glm_5_2_on_eight_ranks() -> None:
    found = json.loads(json.dumps(model_report("glm-5.2", tp=8).to_json()))
    read = found["totals"]["read_bytes_per_rank"]
    assert read["value"] == pytest.approx(6.65e9, rel=5e-3)
    assert (read["unit"], read["tag"]) == ("B", "modelled")
    assert (found["policy"], found["width"]) == ("fp8", 1)
    assert found["totals"]["read_bytes_per_rank_per_token"]["value"] == read["value"]


@pytest.mark.parametrize("name", preset_names())
def test_json_keys_are_stable(name: str) -> None:
    found = model_report(name, context=100).to_json()
    assert set(found) == KEYS
    assert found["schema"] == SCHEMA
    optional = {"distinct_experts_per_layer"} if load_preset(name).moe else set()
    assert set(found["totals"]) == TOTALS | optional
    assert all(set(row) == ROW for row in found["rows"])
    assert sum(row["read_bytes_per_rank"] for row in found["rows"]) == pytest.approx(
        found["totals"]["read_bytes_per_rank"]["value"]
    )
    assert sum(row["read_share"] for row in found["rows"]) == pytest.approx(1)


# GLM-5.2 FP8 on 8 ranks at 4.8 TB/s: the H200 row of the published floors
@pytest.mark.parametrize(("width", "expected"), [(1, 1.39), (2, 1.96), (4, 3.05), (6, 4.07), (8, 5.03)])
def test_floor_of_glm_5_2_on_h200(width: int, expected: float) -> None:
    totals = model_report("glm-5.2", tp=8, width=width).totals()
    assert totals["floor_ms_datasheet"].value == pytest.approx(expected, rel=4e-3)
    assert totals["floor_ms_practical"].value == pytest.approx(expected / 0.8, rel=4e-3)


def test_floor_of_glm_5_2_at_8_tb_per_s() -> None:
    totals = model_report("glm-5.2", tp=8, hardware="gb300").totals()
    assert totals["floor_ms_datasheet"].value == pytest.approx(0.83, rel=4e-3)


@pytest.mark.parametrize(
    ("name", "floors"),
    [
        ("gpt-oss-20b", {1: 0.77, 2: 1.00, 4: 1.38, 8: 1.90, 16: 2.37}),
        ("gpt-oss-120b", {1: 1.04, 2: 1.43, 4: 2.16, 8: 3.49, 16: 5.70}),
        ("qwen3-30b-a3b", {1: 1.27, 2: 1.98, 4: 3.26, 8: 5.38, 16: 8.29}),
    ],
)
def test_floors_on_one_h200(name: str, floors: dict[int, float]) -> None:
    for width, expected in floors.items():
        floor = model_report(name, width=width).totals()["floor_ms_datasheet"]
        assert floor.value == pytest.approx(expected, abs=0.01)
        assert floor.tag == "modelled"


def test_glm_5_2_with_its_mtp_module_has_753_billion_parameters() -> None:
    report = model_report("glm-5.2", tp=8, width=6, drafter="mtp")
    assert report.draft is not None
    assert (report.target.params + report.draft.params) / 1e9 == pytest.approx(753, abs=0.5)


def test_a_drafter_raises_the_floor_by_its_own_bytes() -> None:
    plain, drafted = (model_report("nano", width=8, drafter=drafter) for drafter in ("none", "dflash"))
    assert drafted.draft is not None
    spec = load_preset("nano")
    own = draft_bytes(spec, load_policy(spec.shipped), drafter="dflash", drafts=7).read_bytes
    assert drafted.read_bytes - plain.read_bytes == pytest.approx(own)
    assert drafted.totals()["floor_ms_datasheet"].value > plain.totals()["floor_ms_datasheet"].value
    assert drafted.to_json()["drafter"] == "dflash"
    assert drafted.totals()["read_bytes_per_rank"].value == plain.totals()["read_bytes_per_rank"].value


@pytest.mark.parametrize("name", preset_names())
def test_rows_fit_the_columns_and_add_up(name: str) -> None:
    report = model_report(name, width=4, context=500)
    rows = report.rows()
    assert all(len(row) == len(COLUMNS) for row in rows)
    *body, total = rows
    read = COLUMNS.index("read GB")
    assert sum(float(row[read]) for row in body) == pytest.approx(float(total[read]), abs=1e-4 * len(body))
    sizes = [float(row[read]) for row in body]
    assert all(a >= b for a, b in pairwise(sizes))


def test_table_leaves_out_empty_caches() -> None:
    cached, empty = ([row[0] for row in model_report("gpt-oss-20b", context=context).rows()] for context in (4096, 0))
    assert "KV cache, full" in cached
    assert not any("cache" in name for name in empty)


def test_summary_tags_every_number() -> None:
    lines = model_report("glm-5.2", tp=8, width=6, drafter="mtp").summary()
    assert all(text.endswith("(modelled)") for label, text in lines if label != "model")
    text = dict(lines)
    assert text["replicated-weight tax"].startswith("8.2%")
    assert text["distinct experts"].startswith("44.4 a layer of 256")
    assert "80% of the datasheet" in text["floor, practical"]


def test_measured_expert_counts_change_the_tag() -> None:
    counts = [3.0] * 8
    report = model_report("nano", width=4, distinct_experts=counts)
    assert report.totals()["read_bytes_per_rank"].tag == "estimated"
    spec = load_preset("nano")
    assert report.target == step_bytes(spec, load_policy(spec.shipped), width=4, distinct_experts=counts)
    assert "measured counts" in dict(report.summary())["distinct experts"]


@pytest.mark.parametrize("hardware", hardware_names())
def test_every_device_gives_a_floor(hardware: str) -> None:
    totals = model_report("qwen3-8b", hardware=hardware).totals()
    assert 0 < totals["compute_ms_bf16"].value < totals["floor_ms_datasheet"].value < totals["floor_ms_practical"].value


def test_names_that_are_not_known_are_refused() -> None:
    with pytest.raises(InputError, match="model 'x'"):
        model_report("x")
    with pytest.raises(InputError, match="precision 'x'"):
        model_report("nano", policy="x")
    with pytest.raises(InputError, match="hardware 'x'"):
        model_report("nano", hardware="x")
    with pytest.raises(InputError, match="no dflash"):
        model_report("glm-5.2", drafter="dflash")


def test_reference_page_names_every_key() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "byte-model.md").read_text(encoding="utf-8")
    optional = {"distinct_experts_per_layer", "draft_params", "draft_read_bytes_per_rank"}
    missing = [key for key in (KEYS - {"schema"}) | TOTALS | ROW | optional if f"`{key}`" not in page]
    assert missing == []
    assert SCHEMA in page
    assert all(f"`{policy}`" in page for policy in policy_names())

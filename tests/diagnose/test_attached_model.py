"""The byte model of a watched server's step: a point for one token, an interval for more, and what lies outside it."""

from dataclasses import replace
from pathlib import Path

import pytest

from workbench.commands.demo import recorded_folder
from workbench.decode.bytes import distinct_experts
from workbench.diagnose.attached import Attached, attached
from workbench.diagnose.attached_findings import find
from workbench.diagnose.attached_model import StepModel, step_model
from workbench.ingest.byte_model import Model, routing, tensor_rows
from workbench.ingest.steps import FoundStep
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord


def model_of(folder: Path, model: Model, width: int, batch: int = 1, *, recorded: bool = True) -> StepModel:
    named = {"name": model.name} | (routing(model) if recorded else {})
    settings = {"model": named, "attach": {"given": {"batch": batch}}}
    manifest = Manifest(source="attach", variants=[VariantRecord(name="attached", settings=settings)])
    step = FoundStep(0, 0, 0, 0, width=width, batch=batch, context=300)
    with BundleWriter.create(folder, manifest) as writer:
        writer.append("tensors", [{"variant": "attached"} | row for row in tensor_rows(model, [step])])
    with Bundle.open(folder) as bundle:
        found = step_model(bundle)
    assert found is not None
    return found


@pytest.mark.parametrize(("tp", "batch"), [(1, 1), (1, 4), (4, 2)])
def test_the_least_is_what_one_token_of_each_sequence_reads(tmp_path: Path, tp: int, batch: int) -> None:
    model = Model("qwen3-30b-a3b", tp, "bf16")
    one, eight = (model_of(tmp_path / str(width), model, width, batch) for width in (1, 8))
    assert one.bytes.low == one.bytes.high == one.bytes.value
    assert eight.bytes.high == eight.bytes.value > one.bytes.value
    assert eight.bytes.low == pytest.approx(one.bytes.value, rel=1e-3)  # KV and embedding of seven more tokens
    assert one.distinct(one.bytes) is None


def test_bytes_tell_how_many_experts_were_read(tmp_path: Path) -> None:
    found = model_of(tmp_path / "b", Model("qwen3-30b-a3b", 1, "bf16"), 8)
    assert found.experts == 128
    assert found.bytes.low is not None
    for value, count in ((found.bytes.low, 8.0), (found.bytes.value, distinct_experts(128, 8, 8))):
        experts = found.distinct(Quantity(value, "B", "measured"))
        assert experts is not None
        assert (experts.value, experts.tag) == (pytest.approx(count, rel=1e-3), "estimated")
        assert "of 128 a layer" in experts.note
    assert found.distinct(Quantity(0.5 * found.dense, "B", "measured")) is None
    assert found.distinct(Quantity(10 * found.bytes.value, "B", "measured")) is None


def test_where_routing_was_not_recorded_the_shape_of_that_name_says_it(tmp_path: Path) -> None:
    model = Model("gpt-oss-20b")
    assert model_of(tmp_path / "a", model, 4, recorded=False).experts == 32
    assert routing(model) == {"experts": 32, "top_k": 4}
    settings = {"model": {"name": "no-such-shape"}}
    manifest = Manifest(source="attach", variants=[VariantRecord(name="attached", settings=settings)])
    with BundleWriter.create(tmp_path / "c", manifest) as writer:
        rows = tensor_rows(model, [FoundStep(0, 0, 0, 0, width=4, batch=1, context=0)])
        writer.append("tensors", [{"variant": "attached"} | row for row in rows])
    with Bundle.open(tmp_path / "c") as bundle:
        found = step_model(bundle)
    assert found is not None
    assert found.experts is None
    assert found.bytes.low is not None
    assert found.bytes.low < found.bytes.value  # the interval needs no shape


@pytest.fixture(scope="module")
def block() -> Attached:
    with Bundle.open(recorded_folder() / "attach-sglang-qwen3-30b-dflash-h200") as bundle:
        return attached(bundle)


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [
        (5.0, "byte-model-mismatch"),
        (6.0, None),
        (6.2, None),
        (16.0, None),
        (25.8, None),
        (27.0, None),
        (30.0, "over-fetch"),
    ],
)
def test_bytes_within_the_interval_are_no_finding(block: Attached, gigabytes: float, expected: str | None) -> None:
    seen = replace(block, bytes_per_step=Quantity(gigabytes * 1e9, "B", "measured"))
    found = {finding.id: finding for finding in find(seen)}
    assert {"byte-model-mismatch", "over-fetch"} & set(found) == ({expected} if expected else set())
    if expected == "over-fetch":
        assert "at most 25.9 GB (16 % more)" in found[expected].sentence
    elif expected:
        assert "18 % less than the least" in found[expected].sentence

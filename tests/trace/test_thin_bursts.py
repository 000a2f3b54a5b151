"""A watched server's bundle made small: every figure stays, whatever its bursts hold."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from workbench.diagnose.attached import Attached, attached
from workbench.errors import InputError
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.bursts import bursts
from workbench.trace.manifest import Manifest, VariantRecord
from workbench.trace.thin import Choice, thin

STEP_NS = 3_470_000
SAMPLE_NS = 10_000
SAMPLES = 30_000


def write(folder: Path, *, hole: bool = False) -> Path:
    """Write a bundle of three bursts: one that begins with a pause, two that decode, samples of 0 between kernels."""
    random = np.random.default_rng(3)
    tables = []
    spans = []
    for burst in range(3):
        start = burst * 2_300_000_000 + np.arange(SAMPLES, dtype=np.int64) * SAMPLE_NS
        spans.append([int(start[0]), int(start[-1]) + SAMPLE_NS])
        phase = start % STEP_NS / STEP_NS
        moving = (phase < 0.62) & (random.random(SAMPLES) < 0.9) & (start - start[0] > (1.2e8 if burst == 0 else 0))
        read = np.where(moving, 18e6 * (1 + 0.1 * random.standard_normal(SAMPLES)), 2e3)
        values = {
            ("dram_read_bytes", "B"): read,
            ("dram_write_bytes", "B"): np.where(moving, 1e5, 0.0),
            ("sm_active", "share"): np.where(moving, random.random(SAMPLES), 0.0),
            ("ctas_per_sm", "CTAs/SM"): np.where(moving, 10 * random.random(SAMPLES), 0.0),
            ("warps_active", "share"): np.where(phase < 0.9, 0.1 * random.random(SAMPLES), 0.0),
        }
        keep = np.ones(SAMPLES, bool)
        if hole and burst == 1:
            keep[20_000:25_000] = False
        for (name, unit), value in values.items():
            columns = {"start_ns": start[keep], "end_ns": start[keep] + SAMPLE_NS, "value": value[keep]}
            texts = {"variant": "attached", "source": "pm_sampler", "name": name, "unit": unit}
            tables.append(pa.table({key: [text] * int(keep.sum()) for key, text in texts.items()} | columns))
    given = {"tok_s": 1e9 / STEP_NS, "accept_length": 1.0, "batch": 1}
    settings = {"attach": {"start_ns": 0, "end_ns": 5_000_000_000, "bursts": spans, "given": given}}
    manifest = Manifest(
        source="attach",
        command=["workbench", "attach", "-o", "/home/someone/runs/it"],
        device={"name": "NVIDIA H200"},
        variants=[VariantRecord(name="attached", settings=settings)],
    )
    roof = {"device": "H200", "name": "datasheet", "bytes_per_s": 4_800_000_000_000, "tag": "modelled", "note": "n"}
    power = {"variant": "attached", "source": "nvml", "name": "power", "unit": "W", "device": 0}
    with BundleWriter.create(folder, manifest) as writer:
        for table in tables:
            writer.append_table("counters", table)
        writer.append("counters", [power | {"start_ns": at, "end_ns": at, "value": 300.0 + at % 7} for at in range(50)])
        writer.append("roofs", [roof])
    return folder


def seen(folder: Path) -> Attached:
    with Bundle.open(folder) as bundle:
        return attached(bundle)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("attached") / "b")


def test_every_figure_stays_within_half_a_percent(source: Path, tmp_path: Path) -> None:
    with Bundle.open(source) as bundle:
        thin(bundle, tmp_path / "thin", Choice())
    before, after = seen(source), seen(tmp_path / "thin")
    names = [name for name in Attached.__dataclass_fields__ if isinstance(getattr(before, name), Quantity)]
    assert {"idle", "ctas_per_sm", "warps_active", "decoding", "bytes_per_step", "power", "period"} <= set(names)
    for name in names:
        assert getattr(after, name).value == pytest.approx(getattr(before, name).value, rel=0.005), name
    for name in ("traffic", "idle", "ctas_per_sm", "warps_active", "sm_active", "sampled"):  # sums: exact
        assert getattr(after, name).value == pytest.approx(getattr(before, name).value, rel=1e-9), name
    assert [one.id for one in after.findings] == [one.id for one in before.findings]
    assert {check.id for check in after.verdict.checks} == {"watched-from-outside", "counter-bursts"}
    files = [folder / "counters.parquet" for folder in (source, tmp_path / "thin")]
    assert files[1].stat().st_size < 0.35 * files[0].stat().st_size
    with Bundle.open(tmp_path / "thin") as bundle:
        assert "100 ms of one burst" in bundle.manifest.notes[-1]
        assert bundle.manifest.command[-1] == "it"


def test_what_stays_as_it_was_sampled_decodes(source: Path, tmp_path: Path) -> None:
    with Bundle.open(source) as bundle:
        thin(bundle, tmp_path / "thin", Choice(burst_ms=60, bin_us=2000))
    with Bundle.open(tmp_path / "thin") as bundle:
        sql = (
            "SELECT min(start_ns) AS first, count(*) AS n FROM counters "
            "WHERE name = 'dram_read_bytes' AND end_ns - start_ns = ?"
        )
        row = bundle.query(sql, [SAMPLE_NS]).to_pylist()[0]
    assert row["n"] == pytest.approx(6000, abs=2)
    assert row["first"] > 0.1e9  # not the pause at the start


def test_the_same_source_gives_the_same_bytes_and_what_is_thin_is_refused(source: Path, tmp_path: Path) -> None:
    with Bundle.open(source) as bundle:
        thin(bundle, tmp_path / "one", Choice())
        thin(bundle, tmp_path / "two", Choice())
    one, two = ((tmp_path / name / "counters.parquet").read_bytes() for name in ("one", "two"))
    assert one == two
    with Bundle.open(tmp_path / "one") as bundle, pytest.raises(InputError, match="thinned already"):
        thin(bundle, tmp_path / "three", Choice())


def test_a_hole_within_a_burst_is_a_gap_and_a_pause_is_none(source: Path, tmp_path: Path) -> None:
    assert not any(check.id == "counter-gap" for check in seen(source).verdict.checks)
    gaps = [check for check in seen(write(tmp_path / "b", hole=True)).verdict.checks if check.id == "counter-gap"]
    assert [check.count for check in gaps] == [5]
    assert "50" in gaps[0].message
    with Bundle.open(tmp_path / "b") as bundle:
        found = bursts(bundle)
    assert found is not None
    assert len(found.spans) == found.expected == 3

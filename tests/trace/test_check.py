import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.trace import salvage as salvage_module
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.check import check_bundle
from workbench.trace.manifest import Manifest, VariantRecord, read_manifest

Rows = list[dict[str, object]]

WRITER = """
import sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
import conftest
from workbench.trace import writer as module
from workbench.trace.bundle import BundleWriter
from workbench.trace.manifest import Manifest, VariantRecord

def reached(stage):
    print(stage, flush=True)
    if stage == {stage!r}:
        time.sleep(60)

seal_table = module.seal_table
def slow_seal(folder, name, batches):
    record = seal_table(folder, name, batches)
    reached("sealed-" + name)
    return record
module.seal_table = slow_seal

variants = [VariantRecord(name="mtp"), VariantRecord(name="dflash")]
writer = BundleWriter.create(Path("bundle"), Manifest(scenario={{"name": "killed"}}, variants=variants))
reached("created")
with writer:
    writer.append("steps", [conftest._step(i) for i in range(6)])
    writer.append("sequences", [conftest._sequence(0)])
    writer.flush()
    reached("flushed")
    writer.append("steps", [conftest._step(i) for i in range(6, 8)])
    reached("unflushed")
reached("done")
"""


def killed(folder: Path, stage: str) -> Path:
    """Return a bundle whose writer was killed with SIGKILL at ``stage``."""
    here = Path(__file__).parent
    script = WRITER.format(root=str(here.parents[1]), here=str(here), stage=stage)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for line in process.stdout:
        if line.strip() == stage:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return folder / "bundle"


@pytest.mark.parametrize(
    ("stage", "steps", "sequences", "cut"),
    [
        ("created", 0, 0, False),
        ("flushed", 6, 1, True),
        ("unflushed", 6, 1, True),
        ("sealed-sequences", 8, 1, False),
        ("sealed-steps", 8, 1, False),
    ],
)
def test_a_killed_writer_leaves_what_it_flushed(
    tmp_path: Path, stage: str, steps: int, sequences: int, cut: bool
) -> None:
    path = killed(tmp_path, stage)
    with pytest.raises(InputError, match="--salvage"):
        Bundle.open(path)

    before = check_bundle(path)
    assert (before.state_before, before.state_after, before.ok) == ("open", "open", False)
    assert "its writer is gone" in before.problems[0]
    assert read_manifest(path).state == "open"

    report = check_bundle(path, salvage=True)
    assert (report.state_before, report.state_after, report.ok) == ("open", "salvaged", True), report.problems
    assert "variant 'dflash': no steps" in report.missing
    bundle = Bundle.open(path)
    assert bundle.manifest.scenario == {"name": "killed"}
    assert bundle.table("steps")["step_id"].to_pylist() == list(range(steps))
    assert bundle.table("sequences").num_rows == sequences
    losses = bundle.table("losses").to_pylist()
    assert bool(losses) == cut
    if cut:
        assert {row["severity"] for row in losses} == {"data_loss"}
        assert [row["first_ns"] for row in losses if row["detail"].startswith("steps")] == [5900]
        assert any(line.startswith("steps: rows after 5900 ns") for line in report.missing)
    if steps:
        assert f"sequence 1 of 'mtp': cut after {steps - 4} steps" in report.missing
    assert not (path / "spool").exists()
    assert not (path / "lock").exists()
    assert not (path / "reserve").exists()

    again = check_bundle(path, salvage=True)
    assert (again.state_before, again.ok, again.missing) == ("salvaged", True, report.missing)


def test_a_live_writer_is_not_salvaged(tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]) -> None:
    writer = BundleWriter.create(tmp_path / "b", manifest)
    writer.append("steps", step_rows(4))
    writer.flush()
    with pytest.raises(InputError, match="being written by process"):
        check_bundle(tmp_path / "b", salvage=True)
    report = check_bundle(tmp_path / "b")
    assert (report.tables[0].rows, report.tables[0].source) == (4, "spool")
    assert "it is being written" in report.problems[0]
    writer.seal()
    assert check_bundle(tmp_path / "b").ok


def test_a_sealed_bundle_is_whole(sealed: Path) -> None:
    report = check_bundle(sealed, salvage=True)
    assert report.ok
    assert (report.state_before, report.state_after, report.missing) == ("sealed", "sealed", [])
    assert [(t.name, t.rows, t.last_ns) for t in report.tables] == [("steps", 8, 7900), ("sequences", 2, 3900)]
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    assert report.to_json()["ok"] is True


def test_damage_is_found_and_named(sealed: Path) -> None:
    whole = (sealed / "steps.parquet").read_bytes()
    for at in (0, 10, len(whole) // 2, len(whole) - 10):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        (sealed / "steps.parquet").write_bytes(damaged)
        report = check_bundle(sealed, salvage=True)
        assert not report.ok
        assert any("steps.parquet: damaged" in line for line in report.problems)
    (sealed / "steps.parquet").unlink()
    (sealed / "stray.parquet").write_bytes(whole)
    report = check_bundle(sealed)
    assert any("steps.parquet: missing" in line for line in report.problems)
    assert any("stray.parquet: no table of this name" in line for line in report.problems)
    assert "steps: 8 of 8 rows" in report.missing


def test_broken_rules_of_a_table_are_found(tmp_path: Path, manifest: Manifest, step_rows: Callable[..., Rows]) -> None:
    with BundleWriter.create(tmp_path / "b", manifest) as writer:
        writer.append("steps", step_rows(2))
        writer.append("steps", step_rows(1))
    report = check_bundle(tmp_path / "b")
    assert report.problems == ["steps: 1 rows repeat the key step_id"]


@pytest.mark.parametrize("garbage", [None, b"", b"{]", b"\0" * 1000, b'{"schema_version": 1, "state": "lost"}'])
def test_a_lost_manifest_does_not_lose_the_tables(sealed: Path, garbage: bytes | None) -> None:
    path = sealed / "manifest.json"
    path.unlink() if garbage is None else path.write_bytes(garbage)
    before = check_bundle(sealed)
    assert (before.state_before, before.ok) == ("unknown", False)
    assert "manifest.json" in before.problems[0]
    report = check_bundle(sealed, salvage=True)
    assert (report.state_after, report.ok) == ("salvaged", True), report.problems
    assert report.missing == ["manifest: scenario, device and environment of the run"]
    bundle = Bundle.open(sealed)
    assert bundle.table("steps").num_rows == 8
    assert bundle.manifest.variants == [VariantRecord(name="mtp")]
    assert bundle.manifest.notes == ["the manifest was lost"]
    if garbage is not None:
        assert (sealed / "manifest.json.damaged").read_bytes() == garbage


def test_a_newer_version_is_left_alone(sealed: Path) -> None:
    path = sealed / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    before = path.read_bytes()
    with pytest.raises(InputError, match="upgrade"):
        check_bundle(sealed, salvage=True)
    assert path.read_bytes() == before


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / "manifest.json").write_text("x")
    for name in ("none", "empty", "garbage"):
        with pytest.raises(InputError, match="nothing to salvage") as caught:
            check_bundle(tmp_path / name, salvage=True)
        assert len(str(caught.value).splitlines()) == 1


def test_a_linked_spool_folder_is_refused(tmp_path: Path) -> None:
    path = killed(tmp_path, "flushed")
    (path / "spool").rename(tmp_path / "elsewhere")
    (path / "spool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link"):
        check_bundle(path, salvage=True)
    assert sorted(entry.name for entry in (tmp_path / "elsewhere").iterdir()) == ["sequences.arrows", "steps.arrows"]


@pytest.fixture(scope="module")
def cut_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed(tmp_path_factory.mktemp("cut"), "unflushed")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.data())
def test_a_spool_cut_anywhere_is_salvaged(tmp_path: Path, cut_bundle: Path, data: st.DataObject) -> None:
    path = tmp_path / "b"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(cut_bundle, path)
    spool = path / "spool" / "steps.arrows"
    whole = spool.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    spool.write_bytes(whole[:cut])
    report = check_bundle(path, salvage=True)
    assert report.ok, report.problems
    steps = next(table for table in report.tables if table.name == "steps")
    assert steps.rows == (6 if cut == len(whole) else 0)
    assert Bundle.open(path).table("steps").num_rows == steps.rows
    assert any(line.startswith("steps: rows") for line in report.missing)


def test_a_salvage_that_was_cut_off_can_be_repeated(
    tmp_path: Path, cut_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(cut_bundle, whole)
    expected = check_bundle(whole, salvage=True)
    for moment in ("write_manifest", "spools"):
        path = tmp_path / moment
        shutil.copytree(cut_bundle, path)
        with monkeypatch.context() as patched:
            patched.setattr(salvage_module, moment, _interrupt)
            with pytest.raises(KeyboardInterrupt):
                check_bundle(path, salvage=True)
        report = check_bundle(path, salvage=True)
        assert report.ok, report.problems
        assert report.missing == expected.missing
        assert Bundle.open(path).table("losses").equals(Bundle.open(whole).table("losses"))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_steps_of_no_known_sequence_are_not_reported_as_cut(tmp_path: Path, manifest: Manifest) -> None:
    path = tmp_path / "foreign"
    row = {"variant": "mtp", "run_pass": "traced", "step_id": 0, "index": 0, "warmup": False}
    with BundleWriter.create(path, manifest) as writer:
        writer.append("steps", [{**row, "start_ns": 1, "draft_end_ns": 1, "forward_end_ns": 9, "end_ns": 9}])
    report = check_bundle(path)
    assert report.ok
    assert report.missing == []


def test_a_byte_model_that_was_never_written_is_computed_from_the_steps(tmp_path: Path) -> None:
    from workbench.runner import run_scenario
    from workbench.scenario import load_scenario

    scenario = load_scenario(
        "quickstart", overrides=["prompts.new_tokens=8", "prompts.count=1", "measure.traced_steps=0"]
    )
    whole = run_scenario(scenario, tmp_path / "whole")
    with Bundle.open(whole) as bundle:
        wanted = bundle.table("tensors").to_pylist()
        cut = tmp_path / "cut"
        with BundleWriter.create(cut, bundle.manifest) as writer:
            for name in ("steps", "sequences", "roofs"):
                writer.append_table(name, bundle.table(name))
    assert wanted
    manifest = read_manifest(cut)
    text = json.loads((cut / "manifest.json").read_text())
    assert "tensors" not in manifest.tables
    (cut / "manifest.json").write_text(json.dumps(text | {"state": "salvaged"}))
    assert check_bundle(cut, salvage=True).ok
    with Bundle.open(cut) as bundle:
        assert bundle.table("tensors").to_pylist() == wanted
        (note,) = [note for note in bundle.manifest.notes if "byte model" in note]
        assert "computed from the recorded clean steps" in note
    assert check_bundle(cut, salvage=True).ok
    assert [note for note in read_manifest(cut).notes if "byte model" in note] == [note]

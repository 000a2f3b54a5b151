from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.commands.demo import recorded_folder
from workbench.diagnose.facts import Facts
from workbench.errors import InputError
from workbench.trace.bundle import Bundle, BundleWriter
from workbench.trace.check import check_bundle
from workbench.trace.manifest import Manifest, VariantRecord
from workbench.trace.merge_samples import merge_samples
from workbench.trace.rows import conform
from workbench.trace.thin import Choice, thin
from workbench.trace.validity import verdict

SOURCE = recorded_folder() / "gpt-oss-20b-h200"


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with Bundle.open(SOURCE) as source:
        return thin(source, tmp_path_factory.mktemp("thin") / "out", Choice(traced=3, sampled=4, lanes=1, bin_us=50))


def count(bundle: Bundle, sql: str) -> Any:
    return bundle.query(sql).to_pylist()


def test_clean_steps_stay_and_others_are_the_first_after_warm_up(thinned: Path) -> None:
    counts = "SELECT variant, run_pass, count(*) AS n FROM steps GROUP BY ALL ORDER BY ALL"
    with Bundle.open(SOURCE) as source, Bundle.open(thinned) as out:
        before = {(row["variant"], row["run_pass"]): row["n"] for row in count(source, counts)}
        after = {(row["variant"], row["run_pass"]): row["n"] for row in count(out, counts)}
        wanted = {"traced": 3, "sampled": 4, "laned": 1}
        assert after == {key: n if key[1] == "clean" else wanted[key[1]] for key, n in before.items()}
        first = "SELECT step_id FROM steps WHERE run_pass = 'traced' AND variant = 'splitk' ORDER BY start_ns LIMIT 3"
        assert count(out, first) == count(source, first)
        assert count(out, "SELECT count(*) AS n FROM steps WHERE run_pass <> 'clean' AND warmup") == [{"n": 0}]


def test_a_variant_that_is_left_out_leaves_nothing_behind(tmp_path: Path) -> None:
    with Bundle.open(SOURCE) as source:
        before = source.manifest
        path = thin(source, tmp_path / "out", Choice(1, 1, 1, drop=("host", "syncs"), only=("splitk", "persistent")))
        with pytest.raises(InputError, match=r"--only graphs: no such variant; one of graph, splitk"):
            thin(source, tmp_path / "other", Choice(only=("graphs",)))
    with Bundle.open(path) as out:
        manifest = out.manifest
        assert [one.name for one in manifest.variants] == ["splitk", "persistent"]
        assert {cost.variant for cost in manifest.perturbation} == {"splitk", "persistent"}
        assert {cost.variant for cost in before.perturbation} > {"graph"}
        names = [one.name for one in manifest.clock.sources]
        assert any(name.endswith(": splitk") for name in names)
        assert not any(name.endswith((": graph", ": splitk-8")) for name in names)
        assert count(out, "SELECT DISTINCT variant FROM counters ORDER BY ALL") == [
            {"variant": "persistent"},
            {"variant": "splitk"},
        ]
        assert "variants left out: graph, splitk-8" in manifest.notes[-1]


def test_kept_steps_have_all_their_rows(thinned: Path) -> None:
    with Bundle.open(SOURCE) as source, Bundle.open(thinned) as out:
        kept = [row["step_id"] for row in count(out, "SELECT step_id FROM steps")]
        for table in ("kernels", "host", "syncs"):
            sql = f"SELECT count(*) AS n FROM {table} WHERE list_contains(?, step_id)"  # noqa: S608
            assert out.query(sql, [kept]).to_pylist() == source.query(sql, [kept]).to_pylist()
            assert out.rows(table) < source.rows(table)
        lanes = "SELECT count(DISTINCT kernel_id) AS n FROM lanes"
        assert count(out, lanes) == [{"n": 1}]


def test_ids_and_parents_hold_and_no_launch_loses_its_kernel(thinned: Path) -> None:
    assert check_bundle(thinned).ok
    with Bundle.open(thinned) as out:
        orphans = (
            "SELECT count(*) AS n FROM host WHERE parent_id IS NOT NULL AND parent_id NOT IN (SELECT host_id FROM host)"
        )
        assert count(out, orphans) == [{"n": 0}]
        assert count(out, orphans.replace("parent_id", "host_id").replace("FROM host WHERE", "FROM syncs WHERE")) == [
            {"n": 0}
        ]
        for table in ("kernels", "host", "syncs"):
            sql = f"SELECT count(*) AS n FROM {table} WHERE step_id NOT IN (SELECT step_id FROM steps)"  # noqa: S608
            assert count(out, sql) == [{"n": 0}]
        found = {check.id for check in verdict(out).checks}
        assert not found & {"launch-without-kernel", "missing-graph-nodes", "counter-gap", "kernel-without-launch"}


def test_the_diagnosis_is_that_of_the_source(thinned: Path) -> None:
    with Bundle.open(SOURCE) as source, Bundle.open(thinned) as out:
        before, after = Facts(source, "splitk").accounting, Facts(out, "splitk").accounting
        assert after.wall_ns == before.wall_ns
        shares = {cause.name: before.share(cause) for cause in before.causes}
        assert {cause.name: after.share(cause) for cause in after.causes} == pytest.approx(shares, abs=0.02)


def test_the_last_gap_of_a_kept_step_keeps_its_cause(tmp_path: Path) -> None:
    """The kernel that ends it may begin long after: here a traced step is followed by a pause of 3 ms."""
    with Bundle.open(recorded_folder() / "ladder-gpt-oss-120b-h200") as source:
        path = thin(source, tmp_path / "out", Choice(traced=1))
        with Bundle.open(path) as out:
            for name in ("splitk-overlap", "splitk-4", "splitk-8"):
                before, after = ({c.name: c.total_ns for c in Facts(b, name).accounting.causes} for b in (source, out))
                assert after["verify-and-sampling"] >= 0.8 * before["verify-and-sampling"], name
                assert after.get("unexplained", 0) <= 0.0005 * sum(before.values()), name


def test_of_each_counter_set_the_first_steps_stay(tmp_path: Path) -> None:
    """Sets follow on each other, each over steps of its own: the pass's first steps would be of one alone."""
    with BundleWriter.create(tmp_path / "source", Manifest(variants=[VariantRecord(name="v")])) as writer:
        for number, source in enumerate(("pm_sampler", "pm_sampler, stalls")):
            own = {"variant": "v", "source": source, "name": f"counter {number}", "unit": "B", "device": 0}
            for index in range(6):
                start = 1_000_000 * (10 * number + index + 1)
                marks = {"start_ns": start, "draft_end_ns": start, "forward_end_ns": start + 900_000}
                step = {"variant": "v", "run_pass": "sampled", "step_id": 10 * number + index, "index": index}
                writer.append("steps", [step | marks | {"end_ns": start + 900_000, "warmup": index == 0, "width": 1}])
                spans = [(start + at, start + at + 100_000) for at in range(0, 900_000, 100_000)]
                writer.append("counters", [own | {"start_ns": a, "end_ns": b, "value": 1.0} for a, b in spans])
    with Bundle.open(tmp_path / "source") as source_bundle:
        path = thin(source_bundle, tmp_path / "out", Choice(sampled=2))
    with Bundle.open(path) as out:
        assert [row["step_id"] for row in count(out, "SELECT step_id FROM steps ORDER BY step_id")] == [1, 2, 11, 12]
        counted = count(out, "SELECT source, count(*) AS n FROM counters GROUP BY source ORDER BY source")
        assert counted == [{"source": "pm_sampler", "n": 18}, {"source": "pm_sampler, stalls", "n": 18}]


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    with Bundle.open(SOURCE) as source:
        choice = Choice(traced=1, sampled=1, lanes=0, bin_us=100, drop=("host", "syncs"))
        one, two = (thin(source, tmp_path / name, choice) for name in ("one", "two"))
    files = sorted(path.name for path in one.iterdir())
    assert "host.parquet" not in files
    assert "lanes.parquet" not in files
    assert files == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in files)
    with Bundle.open(one) as out:
        assert "left out: host, syncs" in out.manifest.notes[-1]
        assert out.manifest.created == source.manifest.created


def test_folders_of_one_machine_are_left_out(tmp_path: Path) -> None:
    manifest = Manifest(variants=[VariantRecord(name="v")], command=["workbench", "run", "/home/someone/mine.toml"])
    times = {"start_ns": 0, "draft_end_ns": 0, "forward_end_ns": 10, "end_ns": 10}
    with BundleWriter.create(tmp_path / "source", manifest) as writer:
        step = {"variant": "v", "run_pass": "traced", "step_id": 0, "index": 0, "warmup": False, **times}
        writer.append("steps", [step])
        row = {"variant": "v", "thread": 1, "start_ns": 1, "end_ns": 2}
        names = ("/home/someone/engine.py(12): step", "C:\\a\\b.py(3): f", "engine.py(12): step")
        writer.append(
            "host", [{**row, "host_id": at, "name": name, "category": "python"} for at, name in enumerate(names)]
        )
        writer.append("host", [{**row, "host_id": 9, "name": "a/b", "category": "op"}])
        writer.append("env", [{"key": "model", "value": "/home/someone/weights"}, {"key": "dtype", "value": "a/b"}])
    with Bundle.open(tmp_path / "source") as source:
        path = thin(source, tmp_path / "out", Choice())
    with Bundle.open(path) as out:
        assert out.manifest.command[-1] == "mine.toml"
        assert out.table("env")["value"].to_pylist() == ["weights", "a/b"]
        assert out.table("host")["name"].to_pylist() == [
            "engine.py(12): step",
            "b.py(3): f",
            "engine.py(12): step",
            "a/b",
        ]


@pytest.mark.parametrize("choice", [Choice(traced=-1), Choice(drop=("steps",)), Choice(drop=("nothing",))])
def test_a_choice_that_makes_no_sense(tmp_path: Path, choice: Choice) -> None:
    with Bundle.open(SOURCE) as source, pytest.raises(InputError):
        thin(source, tmp_path / "out", choice)


def samples(values: list[float], unit: str, gaps: list[int]) -> pa.Table:
    rows, at = [], 1_000
    for value, gap in zip(values, gaps, strict=True):
        at += gap
        rows.append(
            {"source": "s", "name": "n", "device": 0, "start_ns": at, "end_ns": at + 100, "value": value, "unit": unit}
        )
        at += 100
    return conform("counters", pa.Table.from_pylist(rows))


pairs = st.lists(st.tuples(st.integers(0, 10**9), st.sampled_from([0, 0, 0, 2, 400])), min_size=1, max_size=60)


@given(pairs, st.sampled_from([0, 100, 250, 1000]))
def test_bytes_add_up_and_means_are_over_time(data: list[tuple[int, int]], bin_ns: int) -> None:
    values, gaps = [float(value) for value, _ in data], [gap for _, gap in data]
    for unit in ("B", "share"):
        before = samples(values, unit, gaps)
        after = merge_samples(before, bin_ns)
        length = np.array(after["end_ns"]) - np.array(after["start_ns"])
        assert after.num_rows <= before.num_rows
        assert (length <= bin_ns + 100).all()
        if unit == "B":
            assert sum(after["value"].to_pylist()) == sum(values)
        else:
            assert np.dot(after["value"], np.rint(length / 100)) == pytest.approx(sum(values))
        gap = np.array(after["start_ns"])[1:] - np.array(after["end_ns"])[:-1]
        assert (gap == 400).sum() == sum(one == 400 for one in gaps[1:])


def test_a_traced_pass_within_the_warm_up_keeps_all_but_its_first_step(tmp_path: Path) -> None:
    with BundleWriter.create(tmp_path / "source", Manifest(variants=[VariantRecord(name="v")])) as writer:
        for number in range(5):
            times = {"start_ns": number, "draft_end_ns": number, "forward_end_ns": number, "end_ns": number + 1}
            step = {"variant": "v", "run_pass": "traced", "step_id": number, "index": number, "warmup": True}
            writer.append("steps", [step | times])
    with Bundle.open(tmp_path / "source") as source:
        path = thin(source, tmp_path / "out", Choice(traced=3))
    with Bundle.open(path) as out:
        assert out.table("steps")["index"].to_pylist() == [1, 2, 3]

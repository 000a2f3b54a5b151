import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from workbench.commands.demo import recorded_folder
from workbench.trace.bundle import Bundle
from workbench.trace.check import check_bundle

SOURCE = str(recorded_folder() / "gpt-oss-20b-h200")


def test_variants_are_chosen_by_name(cli: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("thin", SOURCE, "-o", str(out), "--only", "persistent", "--traced-steps", "1").exit_code == 0
    assert check_bundle(out).ok
    with Bundle.open(out) as bundle:
        assert [record.name for record in bundle.manifest.variants] == ["persistent"]
        assert set(bundle.table("steps")["variant"].to_pylist()) == {"persistent"}
        assert set(bundle.table("tensors")["variant"].to_pylist()) == {"persistent"}
        assert bundle.rows("roofs")
        assert "splitk" in bundle.manifest.notes[-1]
    wrong = cli("thin", SOURCE, "-o", str(tmp_path / "wrong"), "--only", "nothing")
    assert wrong.exit_code == 2
    assert "no such variant" in wrong.stderr


def test_it_writes_a_bundle_and_nothing_over_it(cli: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("thin", SOURCE, "-o", str(out), "--traced-steps", "1", "--drop", "lanes", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["files"].keys() >= {"manifest", "steps", "kernels"}
    assert check_bundle(out).ok
    assert cli("thin", SOURCE, "-o", str(out)).exit_code == 2
    assert cli("thin", SOURCE, "-o", str(tmp_path / "other"), "--drop", "steps").exit_code == 2

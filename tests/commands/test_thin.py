import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from workbench.commands.demo import recorded_folder
from workbench.trace.check import check_bundle

SOURCE = str(recorded_folder() / "gpt-oss-20b-h200")


def test_it_writes_a_bundle_and_nothing_over_it(cli: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("thin", SOURCE, "-o", str(out), "--traced-steps", "1", "--drop", "lanes", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["files"].keys() >= {"manifest", "steps", "kernels"}
    assert check_bundle(out).ok
    assert cli("thin", SOURCE, "-o", str(out)).exit_code == 2
    assert cli("thin", SOURCE, "-o", str(tmp_path / "other"), "--drop", "steps").exit_code == 2

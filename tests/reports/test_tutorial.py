"""The commands of docs/tutorial.md run, in their order, and say what the page says they do."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.commands import demo
from workbench.trace.bundle import Bundle

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"

pytestmark = pytest.mark.skipif(not TUTORIAL.is_file(), reason="not run from a checkout")

SAID = {
    "demo": "decodes at",
    "show": "graph",
    "diagnose": "small-kernels",
    "whatif": "small-kernels removed",
    "compare": "splitk against graph",
}


@pytest.fixture(scope="module")
def recorded(make_device_bundle: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of the package, or where it ships none one that is made."""
    shipped = demo.recorded_folder()
    if demo.recordings(shipped):
        return shipped
    folder = tmp_path_factory.mktemp("recorded")
    kernels = ("moe_gate_up_kernel", "attention_kernel", "rms_norm_kernel")
    make_device_bundle(folder / "made", ("graph", "splitk"), kernels).close()
    return folder


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_tutorial_runs(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "recorded_folder", lambda: recorded)
    monkeypatch.chdir(tmp_path)
    seen = []
    for line in commands():
        word, *arguments = shlex.split(line)
        assert word == "workbench"
        result = CliRunner().invoke(app, arguments, prog_name="workbench")
        assert result.exit_code == 0, f"{line}: {result.stderr}"
        assert SAID[arguments[0]] in result.stdout, line
        seen.append(arguments[0])
    assert list(dict.fromkeys(seen)) == list(SAID)
    assert (tmp_path / "gpt-oss" / "report.html").is_file()
    assert (tmp_path / "difference.html").is_file()
    with Bundle.open(tmp_path / "gpt-oss") as bundle:
        assert {"graph", "splitk"} <= {variant.name for variant in bundle.manifest.variants}

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from workbench.commands import demo

Cli = Callable[..., Result]


@pytest.fixture
def recorded(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recording, packed, in place of what the package ships."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    with tarfile.open(folder / "made.tar.gz", "w:gz") as archive:
        archive.add(bundle, arcname="made")
    monkeypatch.setattr(demo, "recorded_folder", lambda: folder)
    monkeypatch.chdir(tmp_path)
    return folder


def test_it_unpacks_and_reports(cli: Cli, recorded: Path, tmp_path: Path, bundle: Path) -> None:
    result = cli("demo", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["bundle"] == "runs/demo-made"
    assert "decodes at" in found["headline"]
    assert b"Content-Security-Policy" in (tmp_path / found["report"]).read_bytes()
    assert (tmp_path / "runs/demo-made/steps.parquet").read_bytes() == (bundle / "steps.parquet").read_bytes()
    again = cli("demo")
    assert again.exit_code == 0
    assert "there already" in again.stderr
    assert "workbench diagnose runs/demo-made" in again.stdout


def test_a_folder_is_a_recording_too(cli: Cli, recorded: Path, bundle: Path, tmp_path: Path) -> None:
    bundle.rename(recorded / "other")
    assert cli("demo", "--list").stdout.split() == ["made", "other"]
    assert cli("demo", "other", "--out", tmp_path / "there").exit_code == 0
    assert (tmp_path / "there" / "report.html").is_file()


def test_what_the_user_has_is_not_overwritten(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("precious")
    result = cli("demo", "--out", mine)
    assert result.exit_code == 2
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_unknown_and_absent_recordings_are_one_line(
    cli: Cli, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli("demo", "none such")
    assert result.exit_code == 2
    assert "there are made" in result.stderr
    monkeypatch.setattr(demo, "recorded_folder", lambda: tmp_path / "nowhere")
    assert cli("demo").exit_code == 4
    assert cli("demo", "--list").stdout == ""


@pytest.mark.parametrize("name", ["../escape", "/absolute", "a/b/c", "link"])
def test_an_archive_that_would_write_elsewhere_is_refused(cli: Cli, recorded: Path, tmp_path: Path, name: str) -> None:
    with tarfile.open(recorded / "bad.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
        else:
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
    result = cli("demo", "bad", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "no file of a bundle" in result.stderr
    assert not (tmp_path / "escape").exists()
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".demo-*"))

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.trace import manifest as module
from workbench.trace.manifest import Clock, ClockSource, Manifest, VariantRecord, read_manifest, write_manifest
from workbench.trace.schema import SCHEMA_VERSION


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    written = Manifest(
        scenario={"name": "a", "depth": [1, 2]},
        command=["workbench", "run", "</script>\n\u202e"],
        variants=[VariantRecord(name="mtp", settings={"drafter": {"depth": 3}})],
        clock=Clock(name="CLOCK_MONOTONIC", utc_offset_ns=5, sources=[ClockSource(name="device", offset_ns=-3)]),
    )
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def test_bytes_in_a_command_line_are_spelt_out(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(command=["a\udcff"]))
    assert read_manifest(tmp_path).command == ["a\\udcff"]


def test_a_newer_version_is_refused_with_a_hint(tmp_path: Path) -> None:
    newer = {"schema_version": SCHEMA_VERSION + 1, "tool_version": "9.9", "state": {"unheard": "of"}}
    (tmp_path / "manifest.json").write_text(json.dumps(newer))
    with pytest.raises(InputError, match=r"schema version 2 is newer .*; upgrade decode-workbench.*'9\.9'"):
        read_manifest(tmp_path)


def test_an_older_version_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIGRATIONS", {0: lambda data: data | {"schema_version": 1, "command": [data["argv"]]}})
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 0, "argv": "run", "state": "sealed"}))
    assert read_manifest(tmp_path).command == ["run"]
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": -1}))
    with pytest.raises(InputError, match="schema version -1 is not known"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"{}", b'{"schema_version": "1"}', b"\xff\xfe", b"[" * 100_000, b"\0" * 64]
)
def test_garbage_gives_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_manifest(tmp_path)
    assert "manifest.json" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_damaged_manifest_gives_one_line_or_reads(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(msgspec.json.encode(Manifest(command=["a"], rows={"steps": 3})))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "manifest.json").write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    complaint = ""
    try:
        read_manifest(tmp_path)
    except InputError as error:
        complaint = str(error)
    assert len(complaint.splitlines()) <= 1


def test_what_is_no_bundle_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "manifest.json").symlink_to(tmp_path / "file")
    for path, words in (("none", "no bundle here"), ("file", "not a bundle folder"), ("link", "is a link")):
        with pytest.raises(InputError, match=words):
            read_manifest(tmp_path / path)

"""Formats are told by content: names do not matter, and what is nothing known gets one line."""

import gzip
import shutil
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.ingest.sniff import Format, sniff

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
GOLDEN = Path(__file__).parent / "golden"

KNOWN: dict[str, Format] = {
    "decode.sqlite": "nsys",
    "kernels.ncu.csv": "ncu-csv",
    "tree.hatchet": "proton-tree",
    "kernels.chrome_trace": "proton-trace",
    "sglang.log": "sglang-log",
    "vllm.log": "vllm-log",
    "profile_export_aiperf.json": "aiperf",
    "one_batch_server.jsonl": "sglang-benchmark",
}


@pytest.mark.parametrize(("name", "format_"), KNOWN.items())
def test_a_renamed_file_is_still_told(tmp_path: Path, name: str, format_: Format) -> None:
    renamed = Path(shutil.copy(FOREIGN / name, tmp_path / "x.json"))
    assert sniff(renamed) == format_
    if format_ != "nsys":
        packed = tmp_path / "y.bin"
        packed.write_bytes(gzip.compress(renamed.read_bytes()))
        assert sniff(packed) == format_


@pytest.mark.parametrize("name", ["sglang_graph", "vllm_rocm", "damaged", "old_integer_us"])
def test_traces_of_torch(name: str) -> None:
    assert sniff(GOLDEN / f"{name}.trace.json") == "kineto"


@pytest.mark.parametrize("text", ['[{"ph": "X"}]', "[]", "{}", '  {"traceEvents": [', '[\n{"name": "x"'])
def test_json_that_is_nothing_known_is_left_to_the_reader_of_traces(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    assert sniff(tmp_path / "t") == "kineto"


def test_a_log_is_told_behind_a_long_start(tmp_path: Path) -> None:
    noise = "[2026-09-01 10:00:00] Load weight\n" * 60_000
    (tmp_path / "t").write_text(noise + (FOREIGN / "sglang.log").read_text())
    assert sniff(tmp_path / "t") == "sglang-log"


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("t.txt", b"hello", "check which file it is"),
        ("t.nsys-rep", b"\x0a\x12quadd", "nsys export --type sqlite"),
        ("t.ncu-rep", b"XVR\x00", "damaged"),
        ("t.bin", bytes(range(256)) * 20, "check which file it is"),
        ("t.zip", b"PK\x03\x04", "unpack it"),
    ],
)
def test_what_is_unknown_gets_one_line(tmp_path: Path, name: str, content: bytes, hint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        sniff(tmp_path / name)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_folders_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        sniff(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        sniff(tmp_path / "x")

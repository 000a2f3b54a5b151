import gzip
import random
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.ingest import bounded
from workbench.ingest.bounded import Limits, read_blocks
from workbench.ingest.losses import Losses

TEXT = bytes(random.Random(1).choices(b'{"name": 0123456789}', k=3_000_000))  # noqa: S311


def read(path: Path, limits: Limits = Limits()) -> tuple[bytes, Losses]:  # noqa: B008
    losses = Losses("kineto")
    return b"".join(read_blocks(path, losses, limits)), losses


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "renamed"])
def test_gzip_is_told_by_content_not_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for content in (TEXT, gzip.compress(TEXT, 1)):
        path.write_bytes(content)
        found, losses = read(path)
        assert found == TEXT
        assert losses.rows() == []


def test_several_members_are_one_stream_and_padding_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:]) + bytes(512))
    found, losses = read(path)
    assert found == TEXT
    assert losses.rows() == []


def test_a_cut_gzip_gives_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    packed = gzip.compress(TEXT, 1)
    path.write_bytes(packed[: len(packed) // 2])
    found, losses = read(path)
    assert len(found) > len(TEXT) // 3
    assert TEXT.startswith(found)
    assert [row["kind"] for row in losses.rows()] == ["gzip-truncated"]


def test_a_flipped_bit_is_noticed_even_where_the_content_still_inflates(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    packed = bytearray(gzip.compress(TEXT, 1))
    packed[-8] ^= 1  # in the checksum
    path.write_bytes(packed)
    found, losses = read(path)
    assert len(found) > len(TEXT) - bounded.BLOCK_BYTES
    assert [(row["kind"], row["severity"]) for row in losses.rows()] == [("gzip-damaged", "error")]


def test_bytes_after_the_stream_are_said(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(TEXT) + b"something else")
    found, losses = read(path)
    assert found == TEXT
    assert [row["kind"] for row in losses.rows()] == ["gzip-trailing-bytes"]


def test_the_absolute_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(TEXT))
    assert read(path, Limits(max_bytes=len(TEXT)))[0] == TEXT
    with pytest.raises(InputError, match=r"larger than 2 MB, decompressed; raise --max-trace-bytes"):
        read(path, Limits(max_bytes=2_000_000))


def test_a_decompression_bomb_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "RATIO_FREE_BYTES", 4 << 20)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    seen: list[int] = []
    with pytest.raises(InputError, match="expands more than 250 times"):
        seen.extend(len(block) for block in read_blocks(path, Losses("kineto"), Limits()))
    assert sum(seen) <= 18 << 20  # 250 times the 65 kB of the file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b"\x28\xb5\x2f\xfdrest", "compressed by zstd"),
        (b"PAR1rest", "is a Parquet file"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(path)


def test_a_missing_file_and_a_folder_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match="is a folder"):
        read(tmp_path)

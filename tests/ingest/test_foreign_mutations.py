"""Damaged files of other tools: a bundle of what could be read, or one line; never anything else."""

import random
import shutil
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.ingest.bundle import ingest_files

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
NAMES = sorted(path.name for path in FOREIGN.iterdir())
ROUNDS = 8


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Cut off, flip bytes, take a piece out, or put one in."""
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            flipped = bytearray(data)
            for _ in range(rng.randrange(1, 30)):
                flipped[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(flipped)
        case 2:
            return data[:at] + data[at + rng.randrange(1, 300) :]
    other = rng.randrange(len(data))
    return data[:at] + data[other : other + rng.randrange(1, 300)] + data[at:]


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_a_bundle_or_one_line(tmp_path: Path, name: str) -> None:
    rng = random.Random(name)  # noqa: S311 the same damage in every run
    path, out = tmp_path / name, tmp_path / "b"
    for _ in range(ROUNDS):
        path.write_bytes(mutated((FOREIGN / name).read_bytes(), rng))
        try:
            ingest_files([path], out)
        except InputError as error:
            assert "\n" not in str(error)  # noqa: PT017 either answer will do
            assert not out.exists()
        else:
            assert (out / "manifest.json").exists()
            shutil.rmtree(out)

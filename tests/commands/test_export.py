import gzip
import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

Cli = Callable[..., Result]


def test_perfetto_goes_into_the_bundle_or_where_it_is_told(cli: Cli, bundle: Path, tmp_path: Path) -> None:
    data = json.loads(cli("export", bundle, "--perfetto", "--json").stdout)
    assert data["packets"] > 40  # 20 steps, each with its phases
    assert data["bytes"] == Path(data["path"]).stat().st_size
    plain = tmp_path / "mine.pftrace"
    result = cli("export", bundle, "--perfetto", "-o", plain)
    assert result.exit_code == 0
    assert str(plain) in result.stdout
    assert gzip.decompress(Path(data["path"]).read_bytes()) == plain.read_bytes()


def test_a_format_must_be_named(cli: Cli, bundle: Path) -> None:
    result = cli("export", bundle)
    assert result.exit_code == 2
    assert result.stderr == "workbench: error: export: no format named; use --perfetto\n"

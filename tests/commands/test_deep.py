import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from workbench.run import deep
from workbench.run.deep import Profiled

Cli = Callable[..., Result]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be profiled; nothing is."""
    calls: list[tuple[Any, ...]] = []

    def profile(variant: Any, out: Path, *, begin: Callable[[], None], **options: Any) -> Profiled:
        begin()
        calls.append((variant.name, out, options))
        return Profiled(out, "ncu 2025.3.1.0", ("expert_pass", "rms_norm"), 48, 2, ("durations are of replays",))

    monkeypatch.setattr(deep, "profile_kernels", profile)
    return calls


def test_a_variant_is_profiled_and_the_notes_are_printed(
    cli: Cli, asked: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    result = cli("deep", "quickstart", "--variant", "mtp", "--steps", "2", "-o", str(tmp_path / "b"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"bundle   {tmp_path / 'b'}",
        "kernels  2, 48 launches replayed by ncu 2025.3.1.0",
        "note     durations are of replays",
    ]
    assert "takes minutes" in result.stderr
    ((name, _, options),) = asked
    assert name == "mtp"
    assert (options["steps"], options["cache"], options["through"], options["into"]) == (2, "none", "auto", None)


def test_the_copy_of_a_bundle_lies_beside_it(cli: Cli, asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    options = ("--into", str(tmp_path / "run"), "--flush-caches", "--through", "ncu", "--json")
    found = json.loads(cli("deep", "quickstart", "--variant", "plain", *options).stdout)
    assert found["bundle"] == str(tmp_path / "run-deep")
    assert found["kernels"] == ["expert_pass", "rms_norm"]
    assert (asked[0][2]["cache"], asked[0][2]["through"]) == ("all", "ncu")


def test_what_is_wrong_is_said_before_anything_is_built(cli: Cli, asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    several = cli("deep", "quickstart")
    assert (several.exit_code, "--variant, one of plain, mtp, dflash" in several.stderr) == (2, True)
    assert "no variant 'x'" in cli("deep", "quickstart", "--variant", "x").stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert (
        "nothing is overwritten" in cli("deep", "quickstart", "--variant", "mtp", "-o", str(tmp_path / "full")).stderr
    )
    assert not asked


def test_without_a_gpu_it_ends_with_4(cli: Cli, tmp_path: Path) -> None:
    result = cli("deep", "quickstart", "--variant", "plain", "-o", str(tmp_path / "b"))
    assert result.exit_code == 4
    assert "Nsight Compute profiles CUDA kernels" in result.stderr

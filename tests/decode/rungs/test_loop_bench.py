"""The benchmark of the loop, on the CPU with the eager rung; what it times on a GPU needs one."""

import json
from pathlib import Path

import pytest
import torch

from workbench.decode.rungs import loop_bench
from workbench.decode.rungs.loop_bench import AHEAD, CASES, Case, table, variant_of
from workbench.errors import InputError, UnfitError

NANO = (
    Case("nano none", 'preset = "nano"\nrung = "eager"'),
    Case("nano mtp", 'preset = "nano"\nrung = "eager"\ndrafter = { kind = "mtp", depth = 2 }'),
    Case("nano wrong", 'preset = "nano"\nrung = "eager"\ndrafter = { kind = "dflash", depth = 12 }'),
)


def test_cases_are_timed_with_and_without_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    arguments = ["--new-tokens", "14", "--seconds", "1e5"]
    assert loop_bench.main(arguments, device=torch.device("cpu"), cases=NANO) == 1  # the third is wrong
    none, mtp, wrong = json.loads((tmp_path / "loop_bench.json").read_text())["rows"]
    assert none["text"] == mtp["text"]
    assert none["tokens_per_step"] == 1
    assert mtp["tokens_per_step"] > 1
    for row in (none, mtp):
        assert row["device_us"] > 0
        assert row["step_us"] == pytest.approx(row["device_us"] + row["host_us"])
        assert row["kernel_us"] is None
        assert row["wall_tok_s"] < row["tok_s"]
    assert mtp["draft_us"] > none["draft_us"]
    assert "depth" in wrong["error_text"]
    printed = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[-3:]] == ["none", "mtp", "wrong"]
    assert printed[-2].endswith("same")


def test_every_case_is_a_scenario() -> None:
    for case in (*CASES, *AHEAD):
        variant = variant_of(case, "cuda", 8)
        assert variant.engine.rung in case.settings
        assert variant.engine.run_ahead == case.name.endswith("-ahead")
        assert variant.drafter.kind in (case.settings if "drafter" in case.settings else "none")


def test_the_table_says_where_texts_part() -> None:
    base = dict.fromkeys(("device_us", "step_us", "host_us", "draft_us", "commit_us", "tok_s", "tokens_per_step"), 1.0)
    base["wall_tok_s"] = 0.9
    base |= {"kernel_us": None, "between_us": None}
    rows = [{"case": f"nano {name}", "text": text, **base} for name, text in (("a", [1, 2, 3]), ("b", [1, 5, 3]))]
    assert table(rows).splitlines()[-1].endswith("parts at token 1")
    rows = [
        {"case": f"gpt-oss-20b {name}", "text": [1, 2], **base} for name in ("splitk", "persistent", "splitk-ahead")
    ]
    assert [line.split()[-1] for line in table(rows).splitlines()[-3:]] == ["1.00", "1.00", "same"]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        loop_bench.main([])
    with pytest.raises(InputError, match="--only: no case has nothing in its name"):
        loop_bench.main(["--only", "nothing"], device=torch.device("cpu"))

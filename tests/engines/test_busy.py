"""An engine kept busy while it is watched, with stand-ins for the engine and for watching."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from workbench.engines import busy

FAKE = Path(__file__).with_name("fake_sglang.py")


def test_what_watching_costs_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(FAKE, site / "sglang.py")
    (site / "torch.py").write_text('__version__ = "0.0.fake"\n')
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("FAKE_SGLANG_ACCEPT", "4")
    scenario = tmp_path / "s.toml"
    builtin = busy.load_scenario("sglang-qwen3-30b-dflash")
    assert [one.name for one in builtin.variants()] == ["plain", "dflash-2", "dflash-3", "dflash-4", "dflash-6"]
    scenario.write_text(
        'name = "s"\n[model]\npreset = "qwen3-30b-a3b"\nweights = "random"\n[precision]\npolicy = "bf16"\n'
        '[engine]\nkind = "sglang"\ndevice = "cpu"\n[drafter]\nkind = "simulated"\ndepth = 7\naccept_length = 4.0\n'
    )
    seen: dict[str, Any] = {}

    def watch(out: Path, **arguments: Any) -> Path:
        seen.update(arguments, out=out)
        return out

    monkeypatch.setattr(busy, "attach", watch)
    code = busy.main([str(scenario), "s", "--requests", "2", "--tokens", "17", "--attach", str(tmp_path / "b")])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert lines[-1]["event"] == "summary"
    assert lines[-1]["tok_s"] > 0
    assert [line["when"] for line in lines if line["event"] == "request"].count("before") == 2
    assert seen["options"].model.name == "qwen3-30b-a3b"
    assert seen["options"].width == 8
    assert seen["options"].tok_s > 0
    assert busy.main([str(scenario), "other"]) == 2

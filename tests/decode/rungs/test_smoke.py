import json
import math
from pathlib import Path

import pytest
import torch

from workbench.decode.presets import load_preset
from workbench.decode.rank import rank_slice
from workbench.decode.rungs import smoke
from workbench.decode.rungs.agreement import Agreement
from workbench.decode.rungs.smoke import Case, cases, passed, table
from workbench.errors import InputError, UnfitError
from workbench.scenario import RUNGS

SHAPE = """
name = "tiny"
hidden = 64
vocab = 32
layer_pattern = "sliding full"
window = 4
max_positions = 64
attention = { kind = "gqa", heads = 4, kv_heads = 2, qk_dim = 16, v_dim = 16, bias = true, sinks = true }
moe = { experts = 6, top_k = 2, inter = 64, bias = true, activation = "clamped-swiglu" }
"""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_rungs_are_checked_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.toml").write_text(SHAPE)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(smoke, "ROWS", 1)
    monkeypatch.setattr(smoke, "ROUNDS", 1)
    arguments = ["--model", str(tmp_path / "tiny.toml"), "--layers", "1", "--context", "5", "--widths", "1"]
    code = smoke.main([*arguments, "--rungs", "eager,graph,fp4", "--steps", "1", "--seconds", "1e5"], device=DEVICE)
    assert code == 0
    report = json.loads((tmp_path / "rungs_smoke.json").read_text())
    assert [row["case"] for row in report["rows"]] == ["eager T=1", "graph T=1", "fp4 T=1"]
    assert report["layers"] == 1
    for row in report["rows"]:
        assert (row["passed"], row["repeatable"]) == (True, True)
        assert row["same"] == row["rows"] == 1
        assert row["ms"] > 0
    eager, _, fp4 = report["rows"]
    assert eager["error"] <= (0 if DEVICE.type == "cpu" else smoke.TOLERANCE)  # on a GPU its experts are grouped
    assert 0 < fp4["error"] < smoke.TOLERANCE
    assert fp4["read_bytes"] < eager["read_bytes"]
    assert fp4["experts"] == ""
    if DEVICE.type == "cpu":
        assert eager["experts"] == "looped: the grouped product is for GPUs"
    printed = capfd.readouterr().out
    assert printed.splitlines()[-1].startswith("fp4 T=1")
    assert printed.rstrip().endswith("ok")


def test_a_wrong_rung_fails_and_the_others_are_still_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.toml").write_text(SHAPE)
    monkeypatch.setattr(smoke, "ROWS", 1)
    monkeypatch.setattr(smoke, "TOLERANCE", -1.0)
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(smoke, "PlainStep", lambda *arguments: (_ for _ in ()).throw(RuntimeError("no\nmemory")))
    arguments = ["--model", str(tmp_path / "tiny.toml"), "--layers", "1", "--context", "0", "--widths", "1"]
    assert smoke.main([*arguments, "--rungs", "eager,graph", "--steps", "1", "--seconds", "1e5"], device=DEVICE) == 1
    *_, eager, graph = capfd.readouterr().out.splitlines()
    assert "FAILED" in eager
    assert graph.split(maxsplit=2)[-1] == "RuntimeError: no"


def test_rows_that_cannot_be_compared_do_not_pass() -> None:
    nothing = Agreement(8, 0, math.nan, math.nan, 0)
    assert not passed(nothing, 1.0)
    assert not passed(Agreement(8, 3, 0.0, 0.0, 3), 1.0)
    assert passed(Agreement(8, 4, 0.02, 0.0, 3), 0.03)
    assert not passed(Agreement(8, 8, 0.04, 0.0, 3), 0.03)


def test_the_order_of_cases() -> None:
    order = list(cases(list(RUNGS), [1, 4]))
    assert order[0] == Case("eager", 1)
    assert order[-2:] == [Case("persistent", 1), Case("persistent", 4)]
    assert Case("splitk", 4, overlap=True) in order
    assert len(order) == 2 * 9 + 2
    slices = list(cases(list(RUNGS), [1], rank=True, fp8=True))
    assert Case("splitk", 1, collective_us=smoke.COLLECTIVE_US) in slices
    assert Case("livequant-fused", 1, policy="fp8") in slices
    assert all(case.rung != "persistent" for case in slices)
    latent = list(cases(list(RUNGS), [1, 4], rank=True, fp8=True, latent=True))
    assert latent[-2:] == [Case("persistent", 1), Case("persistent", 1, collective_us=smoke.COLLECTIVE_US)]
    assert all(case.rung != "persistent" for case in cases(list(RUNGS), [4], rank=True, latent=True))
    left_out = table([{"case": "fp4 T=4", "error_text": "left out: the time was up"}], 1e12)
    assert left_out.endswith("left out: the time was up")


def test_the_persistent_step_of_a_slice_is_held_to_16_bit_activations() -> None:
    spec = rank_slice(load_preset("glm-5.2"), 8)
    case = Case("persistent", 1)
    assert smoke.policy_of(case, spec) == "mxfp4-experts-fp8"
    assert smoke.tolerance_of(case, spec) == smoke.TOLERANCE
    assert smoke.tolerance_of(Case("livequant-fused", 1), spec) == smoke.RANK_TOLERANCE


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--layers: 25 is not 1 to 24, what gpt-oss-20b has"):
        smoke.main(["--layers", "25"], device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnfitError, match="needs an NVIDIA GPU"):
        smoke.main([])

"""The trace that an SGLang server made of itself while it was attached to: what ingest and diagnose say of it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli import app

TRACE = Path(__file__).parents[1] / "data" / "sglang0517_gptoss20b_mxfp4_served_h200.json.gz"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), prog_name="workbench")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("clean_us", [None, 3449])
def test_the_launch_cost_and_the_stretch_are_named(
    tmp_path: Path, clean_us: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    more = ["--clean-step-us", str(clean_us)] if clean_us else []
    out = str(tmp_path / "served")
    text = run("ingest", str(TRACE), "--model", "gpt-oss-20b", "--hardware", "h200", "--out", out, *more)
    assert "16 steps found by: engine marks" in text
    assert "cudaGraphLaunch took 0.55 ms on the host" in text
    assert "thread 2120 spent 0.6584 ms of it (89.0 %) in cudaGraphLaunch" in text
    text = run("diagnose", out)
    assert "launching 1 replay takes 0.588 ms of the host's time a step" in text
    assert "[trace-inflation]" in text
    assert ("without the time of a clean step" in text) == (clean_us is None)
    assert "_reduce: 23 CTAs on 132 SMs, 24 a step" in text

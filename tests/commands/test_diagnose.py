"""``workbench diagnose`` and ``workbench whatif`` on the ingested trace of a real server."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.ingest.bundle import ingest_kineto
from workbench.ingest.byte_model import Model

TRACE = Path(__file__).parents[1] / "data/sglang0517_qwen3_4layers_dflash_h200.json.gz"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("diagnose") / "bundle"
    ingest_kineto(TRACE, out, model=Model("qwen3-30b-a3b"), hardware="h200")
    return out


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_causes_add_up_and_the_host_is_found(bundle: Path) -> None:
    code, text, _ = run("diagnose", bundle)
    assert code == 0
    assert "times are traced ones" in text
    assert "The host is late [host-bound]" in text
    code, text, _ = run("diagnose", bundle, "--json")
    assert code == 0
    found = json.loads(text)
    (variant,) = found["variants"].values()
    assert sum(cause["total_ns"] for cause in variant["causes"]) == variant["wall_ns"]
    # Its sampled counters were idle for 71 % of the time: the host is what it waits for.
    first = next(one for one in variant["findings"] if one["recoverable"])  # after doubts about the trace
    assert first["id"] == "host-bound"
    assert first["recoverable"]["unit"] == "steps/s"
    assert variant["clean_map"]["identity"] is True
    assert found["schema"] == "workbench.diagnosis/1"


def test_what_if_shows_its_arithmetic(bundle: Path) -> None:
    code, text, _ = run("whatif", bundle, "--remove", "host-bound", "--hardware", "b300")
    assert code == 0
    assert "host-bound removed" in text
    assert "practical 6200, datasheet 7750" in text
    code, text, _ = run("whatif", bundle, "--json")
    assert json.loads(text)["ratio"] == pytest.approx(1)
    code, text, _ = run("whatif", bundle, "--precision", "fp8", "--width", "4", "--json")
    assert code == 0, text
    assert len(json.loads(text)["arithmetic"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--remove", "nonsense"), "no cause 'nonsense'"),
        (("--scale", "draft"), "not CAUSE=FACTOR"),
        (("--scale", "draft=x"), "not CAUSE=FACTOR"),
        (("--hardware", "h900"), "hardware 'h900' is not known"),
        (("--accept-length", "0.2"), "at least the one token"),
        (("--variant", "nobody"), "no variant 'nobody'"),
    ],
)
def test_wrong_changes_are_refused_in_one_line(bundle: Path, options: tuple[str, ...], message: str) -> None:
    code, text, error = run("whatif", bundle, *options)
    assert code == 2
    assert text == ""
    assert message in error


def test_a_trace_without_a_device_is_refused_with_its_reason(tmp_path: Path) -> None:
    trace = tmp_path / "cpu.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    step = event | {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0.0, "dur": 9.0}
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [step, event]}))
    ingest_kineto(trace, tmp_path / "bundle")
    code, _, error = run("diagnose", tmp_path / "bundle")
    assert code == 4
    assert "no-device-rows" in error

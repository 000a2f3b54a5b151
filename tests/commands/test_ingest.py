import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]

GOLDEN = Path(__file__).parents[1] / "ingest" / "golden"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A decode trace of SGLang with three graph replays."""
    return Path(shutil.copy(GOLDEN / "sglang_graph.trace.json", tmp_path / "serving.trace.json"))


def test_a_trace_becomes_a_bundle_with_a_verdict(cli: Cli, trace: Path, tmp_path: Path) -> None:
    result = cli("ingest", trace, "-o", tmp_path / "b")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.index("verdict") < text.index("busy and idle") < text.index("steps, measured with the profiler on")
    assert "3 graph replays were traced kernel by kernel (up to 3), which stretches the step: cudaGraphLaunch" in text
    assert "not said: how long a step takes without instruments" in text
    assert "device 0 ran nothing for" in text
    assert "3 steps found by: engine marks" in result.stderr
    assert (tmp_path / "b" / "manifest.json").exists()


def test_a_clean_step_may_be_stated(cli: Cli, trace: Path, tmp_path: Path) -> None:
    assert cli("ingest", trace, "-o", tmp_path / "b", "--clean-step-us", 20).exit_code == 0
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["perturbation"][0]["clean_step_ns"] == 20_000
    assert manifest["perturbation"][0]["traced_step_ns"] > 20_000
    shown = cli("diagnose", tmp_path / "b").stdout
    assert "while profiled (estimated)" in shown
    assert "a step without the profiler takes 0.0200 ms by what is beside the trace" in shown
    for wrong in (0, -1, "nan", 1e9):
        result = cli("ingest", trace, "-o", tmp_path / "c", f"--clean-step-us={wrong}")
        assert result.exit_code == 2, result.output
        assert not (tmp_path / "c").exists()


def test_the_default_folder_is_named_after_the_trace(
    cli: Cli, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("ingest", trace).exit_code == 0
    assert cli("ingest", trace).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["serving", "serving-2"]


def test_json(cli: Cli, trace: Path, tmp_path: Path) -> None:
    arguments = ("--model", "glm-5.2", "--tp", "8", "--hardware", "b300", "--json")
    result = cli("ingest", trace, "-o", tmp_path / "b", *arguments)
    data = json.loads(result.stdout)
    assert data["schema"] == "workbench.trace/1"
    assert (data["rule"], data["steps_found"], data["events"]) == ("engine marks", 3, 37)
    (busy,) = data["busy"]
    names = ("compute_ns", "collective_ns", "memcpy_ns", "memset_ns", "idle_ns")
    assert sum(busy[name] for name in names) == busy["end_ns"] - busy["start_ns"]
    assert data["steps"][0]["median"] == {
        "value": pytest.approx(0.10025), "unit": "ms", "tag": "measured", "note": "with the profiler on",
    }  # fmt: skip
    assert 5e9 < data["floor"]["bytes_per_step"]["value"] < 8e9
    assert {roof["tag"] for roof in data["floor"]["at_roof"]} == {"modelled"}
    assert "step-time" in data["verdict"]["refusals"]
    shown = json.loads(cli("show", tmp_path / "b", "--json").stdout)
    assert shown["busy"] == data["busy"]


def test_show_check_and_export_take_the_bundle(cli: Cli, trace: Path, tmp_path: Path) -> None:
    cli("ingest", trace, "-o", tmp_path / "b")
    shown = cli("show", tmp_path / "b")
    assert shown.exit_code == 0
    assert "busy and idle" in shown.stdout
    assert "register spills: torch.profiler leaves out local memory" in shown.stdout
    assert cli("check", tmp_path / "b").exit_code == 0
    assert cli("export", tmp_path / "b", "--perfetto").exit_code == 0


def test_the_report_has_no_tok_s(cli: Cli, trace: Path, tmp_path: Path) -> None:
    cli("ingest", trace, "-o", tmp_path / "b")
    page = cli("report", tmp_path / "b")
    assert page.exit_code == 0, page.output
    assert "with the profiler on" in (tmp_path / "b" / "report.html").read_text()
    markdown = cli("report", tmp_path / "b", "--format", "md", "-o", "-").stdout
    assert markdown.index("May it be trusted") < markdown.index("Busy and idle") < markdown.index("Kernels")
    assert not re.search(r"\d tok/s", markdown)
    data = json.loads(cli("report", tmp_path / "b", "--format", "json", "-o", "-").stdout)
    assert data == json.loads(cli("show", tmp_path / "b", "--json").stdout)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("t.json", b"hello", "not a torch.profiler trace (no traceEvents in it)"),
        ("t.json", b"", "is empty"),
        ("t.json.gz", b"\x1f\x8b\x08 garbage", "not a torch.profiler trace"),
        ("t.json", gzip.compress(b"PK", mtime=0), "not a torch.profiler trace"),
        ("t.json", b'{"traceEvents": []}', "nothing to read"),
        ("t.nsys-rep", b"SQLite format 3\x00", "is an SQLite database"),
    ],
)
def test_garbage_gets_one_line_and_leaves_nothing(
    cli: Cli, tmp_path: Path, name: str, content: bytes, line: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    result = cli("ingest", path, "-o", tmp_path / "b")
    assert result.exit_code == 2
    assert line in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "b").exists()


def test_a_missing_file_and_a_taken_folder(cli: Cli, trace: Path, tmp_path: Path) -> None:
    assert "no such file" in cli("ingest", tmp_path / "nowhere.json", "-o", tmp_path / "b").stderr
    result = cli("ingest", trace, "-o", tmp_path)
    assert result.exit_code == 2
    assert "exists; choose another folder" in result.stderr


def test_a_truncated_trace_states_its_losses(cli: Cli, trace: Path, tmp_path: Path) -> None:
    text = trace.read_bytes()
    trace.write_bytes(gzip.compress(text[: text.rindex(b"moe_mxfp4")]))
    result = cli("ingest", trace, "-o", tmp_path / "b")
    assert result.exit_code == 0
    assert "rows are missing or damaged: 1 truncated, 1 truncated-event" in result.stdout
    assert "lost while reading" in result.stdout
    assert "the file ends inside an event" in result.stdout
    assert "not said: how many kernels and calls there were" in result.stdout


def test_what_the_verdict_refuses_is_not_shown(cli: Cli, trace: Path, tmp_path: Path) -> None:
    document = json.loads(trace.read_bytes())
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel":
            event["dur"] = 1e14  # three years
    trace.write_text(json.dumps(document))
    result = cli("ingest", trace, "-o", tmp_path / "b")
    assert result.exit_code == 0
    assert "device rows are longer than 10 s" in result.stdout
    assert "busy and idle" not in result.stdout
    assert "ran nothing for" not in result.stdout


def test_the_size_limit(cli: Cli, trace: Path, tmp_path: Path) -> None:
    result = cli("ingest", trace, "-o", tmp_path / "b", "--max-trace-bytes", "1000")
    assert result.exit_code == 2
    assert "raise --max-trace-bytes" in result.stderr


def test_hostile_names_do_not_reach_the_terminal(cli: Cli, trace: Path, tmp_path: Path) -> None:
    text = (
        trace.read_text().replace("NVIDIA H200", "\\u001b[31mred\\u202e").replace("cudaGraphLaunch", "cudaGraphLaunch")
    )
    trace.write_text(text)
    result = cli("ingest", trace, "-o", tmp_path / "b")
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout

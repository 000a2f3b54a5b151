"""``workbench ingest`` on what other tools wrote: by content, one line for what cannot be read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]
FOREIGN = Path(__file__).parents[1] / "data" / "foreign"

SHOWN = {
    "decode.sqlite": ("8 steps found by: engine marks", "busy and idle"),
    "kernels.chrome_trace": ("8 steps found by: repeating kernels", "busy and idle"),
    "kernels.ncu.csv": ("no time line", "measured in replays one by one"),
    "tree.hatchet": ("no time line", "kernel time: moe_gemm"),
    "sglang.log": ("no time line", "estimated_read_rate"),
    "vllm.log": ("no time line", "accept_rate_at_1"),
    "profile_export_aiperf.json": ("no time line", "inter_token_latency p99"),
    "one_batch_server.jsonl": ("no time line", "last_gen_throughput [1]"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_each_file_becomes_a_bundle(cli: Cli, tmp_path: Path, name: str) -> None:
    renamed = shutil.copy(FOREIGN / name, tmp_path / "something.json")
    result = cli("ingest", renamed, "-o", tmp_path / "b")
    assert result.exit_code == 0, result.output
    note, shown = SHOWN[name]
    assert note in result.stderr
    assert shown in result.stdout
    assert cli("check", tmp_path / "b").exit_code == 0
    assert shown in cli("show", tmp_path / "b").stdout
    assert cli("export", tmp_path / "b", "--perfetto").exit_code == 0
    diagnosed = cli("diagnose", tmp_path / "b")
    assert diagnosed.exit_code == 0, diagnosed.output
    assert ("no step time to split" in diagnosed.stdout) == ("no time line" in note)
    assert json.loads(cli("diagnose", tmp_path / "b", "--json").stdout)["verdict"]["severity"] in ("info", "warning")
    json.loads(cli("show", tmp_path / "b", "--json").stdout)


def test_a_log_by_itself_has_findings_and_says_what_it_cannot_tell(cli: Cli, tmp_path: Path) -> None:
    result = cli("ingest", FOREIGN / "sglang.log", "-o", tmp_path / "b", "--hardware", "h200")
    assert "graph-off" in result.stdout
    assert "engine-bandwidth" in result.stdout
    assert "what these files cannot tell" in result.stdout
    assert "est. read BW is arithmetic" in result.stdout


def test_json_of_files_without_a_time_line(cli: Cli, tmp_path: Path) -> None:
    result = cli("ingest", FOREIGN / "kernels.ncu.csv", "-o", tmp_path / "b", "--json")
    data = json.loads(result.stdout)
    assert data["schema"] == "workbench.sources/1"
    moe = data["kernels"][0]
    assert (moe["name"], moe["launches"], moe["registers"]) == ("moe_gemm(const unsigned char *, float)", 2, 168)
    assert moe["read"]["value"] == pytest.approx(70.28e6)
    assert moe["occupancy"]["value"] == pytest.approx(33.05)
    assert moe["replay"]["note"] == "in a replay"


def test_several_files_of_one_run(cli: Cli, tmp_path: Path) -> None:
    files = [FOREIGN / name for name in ("decode.sqlite", "sglang.log")]
    result = cli("ingest", *files, "-o", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert "accept length 3.40 in the traced window" in result.stdout
    assert "a step without the profiler takes 0.800 ms, traced 1.000 ms" in result.stdout
    diagnosed = cli("diagnose", tmp_path / "b")
    assert diagnosed.exit_code == 0
    assert "traced ones are 1.25 times as long" in diagnosed.stdout


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("cut.sqlite", FOREIGN.joinpath("decode.sqlite").read_bytes()[:2000], "is an SQLite database"),
        ("cut.hatchet", FOREIGN.joinpath("tree.hatchet").read_bytes()[:400], "a damaged profile of Proton"),
        ("cut.json", FOREIGN.joinpath("profile_export_aiperf.json").read_bytes()[:300], "damaged JSON"),
        ("cut.csv", FOREIGN.joinpath("kernels.ncu.csv").read_bytes()[:200], "no profiled kernel"),
        ("other.csv", b"a,b\n1,2\n", "not a torch.profiler trace"),
        ("empty.log", b"", "is empty"),
        ("other.db", b"SQLite format 3\x00" + bytes(5000), "is an SQLite database"),
    ],
)
def test_what_cannot_be_read_gets_one_line(cli: Cli, tmp_path: Path, name: str, content: bytes, line: str) -> None:
    (tmp_path / name).write_bytes(content)
    result = cli("ingest", tmp_path / name, "-o", tmp_path / "b")
    assert result.exit_code == 2, result.output
    errors = [one for one in result.stderr.splitlines() if "error:" in one]
    assert len(errors) == 1
    assert line in errors[0]
    assert result.stdout == ""
    assert not (tmp_path / "b").exists()

"""Real runs of random weights: tiny where the result counts, long where they are to be killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import Result

from workbench.commands.run import assignment
from workbench.errors import InputError

Cli = Callable[..., Result]
Shell = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120

TINY = """
name = "tiny"
[model]
weights = "random"
[engine]
device = "cpu"
threads = 1
[prompts]
count = 2
max_prompt_tokens = 16
new_tokens = 6
[measure]
warmup_steps = 1
traced_steps = 2
[[matrix]]
name = "plain"
[[matrix]]
name = "ngram"
drafter = { kind = "ngram", depth = 2 }
"""

ENDLESS = TINY.replace("new_tokens = 6", "new_tokens = 480").replace("count = 2", "count = 8")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_only_the_named_variants_run(cli: Cli, scenario: Path, tmp_path: Path) -> None:
    from workbench.trace.bundle import Bundle

    done = cli("run", scenario, "--only", "ngram", "--no-report", "--out", tmp_path / "b")
    assert done.exit_code == 0
    with Bundle.open(tmp_path / "b") as bundle:
        assert [record.name for record in bundle.manifest.variants] == ["ngram"]
    wrong = cli("run", scenario, "--only", "eagle", "--out", tmp_path / "c")
    assert wrong.exit_code == 2
    assert "no variant 'eagle'" in wrong.stderr
    assert "plain, ngram" in wrong.stderr


def test_a_run_prints_its_table_and_where_it_wrote(
    cli: Cli, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("run", scenario)
    assert result.exit_code == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines() if re.match(r"(variant|plain|ngram) ", line)][
        :3
    ] == [
        "variant",
        "plain",
        "ngram",
    ]
    assert "bonus token included" in result.stdout
    assert "roof of the cpu" in result.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tiny-\d{8}T\d{6}Z", folder.name)
    assert f"bundle  runs/{folder.name}\n" in result.stdout
    assert result.stdout.endswith(f"report  runs/{folder.name}/report.html\n")
    assert (folder / "report.html").stat().st_size > 10_000
    assert f"workbench: writing runs/{folder.name}\n" in result.stderr
    assert "workbench: ngram: traced\n" in result.stderr
    assert cli("check", folder).exit_code == 0
    assert cli("export", folder, "--perfetto").exit_code == 0


def test_json_is_all_that_stdout_gets(cli: Cli, scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli("run", scenario, "--out", out, "--set", "measure.traced_steps=0", "--no-report", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["bundle"] == str(out)
    assert data["report"] is None
    assert not (out / "report.html").exists()
    ngram = data["diagnosis"]["variants"]["ngram"]
    assert ngram["accept_length"]["note"]
    assert ngram["greedy_identical_to_plain"]["identical"] is True
    again = cli("run", scenario, "--out", out)
    assert again.exit_code == 2
    assert "nothing is overwritten" in again.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'a'\n[drafter]\ndepth = '3'", ["drafter.depth", "an integer"]),
        ("name = 'a'\n[drafter]\ndepht = 3", ["drafter.depht", "unknown key"]),
        ("name = 'a'\n[drafter]\nkind = 'mtp'\ndepth = -1", ["drafter.depth", "at least 1"]),
        ("name = 'a'\n[prompts]\nfile = 'gone.jsonl'", ["prompts.file", "gone.jsonl"]),
        ("name = 'a'\n[model]\nshape = 'gone.toml'", ["model.shape", "gone.toml"]),
        ("name = 'a'\n[prompts\n", ["line 2", "not TOML"]),
    ],
)
def test_a_malformed_scenario_is_one_line_and_2(shell: Shell, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    done = shell("run", path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"workbench: error: {path}: ")
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_scenario_that_is_not_there_is_one_line_and_2(shell: Shell) -> None:
    for name in ("nothing.toml", "quickstrat"):
        done = shell("run", name)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "quickstart" in done.stderr


def test_settings_reach_the_scenario_and_name_their_field(cli: Cli, scenario: Path, tmp_path: Path) -> None:
    for setting, words in (
        ("prompts.count=-1", "prompts.count: must be at least 1"),
        ("engine.device=gpu", "engine.device: must be one of"),
        ("prompts.cuont=1", "did you mean 'count'?"),
        ("prompts.count", "no key and value"),
    ):
        result = cli("run", scenario, "--out", tmp_path / "out", "--set", setting)
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_what_cannot_be_built_writes_nothing(cli: Cli, scenario: Path, tmp_path: Path) -> None:
    result = cli(
        "run", scenario, "--out", tmp_path / "out", "--set", "engine.rung=persistent", "--set", "prompts.count=1000"
    )
    assert result.exit_code in (2, 4)
    assert result.stdout == ""
    assert "writing" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "toml"),
    [
        ("a.b=1", "a.b=1"),
        ("a.b = true", "a.b =true"),
        ("a.b=cpu", 'a.b="cpu"'),
        ("a.b=dir/held-out.jsonl", 'a.b="dir/held-out.jsonl"'),
        ("a.b='x y'", "a.b='x y'"),
        ("a={ kind = 'mtp' }", "a={ kind = 'mtp' }"),
    ],
)
def test_a_bare_word_is_text(setting: str, toml: str) -> None:
    assert assignment(setting) == toml


@pytest.mark.parametrize("setting", ["", "a", "=1", "a="])
def test_half_a_setting_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match="--set"):
        assignment(setting)


def test_a_machine_without_torch_is_unfit(cli: Cli, scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.commands.run.find_spec", lambda name: None if name == "torch" else object())
    result = cli("run", scenario)
    assert result.exit_code == 4
    assert result.stderr == ("workbench: error: running needs torch; pip install 'decode-workbench[decode]'\n")


@contextmanager
def _endless_run(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a run that will not end by itself soon, and wait until its steps reach the disk."""
    scenario = folder / "endless.toml"
    scenario.write_text(ENDLESS)
    command = [sys.executable, "-m", "workbench", "run", str(scenario), "--out", str(folder / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    )
    try:
        spool, deadline = folder / "out" / "spool" / "steps.arrows", time.monotonic() + TIMEOUT_S
        while not spool.exists() or spool.stat().st_size < 4096:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step reached the disk"
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_run_is_salvaged_shown_and_reported(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _endless_run(tmp_path) as process:
        assert cli("check", out).exit_code == 4  # it is being written
        process.send_signal(signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    cut = cli("show", out)
    assert cut.exit_code == 2
    assert cut.stderr == (f"workbench: error: {out}: its run was cut off; run: workbench check {out} --salvage\n")
    assert cli("check", out).exit_code == 4
    salvaged = cli("check", out, "--salvage")
    assert salvaged.exit_code == 0, salvaged.stdout
    assert "salvaged (was open), readable" in salvaged.stdout
    assert re.search(r"steps: rows after \d+ ns that were not flushed", salvaged.stdout)
    assert "variant 'ngram': no steps" in salvaged.stdout or "cut after" in salvaged.stdout
    shown = cli("show", out)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("state: salvaged\n")
    assert "accept length" in shown.stdout
    reported = cli("report", out)
    assert reported.exit_code == 0, reported.stderr
    assert "salvaged" in (out / "report.html").read_text(encoding="utf-8")


def test_ctrl_c_ends_with_130_and_a_closed_bundle(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _endless_run(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert stdout == ""
    assert stderr.endswith(f"workbench: what was measured until then is in {out}\nworkbench: interrupted\n")
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["state"], manifest["failure"]) == ("failed", "interrupted by the user")
    assert not (out / "lock").exists()
    assert cli("check", out).exit_code == 0
    shown = cli("show", out)
    assert shown.exit_code == 0
    assert shown.stdout.startswith("state: failed (interrupted by the user)\n")

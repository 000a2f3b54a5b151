"""The linter end to end: kernels written here, compiled by processes of their own, so no interpreter is in the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux only")

Cli = Callable[..., Result]

SPILLING = '''
import triton
import triton.language as tl


@triton.jit
def centre(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """All of x stays in registers until its sum is known: more than a thread may have."""
    lanes = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes)
    tl.store(y_ptr + lanes, x - tl.sum(x, 0) / BLOCK)
'''
WIDE = "centre:*fp32,*fp32,2048;num_warps=1,maxnreg=32"
NARROW = "centre:*fp32,*fp32,1024;num_warps=4"

TUNED = """
import sys
import triton
import triton.language as tl

print("a module may print")
print("on both", file=sys.stderr)


@triton.jit
def halved(x):
    return x * 0.5


@triton.autotune([triton.Config({"BLOCK": block}, num_warps=block // 128) for block in (128, 256)], key=["n"])
@triton.heuristics({"EVEN": lambda given: given["BLOCK"] % 256 == 0})
@triton.jit
def halve(x_ptr: tl.pointer_type(tl.float32), y_ptr: "*bf16", n: int, bias=None, stride=1, BLOCK: tl.constexpr = 1,
          EVEN: tl.constexpr = False):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i * stride) if EVEN else tl.load(x_ptr + i * stride, mask=i < n)
    tl.store(y_ptr + i, halved(x), mask=i < n)


@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


@triton.jit
def broken(x_ptr: "*fp32", BLOCK: tl.constexpr = 100):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)
"""

FILL = ("--signature", "fill:*i32,i32:16,BLOCK=64")


@pytest.fixture
def spilling(tmp_path: Path) -> Path:
    path = tmp_path / "spilling.py"
    path.write_text(SPILLING)
    return path


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.py"
    path.write_text(TUNED)
    return path


def rows(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def test_a_planted_spill_fails(cli: Cli, spilling: Path, tmp_path: Path) -> None:
    sarif = tmp_path / "s.sarif"
    arguments = ("--target", "sm_90", "--signature", WIDE, "--signature", NARROW)
    result = cli("kernels", "lint", spilling, *arguments, "--sarif", sarif)
    assert result.exit_code == 1, result.output
    assert "bytes of spill or stack a thread, 0 allowed; spill code stores" in result.stdout
    assert (
        "spilling.py:7: centre (x_ptr=*fp32,y_ptr=*fp32,BLOCK=2048;num_warps=1,num_stages=3,maxnreg=32) on sm_90"
        in result.stdout
    )
    assert "2 of 2 compiled, 1 out of bounds" in result.stdout
    (found,) = json.loads(sarif.read_text())["runs"][0]["results"]
    assert found["ruleId"] == "kernels/spill"
    assert found["locations"][0]["physicalLocation"]["region"]["startLine"] == 7


def test_a_baseline_pins_a_spill_and_fails_where_it_grows(cli: Cli, spilling: Path, tmp_path: Path) -> None:
    pinned = ("--target", "sm_90", "--signature", WIDE, "--baseline", tmp_path / "b.json")
    written = cli("kernels", "lint", spilling, *pinned, "--write-baseline")
    assert written.exit_code == 0, written.output
    assert "b.json: 1 rows" in written.stderr
    assert cli("kernels", "lint", spilling, *pinned).exit_code == 0
    spilling.write_text(SPILLING.replace("tl.arange(0, BLOCK)", "tl.arange(0, 2 * BLOCK)"))
    grown = cli("kernels", "lint", spilling, *pinned)
    assert grown.exit_code == 1
    assert "spill or stack rose from" in grown.stdout


def test_a_reason_in_the_sidecar_allows_a_spill(cli: Cli, spilling: Path, tmp_path: Path) -> None:
    sidecar = tmp_path / "s.toml"
    sidecar.write_text(
        '[[kernel]]\nname = "centre"\ntypes = {x_ptr = "*fp32", y_ptr = "*fp32"}\nconstants = {BLOCK = 2048}\n'
        'num_warps = 1\nmaxnreg = 32\nlabel = "one warp"\nspills = "it runs once"\n'
    )
    result = cli("kernels", "lint", spilling, "--target", "sm_90", "--signatures", sidecar)
    assert result.exit_code == 0, result.output
    assert "centre may spill: it runs once" in result.stdout
    assert "one warp" in result.stdout


def test_configurations_heuristics_and_defaults_complete_a_signature(cli: Cli, tuned: Path) -> None:
    result = cli("kernels", "lint", tuned, "--target", "sm_90,sm_100", "--only", "halve", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [(row["target"], row["num_warps"], row["origin"]) for row in data["rows"]] == [
        ("sm_90", 1, "inferred"),
        ("sm_100", 1, "inferred"),
        ("sm_90", 2, "inferred"),
        ("sm_100", 2, "inferred"),
    ]
    first, _, second, _ = (row["signature"] for row in data["rows"])
    head = "x_ptr=*fp32,y_ptr=*bf16,n=i32,bias=None,stride=1"
    assert first == f"{head},BLOCK=128,EVEN=False;num_warps=1,num_stages=3,num_ctas=1"
    assert second == f"{head},BLOCK=256,EVEN=True;num_warps=2,num_stages=3,num_ctas=1"
    assert all(row["limiter"] and row["registers"] > 0 for row in data["rows"])
    assert (data["schema"], data["tag"], data["findings"]) == ("workbench.kernels-lint/1", "estimated", [])


def test_a_signature_may_leave_arguments_to_the_kernel_and_replaces_configurations_it_names(
    cli: Cli, tuned: Path
) -> None:
    arguments = ("--only", "halve", "--signature", "halve:x_ptr=*fp16,BLOCK=512;num_warps=8", "--target", "sm_90")
    (row,) = rows(cli("kernels", "lint", tuned, *arguments, "--json"))
    assert row["signature"].startswith(
        "x_ptr=*fp16,y_ptr=*bf16,n=i32,bias=None,stride=1,BLOCK=512,EVEN=True;num_warps=8"
    )
    assert (row["num_warps"], row["origin"]) == (8, "given")


def test_what_does_not_compile_fails_and_the_rest_is_shown(cli: Cli, tuned: Path) -> None:
    result = cli("kernels", "lint", tuned, "--target", "sm_90", *FILL)
    assert result.exit_code == 1, result.output
    assert (
        "broken (x_ptr=*fp32,BLOCK=100;num_warps=4,num_stages=3) on sm_90: does not compile: ValueError: "
        in result.stdout
    )
    assert "power of 2 (line 32)" in result.stdout
    assert "left out: halved returns a value; --only halved or a signature lints it" in result.stdout
    assert "a module may print" not in result.output
    assert "3 of 4 compiled, 1 out of bounds" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "tuned.py:26: fill: not known: x_ptr, n, BLOCK; give --signature 'fill:x_ptr=*fp32,n=*fp32,BLOCK=128'"),
        (("--signature", "fil:i32"), "--signature: there is no kernel fil; there are"),
        (("--only", "fil"), "--only: there is no kernel fil"),
        (("--signature", "fill:*i32,i32,BLOK=1"), "--signature: fill: has no argument BLOK; did you mean 'BLOCK'?"),
        (("--signature", "fill:*i32,i32,i32"), "fill: BLOCK is a constexpr; give its value: BLOCK=128"),
        (("--signature", "fill:1,2,3,4"), "fill: 4 arguments for 3: x_ptr, n, BLOCK"),
        (("--signature", "fill:*i32,x_ptr=*i32"), "fill: x_ptr is given by place and by name"),
        ((*FILL, *FILL), "fill: the signature x_ptr=*i32,n=i32:16,BLOCK=64;num_warps=4,num_stages=3 is there twice"),
        (("--target", "sm_1"), "--target sm_1: is no target"),
        (("--write-baseline",), "--write-baseline: where to is not said; add --baseline FILE"),
        (("--baseline", "none.json"), "none.json: cannot be read"),
    ],
)
def test_what_is_not_known_is_asked_for(cli: Cli, tuned: Path, arguments: tuple[str, ...], line: str) -> None:
    result = cli("kernels", "lint", tuned, *arguments)
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"import sys; sys.exit('bye')", "cannot be imported: SystemExit: bye (line 1)"),
        (b"import os; os._exit(3)", "importing it ended the process with exit code 3"),
        (b"import os; os.abort()", "importing it ended with signal 6"),
        (b"raise ValueError('\\x1b[31m\\nno')", "cannot be imported: ValueError: \\x1b[31m no (line 1)"),
        (b"\n\nimport not_there_at_all", "No module named 'not_there_at_all' (line 3); install it"),
        (b"from . import x", "name the module instead of the file"),
        (b"def f(:", "cannot be imported: SyntaxError"),
        (b"\x00\xff", "cannot be imported: SyntaxError"),
        (b"x = 1", "holds no Triton kernel"),
        (b"import time; time.sleep(60)", "importing it took longer than 1 s"),
    ],
)
def test_a_file_that_cannot_be_imported_gets_one_line(cli: Cli, tmp_path: Path, source: bytes, line: str) -> None:
    path = tmp_path / "bad.py"
    path.write_bytes(source)
    result = cli("kernels", "lint", path, *(("--timeout", "1") if b"sleep" in source else ()))
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("subject", "line"),
    [
        ("none.py", "none.py: no such file"),
        ("no-module", "is neither a .py file nor a module's name"),
        ("not_there_at_all", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_subject_that_is_none(cli: Cli, subject: str, line: str) -> None:
    result = cli("kernels", "lint", subject)
    assert result.exit_code == 2
    assert line in result.stderr


def test_without_a_subject_it_is_the_projects_kernels(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "kernels", "lint", "--target", "sm_90,sm_100", "--only", "verify_greedy", "--only", "quantise", "--json"
    )
    assert result.exit_code == 0, result.output
    assert [(row["kernel"], row["target"], row["origin"]) for row in rows(result)] == [
        ("quantise", "sm_90", "catalogue"),
        ("quantise", "sm_100", "catalogue"),
        ("verify_greedy", "sm_90", "catalogue"),
        ("verify_greedy", "sm_100", "catalogue"),
    ]
    assert rows(result)[0]["file"].endswith("kernels/live_quant.py")
    assert cli("kernels", "lint", "--only", "none").exit_code == 2
    assert cli("kernels", "lint", "--signature", "quantise:i32").exit_code == 2

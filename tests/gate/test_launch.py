import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from workbench.errors import InputError, UnfitError
from workbench.gate.launch import start
from workbench.gate.tree import Tree

MakeTree = Callable[[str], Tree]


@pytest.fixture
def stand_in(tmp_path: Path) -> MakeTree:
    """``stand_in("exit(3)")``: a tree whose ``workbench`` command is that script."""

    def make(script: str) -> Tree:
        package = tmp_path / "tree" / "workbench"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(script)
        return Tree("old", package.parent, "c0ffee" * 6, dirty=False)

    return make


def test_the_tree_is_asked_to_run_the_scenario(stand_in: MakeTree, tmp_path: Path) -> None:
    tree = stand_in("import sys; print(sys.argv[1:])")
    problem, seconds, other = start(tree, tmp_path / "s.toml", tmp_path / "b", timeout=60)
    assert problem == ""
    assert seconds > 0
    assert other is None or other >= 0
    expected = ["run", str(tmp_path / "s.toml"), "--out", str(tmp_path / "b"), "--no-report"]
    assert (tmp_path / "b.log").read_text() == f"{expected}\n"


@pytest.mark.parametrize(("code", "error"), [(2, InputError), (4, UnfitError)])
def test_a_refusal_is_not_tried_again(stand_in: MakeTree, tmp_path: Path, code: int, error: type[Exception]) -> None:
    tree = stand_in(f"print('workbench: error: depth: wrong'); exit({code})")
    with pytest.raises(error, match=r"old \(c0ffeec0ffee\): .*: depth: wrong; see .*b\.log"):
        start(tree, tmp_path / "s.toml", tmp_path / "b", timeout=60)


def test_a_crash_is_a_problem_with_its_last_line(stand_in: MakeTree, tmp_path: Path) -> None:
    tree = stand_in("import os; print('half way', flush=True); os.abort()")
    problem, *_ = start(tree, tmp_path / "s.toml", tmp_path / "b", timeout=60)
    assert problem.startswith("ended with -6: half way")


def test_a_launch_that_hangs_is_ended_with_its_children(stand_in: MakeTree, tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path('pids').write_text(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600)\n"
    )
    began = time.monotonic()
    problem, *_ = start(stand_in(script), tmp_path / "s.toml", tmp_path / "b", timeout=3)
    assert problem == "took longer than 3 s"
    assert time.monotonic() - began < 60
    time.sleep(0.2)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert pid != os.getpid()
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

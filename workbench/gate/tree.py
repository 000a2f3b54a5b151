"""The code of one side: a commit checked out beside the repository, or the working tree as it is."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import workbench
from workbench.errors import InputError

WORKING_TREE = "."


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder with a ``workbench`` package. ``commit`` is None outside a repository, ``dirty``: changed since."""

    ref: str
    root: Path
    commit: str | None
    dirty: bool

    def __str__(self) -> str:
        short = self.commit[:12] if self.commit else "no commit"
        name = "working tree" if self.ref == WORKING_TREE else self.ref
        return f"{name} ({short}{', changed' if self.dirty else ''})"

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that imports this tree before anything installed."""
        path = os.pathsep.join(filter(None, (str(self.root), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": path}


@contextmanager
def open_tree(ref: str, folder: Path) -> Iterator[Tree]:
    """Give the tree of ``ref``, a commit of the repository around ``folder``, or of "." for its files as they are.

    A commit is checked out by ``git worktree`` into a temporary folder that is removed afterwards. Raises InputError
    where there is no such commit, no repository, or no workbench in it that Python would import.
    """
    if ref == WORKING_TREE:
        yield _checked(_working_tree(folder))
        return
    repository = _toplevel(folder)
    if repository is None:
        raise InputError(f"{ref!r}: neither a bundle nor a commit", hint=f"{folder} is not in a git repository")
    commit = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if commit is None:
        raise InputError(f"{ref!r}: neither a bundle nor a commit of {repository}", hint="see: git log --oneline")
    with tempfile.TemporaryDirectory(prefix="workbench-gate-") as temporary:
        root = Path(temporary) / "tree"
        _must(repository, "worktree", "add", "--detach", "--quiet", str(root), commit)
        try:
            yield _checked(Tree(ref, root, commit, dirty=False))
        finally:
            _must(repository, "worktree", "remove", "--force", str(root))


def _working_tree(folder: Path) -> Tree:
    """Return the repository's tree where it holds a workbench, else the one that runs this."""
    repository = _toplevel(folder)
    for root in filter(None, (repository, folder)):
        if (root / "workbench" / "__init__.py").is_file():
            return _described(root)
    return _described(Path(str(workbench.__file__)).parents[1])


def _described(root: Path) -> Tree:
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    changed = bool(commit and _git(root, "status", "--porcelain", "--untracked-files=no"))
    return Tree(WORKING_TREE, root, commit or None, changed)


def _checked(tree: Tree) -> Tree:
    """Return ``tree`` if a process in its environment imports it; otherwise both sides would run the same code."""
    if not (tree.root / "workbench" / "__init__.py").is_file():
        raise InputError(
            f"{tree.ref!r}: holds no workbench package, so its launches would not differ",
            hint="run both sides yourself and name their bundles",
        )
    script = "import sys, workbench; sys.stdout.write(workbench.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, env=tree.environment(), check=False
    )
    found = Path(done.stdout) if done.returncode == 0 else None
    if found is None or not found.resolve().is_relative_to(tree.root.resolve()):
        where = found or (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(f"{tree.ref!r}: Python does not import its workbench but {where}", hint="unset PYTHONPATH")
    return tree


def _toplevel(folder: Path) -> Path | None:
    found = _git(folder, "rev-parse", "--show-toplevel")
    return Path(found) if found else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, stripped; None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _must(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(f"git {' '.join(arguments[:2])} failed: {reason}", hint="free space, or: git worktree prune")

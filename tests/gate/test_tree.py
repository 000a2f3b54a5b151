import subprocess
import sys
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.gate.tree import open_tree


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose workbench says which commit it is of: "old" is tagged, "new" is checked out."""
    folder = tmp_path / "repository"
    package = folder / "workbench"
    package.mkdir(parents=True)
    _git(folder, "init", "--quiet")
    for version in ("old", "new"):
        (package / "__init__.py").write_text(f"VERSION = {version!r}\n")
        _git(folder, "add", ".")
        _git(folder, "commit", "--quiet", "-m", version)
        _git(folder, "tag", version)
    return folder


def _version(environment: dict[str, str]) -> str:
    script = "import workbench; print(workbench.VERSION)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.strip()


def test_a_commit_is_checked_out_beside_the_repository_and_removed(repository: Path) -> None:
    with open_tree("old", repository) as tree:
        assert _version(tree.environment()) == "old"
        assert not tree.root.is_relative_to(repository)
        assert (tree.commit, tree.dirty) == (_git(repository, "rev-parse", "old"), False)
        assert str(tree) == f"old ({str(tree.commit)[:12]})"
    assert not tree.root.exists()
    assert _git(repository, "worktree", "list").count("\n") == 0
    assert _git(repository, "status", "--porcelain") == ""


def test_it_is_removed_after_an_error_too(repository: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_tree("old", repository) as tree:
        raise KeyboardInterrupt
    assert not tree.root.exists()
    assert _git(repository, "worktree", "list").count("\n") == 0


def test_the_working_tree_is_used_as_it_is(repository: Path) -> None:
    with open_tree(".", repository) as tree:
        assert (tree.root.resolve(), tree.dirty) == (repository.resolve(), False)
    (repository / "workbench" / "__init__.py").write_text("VERSION = 'changed'\n")
    with open_tree(".", repository) as tree:
        assert tree.dirty
        assert _version(tree.environment()) == "changed"


def test_outside_of_a_repository_the_working_tree_is_the_workbench_that_runs(tmp_path: Path) -> None:
    with open_tree(".", tmp_path) as tree:
        assert tree.root == Path(__file__).parents[2]


@pytest.mark.parametrize("ref", ["no-such-branch", "--help", "-n"])
def test_an_unknown_commit_is_refused(repository: Path, ref: str) -> None:
    with pytest.raises(InputError, match="neither a bundle nor a commit of "), open_tree(ref, repository):
        pass


def test_a_commit_needs_a_repository(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not in a git repository"), open_tree("main", tmp_path):
        pass


def test_a_commit_without_a_workbench_is_refused(repository: Path) -> None:
    _git(repository, "rm", "-r", "--quiet", "workbench")
    _git(repository, "commit", "--quiet", "--allow-empty", "-m", "empty")
    with pytest.raises(InputError, match="holds no workbench package"), open_tree("HEAD", repository):
        pass


def test_a_workbench_that_cannot_be_imported_is_refused(repository: Path) -> None:
    (repository / "workbench" / "__init__.py").write_text("raise RuntimeError('broken')\n")
    message = "does not import its workbench but RuntimeError: broken"
    with pytest.raises(InputError, match=message), open_tree(".", repository):
        pass

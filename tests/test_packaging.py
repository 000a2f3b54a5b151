"""The layout that packaging rests on: links inside the package, and no generic module for anyone to import."""

import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("probes", "kernels", "dashboards", "scenarios", "reports")

in_checkout = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not run from a checkout")


@in_checkout
@pytest.mark.parametrize("name", LINKED)
def test_the_package_links_to_the_top_level_folder(name: str) -> None:
    link = ROOT / "workbench" / name
    assert link.is_symlink(), f"{link} must be a symbolic link: check out with core.symlinks=true"
    assert link.readlink() == Path("..") / name


@in_checkout
@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_not_packages_of_their_own(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists(), f"{name}/__init__.py would shadow other packages of that name"


@in_checkout
def test_a_process_started_in_the_checkout_does_not_take_our_kernels_for_hugging_faces() -> None:
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(ROOT) not in done.stdout


@in_checkout
def test_every_data_file_is_covered_by_package_data() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["workbench"]
    packaged = {path for pattern in patterns for path in (ROOT / "workbench").glob(pattern)}
    data = {
        path
        for entry in (ROOT / "workbench").iterdir()  # one by one, since rglob enters no link
        for path in (entry, *entry.rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert sorted(map(str, data - packaged)) == [], "pyproject's package-data lacks these"


def test_data_files_are_found_where_the_code_looks() -> None:
    root = files("workbench")
    assert (root / "scenarios" / "builtin" / "quickstart.toml").is_file()
    assert (root / "scenarios" / "prompts" / "held_out.jsonl").is_file()
    assert (root / "decode" / "shapes" / "nano.toml").is_file()
    assert (root / "py.typed").is_file()


def test_the_core_does_not_import_torch() -> None:
    modules = "workbench.scenario, workbench.trace.bundle, workbench.diagnose.summary, workbench.model_report"
    modules += ", workbench.ingest.bundle, workbench.diagnose.overview"
    code = f"import sys, {modules}; print(*(name for name in ('torch', 'triton', 'sglang') if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""

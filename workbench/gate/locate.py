"""Where a kernel is defined: file and line in a tree, so that a finding can be shown beside the code."""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("kernels", "workbench", "src", ".")
MAX_FILES = 5000
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Location:
    """A line of a file. ``path`` is relative to the tree, with forward slashes."""

    path: str
    line: int


def locate(kernel: str, root: Path | None) -> Location | None:
    """Return where a Triton or CUDA function called ``kernel`` is defined under ``root``; None where it is not found.

    Only a definition under exactly this name counts, and only where there is one: two would make it a guess.
    """
    if root is None or not re.fullmatch(r"[A-Za-z_]\w*", kernel):
        return None
    python = re.compile(rf"^[ \t]*def {kernel}\b", re.MULTILINE)
    cuda = re.compile(rf"__global__[^;{{}}]*?\b{kernel}\s*\(")
    found: dict[Path, Location] = {}
    for path in _sources(root):
        text = path.read_text(encoding="utf-8", errors="replace")
        match = (python if path.suffix == ".py" else cuda).search(text)
        if match:
            line = text.count("\n", 0, match.end()) + 1
            found[path.resolve()] = Location(path.relative_to(root).as_posix(), line)
    return next(iter(found.values())) if len(found) == 1 else None


def _sources(root: Path) -> list[Path]:
    """Return the source files of the first folder that exists; links are not followed."""
    folder = next(root / name for name in FOLDERS if (root / name).is_dir())
    paths = (path for suffix in ("py", "cu", "cuh") for path in folder.rglob(f"*.{suffix}"))
    kept = [path for path in paths if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_BYTES]
    return sorted(kept)[:MAX_FILES]

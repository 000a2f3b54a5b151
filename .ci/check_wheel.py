"""Every committed file of the package is in the wheel, and nothing else: ``check_wheel.py dist/….whl``."""

import subprocess
import sys
import zipfile
from pathlib import Path

LINKED = ("dashboards", "kernels", "probes", "reports", "scenarios")


def main(wheel: str) -> None:
    """Exit with the names that are missing or too many."""
    command = ["git", "ls-files", "-z", "workbench", *LINKED]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.split("\0") if name and not Path(name).is_symlink()}
    expected = {name if name.startswith("workbench/") else f"workbench/{name}" for name in tracked}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    missing, foreign = sorted(expected - packed), sorted(packed - expected)
    if missing or foreign:
        sys.exit(
            f"{wheel}\n  lacks {', '.join(missing) or 'nothing'}\n  holds uncommitted {', '.join(foreign) or 'nothing'}"
        )
    print(f"the wheel holds the {len(packed)} committed files of the package")


if __name__ == "__main__":
    main(sys.argv[1])

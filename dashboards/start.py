"""Starting a scenario from the dashboard: one process at a time, the same command a person would type."""

import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from workbench.errors import InputError
from workbench.scenario import scenario_names


class Starter:
    """Starts shipped scenarios as processes of their own; their bundles are written below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mutex = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, scenario: str) -> Path:
        """Start ``scenario`` and return the folder it will write. Raises InputError for any but a shipped scenario."""
        if scenario not in scenario_names():
            raise InputError(f"no shipped scenario {scenario[:60]!r}")
        with self._mutex:
            if self._process and self._process.poll() is None:
                raise InputError("a run started here is still going", hint="wait for it to end")
            folder = self._root / f"{scenario}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workbench", "run", scenario, "--out", str(folder), "--no-report"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        return folder

import subprocess
from pathlib import Path
from typing import Any

import pytest
from dash import Dash

from workbench.dashboards.app import create_app
from workbench.dashboards.context import Context
from workbench.dashboards.start import Starter
from workbench.errors import InputError
from workbench.runs.catalogue import Catalogue


class _Process:
    def __init__(self, command: list[str], **_: Any) -> None:
        self.command = command
        self.ended: int | None = None

    def poll(self) -> int | None:
        return self.ended


def test_one_shipped_scenario_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[_Process] = []

    def start(command: list[str], **fields: Any) -> _Process:
        started.append(_Process(command, **fields))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    starter = Starter(tmp_path)
    folder = starter("quickstart")
    assert folder.parent == tmp_path
    assert started[0].command[1:5] == ["-m", "workbench", "run", "quickstart"]
    with pytest.raises(InputError, match="still going"):
        starter("quickstart")
    started[0].ended = 0
    starter("quickstart")
    for name in ("../x", "/etc/passwd", "absent", "quickstart;id"):
        with pytest.raises(InputError, match="no shipped scenario"):
            starter(name)
    assert len(started) == 2


def _callbacks(app: Dash) -> str:
    return str(list(app.callback_map))


def test_read_only_there_is_nothing_that_could_start_a_run(tmp_path: Path) -> None:
    assert "start-says" not in _callbacks(create_app(Context(Catalogue(tmp_path))))
    assert "start-says" in _callbacks(create_app(Context(Catalogue(tmp_path), Starter(tmp_path))))

"""docs/reference/rungs.md names every rung and every fault that a scenario can ask for."""

import re
from pathlib import Path
from typing import get_args

from workbench.decode.rungs.faults import REGISTER_CAP
from workbench.scenario import RUNGS, Fault

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "rungs.md").read_text(encoding="utf-8")


def test_tables_are_complete() -> None:
    named = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE, re.MULTILINE)
    assert named[: len(RUNGS)] == list(RUNGS)
    assert set(named[-len(get_args(Fault)) :]) == set(get_args(Fault))
    assert f"{REGISTER_CAP} registers a thread" in PAGE

"""A process that an ncu profiles, as the stand-in for ncu reads it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def ncu_child(tmp_path: Path) -> Callable[[bool, Any], list[str]]:
    """A child as the fake reads it: a question that names where the answer goes."""

    def child(nsight: bool, metrics: Any) -> list[str]:
        asked = tmp_path / "question.json"
        asked.write_text(json.dumps({"answer": str(tmp_path / "answer.json"), "steps": 1}))
        return ["child", str(asked)]

    return child

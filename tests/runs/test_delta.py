import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.diagnose.summary import diagnose
from workbench.runs.delta import compare_runs
from workbench.trace.bundle import Bundle


def _steps(variant: str, wall_ns: int, committed: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"variant": variant, "run_pass": "clean", "step_id": first + index, "index": index, "warmup": False}
        | {"start_ns": index * wall_ns, "draft_end_ns": index * wall_ns, "end_ns": (index + 1) * wall_ns}
        | {"forward_end_ns": index * wall_ns + wall_ns // 2, "committed": committed, "drafted": 0, "accepted": 0}
        | {"width": 1}
        for index in range(6)
    ]


def test_the_chain_adds_up(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    before = _steps("plain", 1_000_000, 2) + _steps("old", 5, 1, 10)
    after = _steps("plain", 800_000, 3) + _steps("new", 5, 1, 10)
    base = make_run(tmp_path / "a", variants=("plain", "old"), tables={"steps": before})
    head = make_run(tmp_path / "b", variants=("plain", "new"), tables={"steps": after})
    with Bundle.open(base) as first, Bundle.open(head) as second:
        found = compare_runs(diagnose(first), diagnose(second))
    (one,) = found.variants
    assert one.log_speed == pytest.approx(math.log(one.head.tok_s.value / one.base.tok_s.value))
    assert math.exp(one.log_accept) == pytest.approx(1.5)
    assert sum(cause.change_ns for cause in one.causes) == pytest.approx(-200_000)
    assert (found.only_base, found.only_head) == (("old",), ("new",))

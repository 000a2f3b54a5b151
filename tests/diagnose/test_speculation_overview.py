import json
from collections.abc import Callable

import pytest

from workbench.diagnose.facts import Facts
from workbench.diagnose.iso_throughput import IsoPoint, iso_grid
from workbench.diagnose.speculation_overview import speculation_overview
from workbench.trace.bundle import Bundle

MS = 1_000_000


def rows(name: str, step_ms: int, accepted: list[int], depth: int) -> dict[str, list[dict[str, object]]]:
    """Two prompts, each with the same steps."""
    steps, sequences = [], []
    for prompt in range(2):
        sequence = prompt + (10 if depth else 0)
        for index, count in enumerate(accepted):
            start = 100 * MS * index
            times = {"start_ns": start, "draft_end_ns": start, "forward_end_ns": start + MS}
            counts = {"drafted": depth, "accepted": count, "committed": count + 1, "width": depth + 1, "context": 60}
            steps.append({"variant": name, "sequence_id": sequence, "index": index, **times, **counts})
            steps[-1]["end_ns"] = start + step_ms * MS
        sequences.append({"variant": name, "sequence_id": sequence, "prompt_id": f"p{prompt}"})
    return {"steps": steps, "sequences": sequences}


@pytest.fixture
def bundle(make_bundle: Callable[..., Bundle]) -> Bundle:
    plain, fast = rows("plain", 10, [0] * 10, 0), rows("fast", 20, [2, 1, 1, 0, 2] * 4, 2)
    tables = {name: plain[name] + fast[name] for name in plain}
    tables["tensors"] = [
        {"variant": "plain", "read_bytes": 1_000_000},
        {"variant": "fast", "read_bytes": 2_000_000, "width": 3},
    ]
    tables["roofs"] = [{"bytes_per_s": 10**9}]
    return make_bundle(tables, {"plain": {}, "fast": {"drafter": {"kind": "mtp", "depth": 2}}})


def test_everything_about_one_variant(bundle: Bundle) -> None:
    found = speculation_overview(Facts(bundle, "fast"))
    assert found is not None
    assert found.accept_length.value == pytest.approx(2.2)
    assert [rate.survival.value for rate in found.positions] == pytest.approx([0.8, 0.4])
    assert [group.name for group in found.prompts] == ["p0", "p1"]
    assert [group.name for group in found.contexts] == ["< 64"]
    assert found.against_plain is not None
    assert found.against_plain.needed.value == pytest.approx(2.0)
    assert found.cost is not None
    assert (found.cost.fit.plain.value, found.cost.fit.per_token.value) == pytest.approx((10, 5))
    assert found.depths is not None
    assert [row.tok_s for row in found.depths.rows] == pytest.approx([100, 1800 / 15, 2200 / 20])
    assert found.depths.best.depth == 1
    assert found.trade is None
    assert found.grid is not None
    assert {point.name: point.tok_s for point in found.grid.points} == pytest.approx({"plain": 100.0, "fast": 110.0})
    for point, read in zip(found.grid.points, (1e6, 2e6), strict=True):
        assert point.tok_s == pytest.approx(point.accept_length * point.gb_per_s * 1e9 / read)
    assert json.loads(json.dumps(found.to_json()))["best_depth"] == 1


def test_a_plain_variant_has_none(bundle: Bundle) -> None:
    assert speculation_overview(Facts(bundle, "plain")) is None


def test_lines_of_equal_throughput() -> None:
    grid = iso_grid(4e9, 8000.0, 3, (IsoPoint("v", 2.0, 4000.0, 2000.0),), columns=4)
    assert grid.accept_lengths == (1, 1.5, 2, 2.5, 3, 3.5, 4)
    assert grid.gb_per_s == (2000, 4000, 6000, 8000)
    assert grid.tok_s[2][1] == pytest.approx(2.0 * 4000 / 4)
    assert grid.tok_s[0][3] == pytest.approx(2000)
    assert grid.to_json()["points"][0]["name"] == "v"

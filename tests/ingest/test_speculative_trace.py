"""A real trace of SGLang with a block drafter, kept in tests/data."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.diagnose.busy import busy, busy_by_step
from workbench.diagnose.overview import overview
from workbench.ingest.bundle import ingest_kineto
from workbench.trace.bundle import Bundle

TRACE = Path(__file__).parents[1] / "data" / "sglang0517_qwen3_4layers_dflash_h200.json.gz"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("ingested") / "b"
    ingest_kineto(TRACE, folder)
    with Bundle.open(folder) as opened:
        yield opened


def test_every_event_is_kept_or_counted(bundle: Bundle) -> None:
    left_out = bundle.query("select sum(\"count\") n from losses where kind like 'not-kept-%'").to_pylist()[0]["n"]
    assert bundle.rows("kernels") + bundle.rows("host") + left_out == 6258
    assert bundle.query("select * from losses where severity <> 'info'").num_rows == 0


def test_drafter_and_target_are_told_apart(bundle: Bundle) -> None:
    """Each engine step replays two graphs: 36 kernels without experts draft, 84 with experts verify."""
    steps = bundle.query("select * from steps order by start_ns").to_pylist()
    assert len(steps) == 5
    assert {step["mark"] for step in steps} == {"step[TARGET_VERIFY bs=1]"}
    assert {(step["batch"], step["committed"]) for step in steps} == {(1, None)}
    sql = "select phase, count(*) n from kernels where name like '%fused_moe%' and step_id is not null group by phase"
    assert {row["phase"] for row in bundle.query(sql).to_pylist()} == {"forward"}
    sql = """select phase, count(*) n from kernels join host using (correlation)
             where host.name = 'cudaGraphLaunch' and kernels.step_id = 2 group by phase order by phase"""
    sql = sql.replace("phase", "kernels.phase")
    assert {row["phase"]: row["n"] for row in bundle.query(sql).to_pylist()} == {"draft": 36, "forward": 84}


def test_steps_follow_each_other_and_hold_their_idle_time(bundle: Bundle) -> None:
    rows = busy_by_step(bundle, "trace")[0]
    assert [row.end_ns for row in rows[:-1]] == [row.start_ns for row in rows[1:]]
    assert all(0.7 < row.idle_ns / row.window_ns < 0.9 for row in rows)  # host-bound: 71 % idle when not profiled
    (whole,) = busy(bundle, "trace")
    assert whole.busy_ns == 6_317_175


def test_the_overview_states_the_stretched_step(bundle: Bundle) -> None:
    found = overview(bundle)
    checks = {check.id: check for check in found.verdict.checks}
    assert set(checks) == {"graph-nodes-traced", "overlap-on-stream", "profiled-throughout"}
    assert checks["graph-nodes-traced"].count == 10
    assert "cudaGraphLaunch took 0.11 ms on the host (median; 0.07 to 0.15)" in checks["graph-nodes-traced"].message
    assert found.verdict.refusals.keys() == {"step-time", "kernel-sums", "bandwidth"}
    assert found.steps[0].steps == 5

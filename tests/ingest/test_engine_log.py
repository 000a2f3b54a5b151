"""Logs of SGLang and vLLM as counters, and their places on a clock."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.ingest.engine_log import read_log
from workbench.ingest.log_times import SECOND, LogClock

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"


def series(part: Any, name: str) -> list[float]:
    return [row["value"] for row in part.tables["counters"] if row["name"] == name]


def test_sglang() -> None:
    part = read_log(FOREIGN / "sglang.log", "sglang")
    assert series(part, "accept_length") == [3.4] * 12 + [1.1] * 4
    assert series(part, "cuda_graph") == [1.0] * 3 + [0.0] + [1.0] * 12
    assert series(part, "estimated_read_rate") == [9.12e12] * 16
    row = part.tables["counters"][-1]
    assert row["end_ns"] - row["start_ns"] == SECOND
    assert part.local_time
    # 1 sequence · 3.4 tokens / 4250 tok/s; the first line's interval is not known.
    assert len(part.clean_steps) == 15
    assert part.clean_steps[0].ns == pytest.approx(800_000)


def test_vllm() -> None:
    part = read_log(FOREIGN / "vllm.log", "vllm")
    assert series(part, "generation_throughput") == [251.0] * 3
    assert series(part, "accept_length") == [2.51] * 3
    assert series(part, "accept_rate_at_2") == [0.48] * 3
    assert series(part, "cache_usage") == pytest.approx([0.004] * 3)
    assert not part.local_time
    assert any(row["what"] == "the year, or the date" for row in part.limits)


@pytest.mark.parametrize(
    "line",
    [
        "[2025-10-22 10:27:57 TP0] Decode batch. #running-req: 1, #token: 186, token usage: 0.00, accept len: 1.95, "
        "accept rate: 0.49, cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0, ",
        "(Engine pid=4) [2026-03-22 13:53:37 DP1 TP0] Decode batch, #running-req: 1, #token: 4, token usage: 0.04, "
        "accept len: 1.95, cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0,",
        "[03:14:15] Decode batch [123], #running-req: 1, #full token: 9, full token usage: 0.1, accept len: 1.95, "
        "gen throughput (token/s): 178.86, #queue-req: 0",
    ],
)
def test_lines_of_other_versions(tmp_path: Path, line: str) -> None:
    (tmp_path / "l").write_text(line + "\n")
    part = read_log(tmp_path / "l", "sglang")
    values = {row["name"].split()[0]: row["value"] for row in part.tables["counters"]}
    assert (values["accept_length"], values["generation_throughput"]) == (1.95, 178.86)


def test_ranks_other_than_the_first_keep_their_names(tmp_path: Path) -> None:
    line = "[2026-01-01 00:00:0{} TP{}] Decode batch, #running-req: 1, gen throughput (token/s): 5.0"
    (tmp_path / "l").write_text("\n".join(line.format(at, rank) for at in range(3) for rank in range(2)))
    part = read_log(tmp_path / "l", "sglang")
    assert len(series(part, "generation_throughput")) == len(series(part, "generation_throughput TP1")) == 3


def test_lines_without_time_are_counted_and_none_left_is_an_error(tmp_path: Path) -> None:
    bare = "Decode batch, #running-req: 1, gen throughput (token/s): 5.0\n"
    (tmp_path / "l").write_text(bare + "[2026-01-01 00:00:00] " + bare)
    assert read_log(tmp_path / "l", "sglang").losses.count("line-without-time") == 1
    (tmp_path / "l").write_text(bare)
    with pytest.raises(InputError, match="nothing to read"):
        read_log(tmp_path / "l", "sglang")


def test_a_clock_goes_on_over_midnight_and_new_year() -> None:
    clock = LogClock()
    first, second = clock.read("[23:59:59 TP0] x"), clock.read("[00:00:01 TP0] x")
    assert first is not None
    assert second is not None
    assert second - first == 2 * SECOND
    clock = LogClock()
    first, second = clock.read("INFO 12-31 23:59:59 [a]"), clock.read("INFO 01-01 00:00:00 [a]")
    assert first is not None
    assert second is not None
    assert second - first == SECOND
    assert LogClock().read("[2026-02-30 00:00:00] no such day") is None


@given(st.text(max_size=300))
def test_no_text_upsets_the_clock(text: str) -> None:
    moment = LogClock().read(text)
    assert moment is None or isinstance(moment, int)

"""Results of load generators as counters without a time."""

import json
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.ingest.benchmark_json import read_aiperf, read_sglang_benchmark

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"


def test_aiperf() -> None:
    part = read_aiperf(FOREIGN / "profile_export_aiperf.json")
    rows = {row["name"]: (row["value"], row["unit"]) for row in part.tables["counters"]}
    assert rows["accept_length"] == (3.41, "tokens")
    assert rows["inter_token_latency p99"] == (1.9, "ms")
    assert rows["output_token_throughput"] == (812.5, "tokens/sec")
    assert {"key": "aiperf.aiperf_version", "value": "0.13.0"} in part.tables["env"]


def test_a_cancelled_benchmark_says_so(tmp_path: Path) -> None:
    document = json.loads((FOREIGN / "profile_export_aiperf.json").read_text()) | {"was_cancelled": True}
    (tmp_path / "x").write_text(json.dumps(document))
    assert read_aiperf(tmp_path / "x").losses.count("cancelled") == 1


def test_one_batch_server() -> None:
    part = read_sglang_benchmark(FOREIGN / "one_batch_server.jsonl")
    rows = {row["name"]: (row["value"], row["unit"]) for row in part.tables["counters"]}
    assert rows["accept_length [0]"] == (3.4, "tokens")
    assert rows["last_gen_throughput [1]"] == (13_600.0, "tok/s")
    assert [(step.batch, round(step.ns)) for step in part.clean_steps] == [(1, 1_000_000), (4, 1_000_000)]


@pytest.mark.parametrize(
    ("result", "ns"),
    [
        ({"batch_size": 1, "median_decode_latency": 0.004}, 4_000_000),
        ({"batch_size": 2, "last_gen_throughput": 500.0, "acc_length": -1}, 4_000_000),
        ({"batch_size": 0, "median_decode_latency": 0.004}, None),
        ({"output_throughput": 5.0, "mean_tpot_ms": 4.0, "accept_length": None}, None),
    ],
)
def test_a_step_is_said_only_where_the_batch_is_known(
    tmp_path: Path, result: dict[str, object], ns: float | None
) -> None:
    (tmp_path / "x").write_text(json.dumps(result))
    steps = read_sglang_benchmark(tmp_path / "x").clean_steps
    assert [round(step.ns) for step in steps] == ([] if ns is None else [ns])


def test_units_of_serving(tmp_path: Path) -> None:
    keys = {"mean_ttft_ms": "ms", "request_throughput": "requests/s", "output_throughput": "tok/s", "duration": "s"}
    (tmp_path / "x").write_text(json.dumps(dict.fromkeys(keys, 1.0)))
    part = read_sglang_benchmark(tmp_path / "x")
    assert {row["name"]: row["unit"] for row in part.tables["counters"]} == keys


def test_a_damaged_line_is_counted(tmp_path: Path) -> None:
    (tmp_path / "x").write_text((FOREIGN / "one_batch_server.jsonl").read_text() + '{"batch_size": ')
    assert read_sglang_benchmark(tmp_path / "x").losses.count("line-damaged") == 1


def test_nothing_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": "b"}')
    with pytest.raises(InputError, match="nothing to read"):
        read_sglang_benchmark(tmp_path / "x")
    with pytest.raises(InputError, match="no metric of AIPerf"):
        read_aiperf(tmp_path / "x")
    (tmp_path / "x").write_text('{"a": ')
    with pytest.raises(InputError, match="damaged JSON"):
        read_aiperf(tmp_path / "x")

import pytest

from workbench.ingest.markers import Marker, parse_marker


@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("step[DECODE bs=32]", Marker("sglang", "decode", 32, 32)),
        ("step[EXTEND bs=1 toks=64]", Marker("sglang", "prefill", 1, 64)),
        ("step[MIXED bs=2]", Marker("sglang", "mixed", 2)),
        ("step[TARGET_VERIFY bs=1]", Marker("sglang", "verify", 1)),
        ("step[TARGET_VERIFY bs=2 c_sq=6 c_sqsq=18 c_sqsk=90 c_sk=30]", Marker("sglang", "verify", 2, 6, 15)),
        ("step[IDLE bs=0]", Marker("sglang", "idle", 0, None)),
        ("draft_extend", Marker("sglang", "draft")),
        ("execute_context_0(0)_generation_32(32)", Marker("vllm", "decode", 32, 32)),
        ("execute_context_0(0)_generation_4(16)", Marker("vllm", "decode", 4, 16)),
        ("execute_context_3(128)_generation_2(50)", Marker("vllm", "mixed", 5)),
        ("execute_context_1(64)_generation_0(0)", Marker("vllm", "prefill", 1)),
        (
            "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)",
            Marker("vllm", "decode", 32, 32, 1024),
        ),
        ("ProfilerStep#12", Marker("torch", "profiler")),
    ],
)
def test_marks_of_the_engines(name: str, marker: Marker) -> None:
    assert parse_marker(name) == marker


@pytest.mark.parametrize(
    "name",
    ["", "step[DECODE", "step[SOMETHING bs=1]", "my step[DECODE bs=1]", "ProfilerStep#", "execute_context_", "drafts"],
)
def test_other_names_are_no_marks(name: str) -> None:
    assert parse_marker(name) is None


def test_absurd_numbers_are_no_numbers() -> None:
    assert parse_marker(f"step[DECODE bs={'9' * 5000}]") == Marker("sglang", "decode")
    assert parse_marker(f"execute_context_0(0)_generation_{'9' * 5000}(1)") is not None

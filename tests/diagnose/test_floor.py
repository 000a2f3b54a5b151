from collections.abc import Callable

import pytest

from workbench.diagnose.counted_floor import counted_floor
from workbench.diagnose.floor import Floor, load_floor
from workbench.diagnose.steps import Steps, load_steps
from workbench.trace.bundle import Bundle

TENSORS = [
    {"tensor_class": "qkv", "read_bytes": 600, "tag": "estimated"},
    {"tensor_class": "routed_experts", "read_bytes": 400, "tag": "estimated"},
    {"tensor_class": "kv_cache", "role": "kv", "read_bytes": 200, "tag": "estimated"},
    {"tensor_class": "dflash", "role": "draft", "read_bytes": 90, "tag": "modelled"},
    {"tensor_class": "routed_experts", "role": "draft", "read_bytes": 10, "tag": "modelled"},
    {"variant": "other", "read_bytes": 9999},
]
ROOFS = [{"bytes_per_s": 2_000_000_000}, {"device": "cuda", "bytes_per_s": 1}]


def test_the_floor_is_read_from_the_byte_model_and_the_roof(make_bundle: Callable[..., Bundle]) -> None:
    bundle = make_bundle({"tensors": TENSORS, "roofs": ROOFS})
    assert load_floor(bundle, "v", "cpu") == Floor(
        target_bytes=1200,
        draft_bytes=100,
        expert_bytes=400,
        bytes_per_s=2_000_000_000,
        roof_note="test",
        tag="modelled",
    )
    plain = make_bundle({"tensors": TENSORS[:3], "roofs": ROOFS})
    floor = load_floor(plain, "v", "cpu")
    assert floor is not None
    assert (floor.draft_bytes, floor.tag) == (0, "estimated")


def test_no_floor_without_byte_model_or_measured_roof(make_bundle: Callable[..., Bundle]) -> None:
    assert load_floor(make_bundle({"roofs": ROOFS}), "v", "cpu") is None
    assert load_floor(make_bundle({"tensors": TENSORS}), "v", "cpu") is None
    datasheet = [{"bytes_per_s": 7, "tag": "modelled"}]
    assert load_floor(make_bundle({"tensors": TENSORS, "roofs": datasheet}), "v", "cpu") is None
    assert load_floor(make_bundle({"tensors": TENSORS, "roofs": ROOFS}), "v", "tpu") is None


@pytest.fixture
def floor() -> Floor:
    return Floor(
        target_bytes=1200, draft_bytes=90, expert_bytes=400, bytes_per_s=10_000_000, roof_note="", tag="estimated"
    )


def test_a_step_s_floor_goes_with_its_own_experts(floor: Floor, make_steps: Callable[..., Steps]) -> None:
    # 800 bytes whatever happens, 400 with the mean of 10 experts; 100 ns a byte.
    steps = make_steps(experts=[5, 10, 15])
    assert floor.target_ns(steps).tolist() == [100_000, 120_000, 140_000]


@pytest.mark.parametrize("experts", [[-1, -1], [4, -1], [0, 0]])
def test_without_recorded_experts_every_step_is_the_average_one(
    floor: Floor, make_steps: Callable[..., Steps], experts: list[int]
) -> None:
    assert floor.target_ns(make_steps(experts=experts)).tolist() == [120_000, 120_000]


def test_only_steps_that_drafted_read_the_drafter(floor: Floor, make_steps: Callable[..., Steps]) -> None:
    assert floor.draft_ns(make_steps(drafted=[3, 0, 1])).tolist() == [9_000, 0, 9_000]


def test_nonsense_in_a_foreign_bundle_overflows_nothing(
    make_bundle: Callable[..., Bundle], make_steps: Callable[..., Steps]
) -> None:
    huge = [{"read_bytes": 2**62}, {"read_bytes": 2**62, "role": "draft"}]
    floor = load_floor(make_bundle({"tensors": huge, "roofs": [{"bytes_per_s": 1}]}), "v", "cpu")
    assert floor is not None
    steps = make_steps(drafted=[1] * 1000)
    assert int((floor.target_ns(steps) + floor.draft_ns(steps)).sum()) == 2 * 1000 * 10**13
    assert load_floor(make_bundle({"tensors": huge, "roofs": [{"bytes_per_s": 0}]}), "v", "cpu") is None


def test_without_a_measured_roof_the_practical_one_makes_the_floor_modelled(
    make_bundle: Callable[..., Bundle],
) -> None:
    roofs = [
        {"name": "datasheet", "bytes_per_s": 4_800, "tag": "modelled"},
        {"name": "practical", "bytes_per_s": 3_840, "tag": "modelled"},
    ]
    tensors = [{"read_bytes": 100, "tag": "estimated"}]
    found = load_floor(make_bundle({"roofs": roofs, "tensors": tensors}), "v", "cpu")
    assert found is not None
    assert (found.bytes_per_s, found.tag) == (3_840, "modelled")
    measured = load_floor(make_bundle({"roofs": [*roofs, {"bytes_per_s": 4_000}], "tensors": tensors}), "v", "cpu")
    assert measured is not None
    assert (measured.bytes_per_s, measured.tag) == (4_000, "estimated")
    datasheet = make_bundle({"roofs": roofs[:1], "tensors": tensors})
    assert load_floor(datasheet, "v", "cpu") is None


def test_weights_held_wider_than_stored_are_counted_beside_the_floor(make_bundle: Callable[..., Bundle]) -> None:
    experts = {"tensor_class": "routed_experts", "format": "mxfp4", "read_bytes": 100, "stored_bytes": 1000}
    roofs = [{"bytes_per_s": 10}]
    wide = load_floor(make_bundle({"roofs": roofs, "tensors": [experts | {"resident_bytes": 4000}]}), "v", "cpu")
    packed = load_floor(make_bundle({"roofs": roofs, "tensors": [experts | {"resident_bytes": 1000}]}), "v", "cpu")
    assert wide is not None
    assert packed is not None
    assert (wide.target_bytes, wide.expanded_bytes, wide.packed_experts) == (100, 300, False)
    assert (packed.target_bytes, packed.expanded_bytes, packed.packed_experts) == (100, 0, True)


def test_counted_bytes_bound_the_floor_where_no_experts_were_recorded(make_bundle: Callable[..., Bundle]) -> None:
    tensors = [
        {"tensor_class": "qkv", "read_bytes": 1000, "width": 8},
        {"tensor_class": "routed_experts", "read_bytes": 4000, "stored_bytes": 10_000, "resident_bytes": 10_000}
        | {"width": 8},
    ]
    step = {
        "run_pass": "clean",
        "warmup": False,
        "start_ns": 0,
        "draft_end_ns": 0,
        "forward_end_ns": 1000,
        "end_ns": 1000,
    }

    def found(read: int, **more: object) -> Floor:
        counter = {"name": "dram_read_bytes", "source": "pm_sampler", "start_ns": 0, "unit": "B"}
        counters = [counter | {"start_ns": 10 * at, "end_ns": 10 * at + 10, "value": read / 100} for at in range(100)]
        bundle = make_bundle({"roofs": ROOFS, "tensors": tensors, "steps": [step | more], "counters": counters})
        floor = counted_floor(bundle, "v", "cpu", load_steps(bundle, "v"))
        assert floor is not None
        return floor

    assert found(6000).target_bytes == 5000  # more than the bound is over-fetch, not floor
    bounded = found(3000)
    assert (bounded.target_bytes, bounded.expert_bytes, bounded.tag) == (3000, 2000, "estimated")
    least = 10_000 * (1 - 0.6 ** (1 / 8))  # the experts of one token
    assert found(1100).expert_bytes == round(least)
    assert found(3000, experts=[3]).target_bytes == 5000  # recorded: the byte model knows

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import InputError
from workbench.lint.occupancy import LIMITS, occupancy
from workbench.lint.target import DEFAULT, parse_targets


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "programs", "limiter"),
    [
        (90, 255, 0, 1, 8, "registers"),  # 8192 registers a warp: two warps on each of four parts
        (90, 132, 4096, 8, 1, "registers"),  # 4352 a warp: three a part, so 12 warps, not the 15 of an undivided file
        (90, 32, 0, 4, 16, "registers and warps"),
        (90, 24, 0, 4, 16, "warps"),
        (90, 16, 0, 1, 32, "programs"),
        (90, 32, 100 * 1024, 4, 2, "shared memory"),
        (90, 88, 38912, 4, 5, "registers and shared memory"),
        (90, 32, 227 * 1024, 4, 1, "shared memory"),
        (90, 32, 227 * 1024 + 1, 4, 0, "shared memory"),
        (90, 255, 0, 16, 0, "registers"),
        (80, 32, 163 * 1024, 4, 1, "shared memory"),
        (86, 16, 0, 1, 16, "programs"),
        (120, 32, 0, 8, 6, "warps"),
    ],
)
def test_the_scarcest_resource_sets_the_limit(
    target: int, registers: int, shared: int, warps: int, programs: int, limiter: str
) -> None:
    found = occupancy(target, registers=registers, shared_bytes=shared, num_warps=warps)
    assert (found.programs, found.limiter) == (programs, limiter)
    assert found.share == programs * warps / LIMITS[target].warps


@given(
    target=st.sampled_from(sorted(LIMITS)),
    registers=st.integers(8, 255),
    shared=st.integers(0, 240 << 10),
    warps=st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_more_of_anything_never_raises_it(target: int, registers: int, shared: int, warps: int) -> None:
    found = occupancy(target, registers=registers, shared_bytes=shared, num_warps=warps)
    assert 0 <= found.share <= 1
    assert found.programs * warps <= LIMITS[target].warps
    more = occupancy(target, registers=registers + 1, shared_bytes=shared + 128, num_warps=warps)
    assert more.programs <= found.programs


def test_targets_are_read_as_compilers_write_them() -> None:
    assert parse_targets(DEFAULT) == (90, 100, 103)
    assert parse_targets(" SM_90a, 100,sm90 ") == (90, 100)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hopper", "--target hopper: is no target; such as sm_90"),
        ("sm_99", "target sm_99: is unknown; one of sm_80"),
        (",", "--target: is empty"),
        ("sm_９0", "is no target"),
    ],
)
def test_a_target_that_is_none_is_named(text: str, line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_targets(text)
    assert line in str(caught.value)

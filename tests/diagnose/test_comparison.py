"""Two bundles against each other: the chain adds up, and says what was changed."""

from collections.abc import Callable

import pytest

from workbench.comparison.compare import compare
from workbench.diagnose.summary import diagnose
from workbench.errors import InputError
from workbench.reports import compare_text
from workbench.trace.bundle import Bundle

Make = Callable[..., Bundle]
SLOW = {"name": "moe_gemm_slow", "ns": 300_000}


@pytest.fixture
def pair(device_run: Make) -> tuple[Bundle, Bundle]:
    kernels = [{"name": "moe_gemm", "ns": 200_000}, {"name": "rms_norm_kernel", "ns": 2_000}]
    return device_run(kernels, clean_ns=400_000), device_run([*kernels, SLOW], clean_ns=700_000)


def test_the_chain_adds_up_to_the_change(pair: tuple[Bundle, Bundle]) -> None:
    base, head = pair
    (one,) = compare(base, head, diagnose(base), diagnose(head)).variants
    assert sum(cause.log for cause in one.causes) == pytest.approx(one.rate_all)
    assert one.speed.log == pytest.approx(one.length.log + one.rate.log)
    assert one.speed.log < 0
    changes = sum(cause.head_ns - cause.base_ns for cause in one.causes)
    assert changes == pytest.approx(one.head.accounting.wall_ns / 40 - one.base.accounting.wall_ns / 40)


def test_the_kernel_that_is_new_moved_most(pair: tuple[Bundle, Bundle]) -> None:
    base, head = pair
    (one,) = compare(base, head, diagnose(base), diagnose(head)).variants
    assert one.moved[0].name == "moe_gemm_slow"
    assert (one.moved[0].base_ns, one.moved[0].base_calls, one.moved[0].head_calls) == (0.0, 0.0, 1.0)
    assert one.moved[0].head_ns == pytest.approx(300_000, rel=0.05)
    assert "slower" in compare_text.sentence(one)


def test_a_bundle_against_itself_shows_no_change(pair: tuple[Bundle, Bundle]) -> None:
    base = pair[0]
    found = compare(base, base, diagnose(base), diagnose(base))
    (one,) = found.variants
    assert one.speed.log == 0
    assert not one.moved
    assert not found.machine
    assert all(change.change == "stayed" for change in one.findings)
    assert "no significant change" in compare_text.sentence(one)
    (row,) = compare_text.variant_rows(found)
    assert row[3].startswith("~ 0.0 %")


def test_a_variant_that_is_not_there_is_named(pair: tuple[Bundle, Bundle]) -> None:
    base, head = pair
    with pytest.raises(InputError, match="no measured variant 'fast'; it has v"):
        compare(base, head, diagnose(base), diagnose(head), ("v", "fast"))

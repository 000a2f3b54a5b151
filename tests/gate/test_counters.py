from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from workbench.gate.counters import SCALAR_READ, Comparison, Counter, compare_counters, is_pinned, read_counters
from workbench.trace.bundle import Bundle

MakeCode = Callable[..., Any]
MakeLaunch = Callable[..., Path]


def _read(path: Path, variant: str = "mtp") -> dict[str, Counter]:
    with Bundle.open(path) as bundle:
        return read_counters(bundle, variant, bundle.manifest.variants[0].settings)


def _one(found: tuple[Comparison, ...], name: str) -> Comparison:
    return next(counter for counter in found if counter.name == name)


def test_counters_of_a_cpu_run(code: MakeCode, launch: MakeLaunch) -> None:
    found = _read(launch(code(extra=((SCALAR_READ, 1000),), registers=40, spills=0)))
    assert {name: counter.value for name, counter in found.items() if name != "output"} == {
        "host operators": 3,
        "scalar reads": 1,
        "verify width": 3,
        "accept length": 2,
        "distinct experts": 4,
        "bytes": 5_000_000,
        "registers of expert_pass (sm_90a)": 40,
        "spill stores of expert_pass (sm_90a)": 0,
        "spill loads of expert_pass (sm_90a)": 0,
    }
    assert len(str(found["output"].value)) == 64


def test_device_counters_appear_with_the_device(code: MakeCode, launch: MakeLaunch) -> None:
    found = _read(launch(code(kernels=(("gemm<int>(float*)", 1000), ("norm", 500)), syncs=2, device="cuda")))
    assert (found["kernels"].value, found["syncs"].value, found["copies and fills"].value) == (2, 2, 0)
    assert found["kernels"].parts == {"gemm<int>(float*)": 1, "norm": 1}


def test_sampling_leaves_only_what_does_not_follow_from_acceptance(code: MakeCode, launch: MakeLaunch) -> None:
    path = launch(code(settings={"sampling": {"method": "sample"}}))
    assert _read(path).keys() == {"host operators", "scalar reads"}


def test_acceptance_is_pinned_where_it_is_greedy_or_simulated() -> None:
    assert is_pinned({"sampling": {"method": "greedy"}})
    assert is_pinned({"sampling": {"method": "sample"}, "drafter": {"kind": "simulated"}})
    assert not is_pinned({"sampling": {"method": "sample"}, "drafter": {"kind": "mtp"}})
    assert not is_pinned({})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"extra": (("aten::copy_", 10),)}, "host operators"),
        ({"extra": ((SCALAR_READ, 10),)}, "scalar reads"),
        ({"accepted": 0}, "accept length"),
        ({"width": 4}, "verify width"),
        ({"experts": 5}, "distinct experts"),
        ({"read_bytes": 10_000_001}, "bytes"),
        ({"output": "1"}, "output"),
        ({"registers": 41, "spills": 0}, "registers of expert_pass (sm_90a)"),
        ({"registers": 40, "spills": 8}, "spill stores of expert_pass (sm_90a)"),
        ({"kernels": (("gemm", 10), ("gemm", 10))}, "kernels"),
        ({"syncs": 2}, "syncs"),
    ],
)
def test_whatever_gets_worse_fails(code: MakeCode, launch: MakeLaunch, changes: dict[str, Any], name: str) -> None:
    common: dict[str, Any] = {"registers": 40, "spills": 0, "kernels": (("gemm", 10),), "syncs": 1}
    base, head = _read(launch(code(**common), name="a")), _read(launch(code(**common | changes), name="b"))
    found = _one(compare_counters([base], [head]), name)
    assert (found.status, found.fails) == ("worse", True)
    accepted = _one(compare_counters([base], [head], accept=[name.split(" of ")[0]]), name)
    assert (accepted.status, accepted.accepted, accepted.fails) == ("worse", True, False)
    if name != "output":
        assert _one(compare_counters([head], [base]), name).status == "better"
    assert not any(counter.fails for counter in compare_counters([base, base], [base]))


def test_the_names_that_moved_are_told_largest_first() -> None:
    base = {"kernels": Counter(Fraction(3), "launches/step", parts={"a": Fraction(2), "b": Fraction(1)})}
    head = {"kernels": Counter(Fraction(6), "launches/step", parts={"a": Fraction(1), "c": Fraction(5)})}
    found = compare_counters([base], [head])[0]
    assert found.moved == (("c", 5), ("a", -1), ("b", -1))


def test_a_counter_that_varies_on_one_side_is_told_and_never_fails() -> None:
    steady, other = ({"syncs": Counter(Fraction(value), "waits/step")} for value in (1, 2))
    for base, head in (([steady, other], [other]), ([steady], [other, steady])):
        found = compare_counters(base, head)[0]
        assert (found.status, found.fails) == ("varies", False)
    assert (
        compare_counters([steady, other], [other])[0].base,
        compare_counters([steady], [other, steady])[0].head,
    ) == (
        None,
        None,
    )


def test_a_counter_only_one_side_has_is_told() -> None:
    some = {"syncs": Counter(Fraction(1), "waits/step")}
    assert [counter.status for counter in compare_counters([{}], [some])] == ["new"]
    assert [counter.status for counter in compare_counters([some], [{}])] == ["gone"]

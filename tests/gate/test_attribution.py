import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from workbench.gate.attribution import Attribution, attribute, split_log_ratio
from workbench.gate.launch import Launch
from workbench.gate.measurement import Measurement, measure
from workbench.gate.pairs import Pair

MakeCode = Callable[..., Any]
MakeSides = Callable[..., tuple[list[Path], list[Path]]]

parts = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1e9), min_size=1)


def _pairs(base: list[Path], head: list[Path], variant: str = "mtp") -> list[Pair]:
    found: list[Pair] = []
    for number, paths in enumerate(zip(base, head, strict=True)):
        roof = found[0].base.roof if found else None
        sides = [measure(path, variant, roof=roof or 10_000_000_000) for path in paths]
        assert all(isinstance(side, Measurement) for side in sides), sides
        launches = (Launch("base", variant, number, 0, paths[0]), Launch("head", variant, number, 0, paths[1]))
        found.append(Pair(number, *sides, *launches))  # type: ignore[arg-type]
    return found


def _names(found: Attribution) -> list[str]:
    return [term.name for term in found.movers]


@given(parts, parts)
def test_the_split_closes(base: dict[str, float], head: dict[str, float]) -> None:
    before, after = math.fsum(base.values()), math.fsum(head.values())
    assume(before > 1e-3 and after > 1e-3)
    terms = split_log_ratio(base, head)
    assert math.fsum(terms.values()) == pytest.approx(-math.log(after / before), rel=1e-6, abs=1e-9)
    assert terms.keys() == base.keys() | head.keys()


@given(parts)
def test_what_does_not_change_contributes_nothing(base: dict[str, float]) -> None:
    assume(math.fsum(base.values()) > 1e-3)
    terms = split_log_ratio(base, {**base, "new": 5.0})
    assert all(value == 0 for name, value in terms.items() if name != "new")
    assert terms["new"] < 0


def test_the_chain_adds_up(make_sides: MakeSides, code: MakeCode) -> None:
    pairs = _pairs(*make_sides(code(), code(forward=1.2, draft=0.7, accepted=2)))
    found = attribute(pairs)
    assert found.total.log == pytest.approx(sum(pair.log_ratio("tok_s") for pair in pairs) / len(pairs))
    assert found.accept_length.log == pytest.approx(math.log(3 / 2))
    assert found.total.log == pytest.approx(found.accept_length.log + found.step_time.log)
    assert found.step_time.log == pytest.approx(math.fsum(term.log for term in found.causes))
    moved = math.fsum(term.log for term in found.movers) + found.other_movers
    assert found.total.log == pytest.approx(found.accept_length.log + moved + found.residual)


@pytest.mark.parametrize(
    ("change", "cause", "part"),
    [
        ({"forward": 1.2}, "host-bound", "time outside operators in forward"),
        ({"forward": 1.2, "operators": 1.3}, "compute", "aten::mm in forward"),
        ({"draft": 2.5}, "draft", "time outside operators in draft"),
        ({"verify": 2.5}, "verify-and-sampling", "time outside operators in verify"),
        ({"accepted": 0}, "accept length", None),
    ],
)
def test_a_planted_change_is_named(
    make_sides: MakeSides, code: MakeCode, change: dict[str, Any], cause: str, part: str | None
) -> None:
    found = attribute(_pairs(*make_sides(code(), code(**change), noise=0.002)))
    assert found.main.name == cause
    assert found.explained
    assert part is None or _names(found)[0] == part
    assert found.main.log / found.total.log == pytest.approx(1, abs=0.15)


def test_one_operator_more_is_a_mover_by_its_calls(make_sides: MakeSides, code: MakeCode) -> None:
    found = attribute(_pairs(*make_sides(code(), code(extra=(("aten::item", 10),)), noise=0.02)))
    mover = next(term for term in found.movers if term.name == "aten::item in forward")
    assert mover.calls == (0.0, 1.0)
    assert mover.certain


def test_kernels_are_preferred_and_matched_without_their_templates(make_sides: MakeSides, code: MakeCode) -> None:
    base = code(kernels=(("void gemm<128>(float*)", 3_000_000), ("norm", 1_000_000)), device="cuda")
    head = code(kernels=(("void gemm<256>(float*)", 5_000_000), ("norm", 1_000_000)), forward=1.25, device="cuda")
    found = attribute(_pairs(*make_sides(base, head, noise=0.001)))
    assert _names(found)[0] == "gemm"
    assert found.movers[0].calls == (1.0, 1.0)


def test_without_a_traced_pass_nothing_is_called_explained(make_sides: MakeSides, code: MakeCode) -> None:
    base, head = make_sides(code(), code(forward=1.2), noise=0.001, traced=0)
    found = attribute(_pairs(base, head))
    assert found.main.name == "unexplained"
    assert not found.explained
    assert found.not_measured


def test_one_pair_gives_terms_without_intervals(make_sides: MakeSides, code: MakeCode) -> None:
    found = attribute(_pairs(*make_sides(code(), code(forward=1.2), pairs=1)))
    assert (found.total.low, found.total.high) == (-math.inf, math.inf)
    assert found.movers == ()


def test_a_roof_measured_worse_in_one_launch_is_not_a_cause(make_sides: MakeSides, code: MakeCode) -> None:
    found = attribute(_pairs(*make_sides(code(roof=10_000_000_000), code(roof=5_000_000_000), noise=0.0)))
    assert all(term.log == pytest.approx(0) for term in found.causes)

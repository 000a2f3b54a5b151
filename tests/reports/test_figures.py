from collections import defaultdict
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
import pytest

from workbench.diagnose.speculation import break_even
from workbench.diagnose.steps import load_steps
from workbench.diagnose.summary import Diagnosis
from workbench.reports import figures
from workbench.reports.plotly_config import CONFIG, PATTERNS, TEMPLATES
from workbench.trace.bundle import Bundle


@pytest.fixture(scope="module", params=["made", "hostile"])
def drawn(request: pytest.FixtureRequest) -> tuple[Diagnosis, dict[str, Any]]:
    """Every figure of a bundle, by name."""
    bundle: Bundle = request.getfixturevalue(f"{request.param}_bundle")
    diagnosis: Diagnosis = request.getfixturevalue(f"{request.param}_diagnosis")
    names = [variant.name for variant in diagnosis.variants]
    steps = {name: load_steps(bundle, name) for name in names}
    against = {name: break_even(bundle, name) for name in names}
    return diagnosis, {
        "step_time": figures.step_time_figure(diagnosis),
        "speed": figures.speed_figure(diagnosis),
        "accept_length": figures.accept_length_figure(diagnosis, against),
        "acceptance": figures.acceptance_figure(diagnosis),
        "step_spread": figures.step_spread_figure(steps),
        "step_order": figures.step_order_figure(steps),
    }


Drawn = tuple[Diagnosis, dict[str, Any]]


def test_plotly_accepts_every_property(drawn: Drawn) -> None:
    for figure in drawn[1].values():
        for template in TEMPLATES.values():
            go.Figure({**figure, "layout": {**figure["layout"], "template": template}})


def test_axes_carry_their_unit(drawn: Drawn) -> None:
    titles = {name: figure["layout"]["xaxis"]["title"]["text"] for name, figure in drawn[1].items()}
    assert titles == {
        "step_time": "time of an average step (ms)",
        "speed": "speed (tok/s)",
        "accept_length": "accept length (tokens/step)",
        "acceptance": "draft position",
        "step_spread": "step time (ms, log)",
        "step_order": "time since the variant's first step (s)",
    }
    for name in ("acceptance", "step_spread", "step_order"):
        assert drawn[1][name]["layout"]["yaxis"]["title"]["text"].endswith(("(%)", "(ms, log)"))


def test_the_stacks_add_up_to_the_step_time(drawn: Drawn) -> None:
    diagnosis, made = drawn
    sums: dict[int, float] = defaultdict(float)
    for trace in made["step_time"]["data"]:
        for position, value in zip(trace["y"], trace["x"], strict=True):
            sums[position] += value
    for position, variant in enumerate(diagnosis.variants):
        assert sums[position] == pytest.approx(variant.accounting.wall_ns / variant.accounting.steps / 1e6)


def test_hatching_shows_the_tag(drawn: Drawn) -> None:
    diagnosis, made = drawn
    for trace in made["step_time"]["data"]:
        tags = [
            cause.tag
            for variant in diagnosis.variants
            for cause in variant.accounting.causes
            if cause.name == trace["name"]
        ]
        assert trace["marker"]["pattern"]["shape"] == [PATTERNS[tag] for tag in tags]
    assert len(set(PATTERNS.values())) == len(PATTERNS) == 3


def test_acceptance_is_a_share_of_the_steps_that_drafted(drawn: Drawn) -> None:
    diagnosis, made = drawn
    drafting = [variant for variant in diagnosis.variants if variant.positions]
    assert len(made["acceptance"]["data"]) == len(drafting) == 2
    for trace, variant in zip(made["acceptance"]["data"], drafting, strict=True):
        assert trace["x"] == [at.position for at in variant.positions]
        assert trace["y"] == [pytest.approx(100 * at.accepted / at.reached) for at in variant.positions]


def test_no_markup_of_a_name_reaches_plotly(drawn: Drawn) -> None:
    def texts(value: Any) -> Any:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from texts(inner)

    for figure in drawn[1].values():
        for text in texts(figure):
            assert "<" not in text.replace("<br>", "").replace("<extra>", "").replace("</extra>", "")
            assert len(text) < 1000


def test_the_ways_to_the_cloud_are_closed() -> None:
    assert CONFIG["showSendToCloud"] is False
    assert CONFIG["plotlyServerURL"] == ""
    assert CONFIG["displaylogo"] is False


def test_one_variant_without_drafts(make_bundle: Callable[..., Bundle], made_diagnosis: Diagnosis) -> None:
    alone = Diagnosis("", made_diagnosis.variants[:1], ())
    assert figures.acceptance_figure(alone)["data"] == []
    length = figures.accept_length_figure(alone, {"plain": None})
    assert [trace["type"] for trace in length["data"]] == ["bar"]
    assert "error_x" not in length["data"][0]

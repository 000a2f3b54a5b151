import math

from workbench.diagnose.roofline import Point, Roof, Roofline
from workbench.quantity import Quantity
from workbench.reports.roofline_figure import IMPOSSIBLE, roofline_figure


def _point(name: str, achieved: float, above: tuple[str, ...] = ()) -> Point:
    quantity = Quantity(achieved, "GB/s", "measured")
    per = Quantity(1e6, "B/token", "measured")
    return Point(name, "kernel", "traced", 1, 1000, per, quantity, per, above, (7,))  # type: ignore[arg-type]


def _roofline(*points: Point) -> Roofline:
    roof = Roof("measured", Quantity(4000.0, "GB/s", "measured", note="<b>x</b>"))
    return Roofline("v", (roof,), points, 0, 0, ())


def test_an_impossible_point_is_marked_and_names_are_inert() -> None:
    figure = roofline_figure(_roofline(_point("<b>evil</b>", 9000.0, ("measured",)), _point("fine", 100.0)))
    points = next(trace for trace in figure["data"] if trace.get("name") == "kernel")
    assert points["marker"]["symbol"] == ["x", "circle"]
    assert points["marker"]["color"][0] == IMPOSSIBLE
    assert "impossible" in points["hovertext"][0]
    assert points["customdata"] == [[7], [7]]
    assert "<b>" not in str(figure)


def test_diagonals_are_the_quotient_of_the_axes() -> None:
    figure = roofline_figure(_roofline(_point("a", 100.0)))
    for trace in figure["data"]:
        if "tok/s" in str(trace["hovertext"]):
            rates = {round(y * 1e9 / x, 6) for x, y in zip(trace["x"], trace["y"], strict=True)}
            assert len(rates) == 1
            assert math.log10(rates.pop()).is_integer()


def test_nothing_known_gives_an_empty_figure() -> None:
    figure = roofline_figure(Roofline("v", (), (), 0, 0, ("no roof",)))
    assert not [trace for trace in figure["data"] if trace.get("name")]

from dataclasses import replace

import pytest

from workbench.diagnose.accounting import Accounting, Cause
from workbench.diagnose.headline import fastest, headline, largest_loss
from workbench.diagnose.summary import Diagnosis, VariantSummary
from workbench.diagnose.wall_rate import WallRate
from workbench.quantity import Quantity, Tag


def variant(
    name: str = "plain", tok_s: float = 100, tag: Tag = "measured", share: float | None = 0.03
) -> VariantSummary:
    causes = (
        Cause("floor", 30, "modelled", ""),
        Cause("compute", 620, "estimated", ""),
        Cause("draft", 350, "measured", ""),
    )
    ms = Quantity(10, "ms", "measured")
    return VariantSummary(
        name=name,
        device="cpu",
        drafter="none",
        steps=10,
        tokens=10,
        tok_s=Quantity(tok_s, "tok/s", tag),
        accept_length=Quantity(1, "tokens/step", "measured"),
        step_p50=ms,
        step_p90=ms,
        roof_share=None if share is None else Quantity(share, "of the roof", "modelled"),
        bytes_per_step=None,
        positions=(),
        identity=None,
        accounting=Accounting(10, 1000, causes),
    )


def say(*variants: VariantSummary) -> str:
    return headline(Diagnosis("test", variants, ()))


def test_one_variant() -> None:
    assert say(variant("dflash", 123.4)) == (
        "dflash decodes at 123 tok/s (measured), 3.00 % of what this machine's memory bandwidth allows (modelled); "
        "the largest loss is compute (62 % of the step time, estimated)."
    )


def test_pauses_are_said_where_they_count() -> None:
    slow = replace(variant("splitk", 500), wall=WallRate(100, 200_000_000, 220_000_000))
    assert "allows (modelled); with the pauses between its steps it is 455 tok/s; the largest loss" in say(slow)
    quick = replace(slow, wall=WallRate(100, 200_000_000, 203_000_000))
    assert "pauses" not in say(quick)


def test_the_fastest_measured_variant_answers() -> None:
    three = (variant("a", 50), variant("b", 90), variant("pinned", 900, "modelled"))
    assert say(*three).startswith("b, the fastest of 2 variants with real acceptance, decodes at 90.0 tok/s")
    assert say(*three).endswith("; pinned, whose acceptance is simulated, reaches 900 tok/s.")
    assert say(*three[:2]).startswith("b, the fastest of 2 variants, decodes at 90.0 tok/s (measured)")
    assert say(*three[1:]).startswith("b, the only variant with real acceptance, decodes")
    assert fastest(Diagnosis("test", three[2:], ())).name == "pinned"


def test_an_unknown_roof_is_said_and_an_impossible_one_is_not_believed() -> None:
    assert "at an unknown distance from the roof" in say(variant(share=None))
    assert "120 % of this machine's memory bandwidth, which is impossible" in say(variant(share=1.2))


@pytest.mark.parametrize(
    ("causes", "words"),
    [
        ((Cause("floor", 10, "modelled", ""),), "there is no loss beyond the floor."),
        (
            (Cause("unexplained", 9, "measured", ""), Cause("draft", 1, "measured", "")),
            "90 % of the step time is unexplained.",
        ),
    ],
)
def test_losses_out_of_the_ordinary(causes: tuple[Cause, ...], words: str) -> None:
    assert say(replace(variant(), accounting=Accounting(1, 10, causes))).endswith(words)


def test_the_floor_is_no_loss() -> None:
    accounting = Accounting(1, 10, (Cause("floor", 9, "modelled", ""), Cause("draft", 1, "measured", "")))
    loss = largest_loss(accounting)
    assert loss is not None
    assert loss.name == "draft"


def test_names_are_written_as_asked() -> None:
    assert headline(Diagnosis("test", (variant("<b>"),), ()), name=lambda text: text.strip("<>")).startswith(
        "b decodes"
    )

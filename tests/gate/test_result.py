from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ExitCode
from workbench.gate.counters import Comparison
from workbench.gate.launch import Launch
from workbench.gate.noise import Noise
from workbench.gate.pairs import Rejected
from workbench.gate.result import GateResult, VariantResult, detectable_with
from workbench.gate.rule import Verdict, detectable, estimate

WORSE = Comparison("syncs", "waits/step", "a", "b", "worse")
ACCEPTED = Comparison("syncs", "waits/step", "a", "b", "worse", accepted=True)


def _variant(verdict: Verdict | None, *counters: Comparison, **changes: Any) -> VariantResult:
    values: dict[str, Any] = dict.fromkeys(("estimate", "adjusted", "attribution", "noise"))
    values |= dict.fromkeys(("pairs", "rejected", "findings"), ())
    return VariantResult(**(values | {"name": "v", "verdict": verdict, "reason": "", "counters": counters} | changes))


def _result(*variants: VariantResult, **changes: Any) -> GateResult:
    values: dict[str, Any] = {"scenario": "", "metric": "tok_s", "delta": 0.02, "level": 0.015, "max_pairs": 16}
    values |= {"base": {}, "head": {}, "machine": {}, "variants": variants, "notes": ()}
    return GateResult(**(values | changes))


@pytest.mark.parametrize(
    ("variants", "changes", "code"),
    [
        ([_variant(Verdict.PASS)], {}, ExitCode.OK),
        ([_variant(None)], {}, ExitCode.OK),
        ([_variant(Verdict.FAIL)], {}, ExitCode.REGRESSION),
        ([_variant(Verdict.FAIL)], {"advisory": True}, ExitCode.OK),
        ([_variant(None, WORSE)], {}, ExitCode.REGRESSION),
        ([_variant(Verdict.PASS, WORSE)], {"advisory": True}, ExitCode.REGRESSION),
        ([_variant(Verdict.PASS, ACCEPTED)], {}, ExitCode.OK),
        ([_variant(Verdict.INCONCLUSIVE)], {}, ExitCode.OK),
        ([_variant(Verdict.INCONCLUSIVE)], {"strict": True}, ExitCode.INCONCLUSIVE),
        ([_variant(Verdict.INCONCLUSIVE)], {"strict": True, "advisory": True}, ExitCode.OK),
        ([_variant(Verdict.UNFIT)], {}, ExitCode.UNFIT),
        ([_variant(Verdict.UNFIT)], {"advisory": True}, ExitCode.UNFIT),
        ([_variant(Verdict.UNFIT), _variant(Verdict.FAIL)], {}, ExitCode.REGRESSION),
        ([_variant(Verdict.UNFIT), _variant(Verdict.INCONCLUSIVE)], {"strict": True}, ExitCode.UNFIT),
    ],
)
def test_the_exit_code_follows_from_verdicts_and_counters(
    variants: list[VariantResult], changes: dict[str, bool], code: ExitCode
) -> None:
    assert _result(*variants, **changes).exit_code is code


def test_json_of_a_variant_without_pairs_says_why() -> None:
    rejected = (Rejected(Launch("head", "v", 0, 0, Path("v-01-head")), "crashed"),)
    (variant,) = _result(_variant(Verdict.UNFIT, reason="no luck", rejected=rejected)).to_json()["variants"]
    assert (variant["reason"], variant["base"], variant["estimate"]) == ("no luck", None, None)
    assert variant["rejected"] == [{"side": "head", "pair": 0, "bundle": "v-01-head", "reason": "crashed"}]


def test_what_could_be_seen_rests_on_calibrated_noise_first() -> None:
    found = estimate([0.01, -0.01, 0.02, -0.02])
    seen = detectable_with(_variant(Verdict.PASS, estimate=found), 0.02, 16)
    assert seen is not None
    assert (seen[0], seen[2]) == (detectable(found.sd, 4), "these pairs")
    noise = Noise(
        scenario="",
        variant="v",
        metric="tok_s",
        sd_launch=0.1,
        sd_pair=0.05,
        pairs=8,
        settings_id="",
        machine_id="",
        machine="",
        created="",
    )
    seen = detectable_with(_variant(Verdict.PASS, estimate=found, noise=noise), 0.02, 16)
    assert seen is not None
    assert (seen[0], seen[2]) == (detectable(0.05, 4), "calibrated")
    assert detectable_with(_variant(Verdict.UNFIT), 0.02, 16) is None
    before = detectable_with(_variant(Verdict.UNFIT, noise=noise), 0.02, 16)
    assert before is not None
    assert (before[0], before[2]) == (detectable(0.05, 16), "calibrated")

"""The formulas of speculation on numbers that others measured and published."""

import numpy as np
import pytest

from workbench.decode.bytes import step_bytes
from workbench.decode.precision import load_policy
from workbench.decode.presets import load_preset
from workbench.diagnose.depth import depth_table
from workbench.diagnose.quantisation_trade import Side, Trade, trade_of_bytes
from workbench.diagnose.step_cost import StepPoint, break_even_from_bytes, fit_step_cost

A800_BYTES_PER_S = 2.04e12


def test_sglang_29244_qwen3_30b_needs_an_accept_length_of_three() -> None:
    """Block 16 on one A800: 146 tok/s plain, 93 with DFlash at accept length 2.0 (sglang#29244)."""
    spec, policy = load_preset("qwen3-30b-a3b"), load_policy("bf16")
    one, sixteen = (step_bytes(spec, policy, width=width).read_bytes for width in (1, 16))
    assert sixteen == pytest.approx(39.8e9, rel=0.01)
    plain_ms, wide_ms = 1e3 / 146, 1e3 * 2.0 / 93
    assert 1e3 * sixteen / A800_BYTES_PER_S == pytest.approx(19.5, rel=0.01)

    measured = fit_step_cost([StepPoint(0, plain_ms), StepPoint(15, wide_ms)])
    assert measured.break_even(15) == pytest.approx(3.14, abs=0.01)
    assert not measured.separate

    foretold = break_even_from_bytes(plain_ms, one, sixteen, A800_BYTES_PER_S)
    assert foretold.low is not None
    assert foretold.high is not None
    assert foretold.low < 3.14 < foretold.high
    assert (foretold.low + foretold.high) / 2 == pytest.approx(3.1, abs=0.1)
    assert foretold.low > 2.0, "the bytes alone say that an accept length of 2.0 loses"


TENSORRT_LLM = {0: (1.00, 111), 1: (1.92, 198), 2: (2.58, 250), 3: (2.82, 253), 4: (2.99, 245), 5: (3.01, 239)}
"""DeepSeek-R1 FP4 with MTP on 8 B200: depth → accept length, tok/s (TensorRT-LLM's blog)."""


def test_tensorrt_llm_is_fastest_at_depth_three_although_acceptance_still_rises() -> None:
    lengths, rates = zip(*TENSORRT_LLM.values(), strict=True)
    cost = fit_step_cost([StepPoint(depth, 1e3 * length / rate) for depth, (length, rate) in TENSORRT_LLM.items()])
    table = depth_table(np.diff(lengths).tolist(), cost)
    assert table.best.depth == 3
    assert table.rows[-1].accept_length == pytest.approx(3.01)
    for row, rate in zip(table.rows, rates, strict=True):
        assert row.tok_s == pytest.approx(rate, rel=0.025)
    marginal = [cost.marginal_tok_s(depth, lengths[depth - 1], lengths[depth]) for depth in range(1, 6)]
    assert [value > 0 for value in marginal] == [True, True, True, False, False]
    # Half the table is enough to foretell the rest: the slope does not depend on how deep one looked.
    partial = fit_step_cost(
        [StepPoint(depth, 1e3 * TENSORRT_LLM[depth][0] / TENSORRT_LLM[depth][1]) for depth in (0, 1, 3)]
    )
    assert depth_table(np.diff(lengths).tolist(), partial).best.depth == 3


def test_vllm_47277_loses_at_every_depth() -> None:
    """step(k) = 37.7 + 35 + 26 k ms; acceptance of 82 to 88 % a position (vllm#47277)."""
    points = [StepPoint(depth, 37.7 + 35 * (depth > 0) + 26 * depth) for depth in (0, 1, 3, 7)]
    cost = fit_step_cost(points)
    assert (cost.plain.value, cost.fixed.value, cost.per_token.value) == pytest.approx((37.7, 35, 26))
    assert cost.separate
    assert cost.break_even(1) == pytest.approx(98.7 / 37.7)
    survival = np.cumprod([0.88] * 7).tolist()
    table = depth_table(survival, cost)
    assert table.best.depth == 0
    assert all(row.accept_length < row.break_even for row in table.rows[1:])
    assert cost.break_even(1) > 2, "not even a full acceptance would pay at depth 1"
    without_fixed = fit_step_cost([StepPoint(depth, 37.7 + 26 * depth) for depth in (0, 1, 3)])
    assert depth_table(survival, without_fixed).best.depth > 0


def test_the_bytes_that_glm_saves_do_not_pay_for_the_acceptance_it_lost() -> None:
    """7.13 → 4.47 tokens a step; expert-only FP4 cuts GLM-5.2's bytes at T = 1 from 41.4 to 30.8 GB."""
    fp8, fp4 = (
        step_bytes(load_preset("glm-5.2"), load_policy(name), width=1).read_bytes
        for name in ("fp8", "mxfp4-experts-fp8")
    )
    trade = trade_of_bytes(Side(7.13, 10.0, fp8), 4.47, fp4)
    assert trade.bytes_saved == pytest.approx(0.26, abs=0.01)
    assert trade.net_ratio == pytest.approx(4.47 / 7.13 * fp8 / fp4)
    assert 0.8 < trade.net_ratio < 0.9
    assert trade.break_even == pytest.approx(7.13 * fp4 / fp8)
    assert trade.break_even > 4.47
    assert trade.quantised.tok_s + trade.lost_tok_s == pytest.approx(1e3 * 7.13 / trade.quantised.step_ms)


def test_vllm_41745_wins_although_acceptance_falls() -> None:
    """5.37 → 5.19 tokens a step, 305 → 350 tok/s (vllm#41745)."""
    trade = Trade(Side(5.37, 1e3 * 5.37 / 305), Side(5.19, 1e3 * 5.19 / 350))
    assert trade.net_ratio == pytest.approx(350 / 305)
    assert trade.accept_ratio < 1 < trade.speed_ratio
    assert trade.break_even < 5.19
    assert trade.bytes_saved is None
    with pytest.raises(ValueError, match="bytes per step"):
        trade_of_bytes(trade.reference, 5.19, 1.0)

"""End to end: speculative sampling has the target's distribution over whole continuations."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from scipy import stats

from workbench.decode.dflash import DFlashModel
from workbench.decode.drafters.dflash import DFlashDrafter
from workbench.decode.drafters.mtp import MtpDrafter
from workbench.decode.drafters.ngram import NGramDrafter
from workbench.decode.drafters.none import NoDrafter
from workbench.decode.drafters.protocol import Drafter
from workbench.decode.engine import EagerEngine, SamplingRule, SequenceRecord
from workbench.decode.model import Target
from workbench.decode.mtp import MtpHead
from workbench.decode.sampling import probabilities

VOCAB, NEW, SAMPLES = 3, 4, 500
PROMPT = [0, 2, 1, 0, 2]
SHAPE = {
    "vocab": VOCAB,
    "mixers": ("sliding",),
    "moe": None,
    "dense_inter": 16,
    "dflash": {"layers": 1, "block": 3, "window": 4, "inter": 16, "taps": (0,)},
}


def exact(target: Target, rule: SamplingRule) -> dict[tuple[int, ...], float]:
    """The probability of each of the VOCAB^NEW continuations, from one forward over all of them."""
    texts = list(product(range(VOCAB), repeat=NEW))
    with torch.no_grad():
        hidden, _, _ = target(torch.tensor([[*PROMPT, *text] for text in texts]))
    rows = probabilities(target.logits(hidden[:, len(PROMPT) - 1 : -1]), rule.temperature, rule.top_p).double()
    chosen = rows.gather(-1, torch.tensor(texts)[..., None]).squeeze(-1).prod(-1)
    return dict(zip(texts, chosen.tolist(), strict=True))


def p_value(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the counts, continuations that are rare put together so that each class expects five at least."""
    assert all(expected[text] > 0 for text in observed)
    counts, means, rest = [], [], [0, 0.0]
    for text, probability in expected.items():
        if probability * SAMPLES >= 5:
            counts.append(observed[text])
            means.append(probability * SAMPLES)
        else:
            rest = [rest[0] + observed[text], rest[1] + probability * SAMPLES]
    if rest[1] > 5:
        counts.append(int(rest[0]))
        means.append(rest[1])
    total = sum(means)
    assert len(counts) > 20
    return float(stats.chisquare(counts, [mean * sum(counts) / total for mean in means]).pvalue)


@pytest.mark.parametrize(("kind", "top_p"), [("none", 1.0), ("ngram", 1.0), ("mtp", 1.0), ("dflash", 0.9)])
def test_continuations_have_the_target_s_distribution(
    tiny_target: Callable[..., Target],
    tiny_mtp: Callable[..., MtpHead],
    tiny_dflash: Callable[..., DFlashModel],
    kind: str,
    top_p: float,
) -> None:
    target = tiny_target(7, **SHAPE)
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "ngram": lambda: NGramDrafter(depth=2, order=2),
        "mtp": lambda: MtpDrafter(target, tiny_mtp(target), depth=2, capacity=16),
        "dflash": lambda: DFlashDrafter(target, tiny_dflash(target)),
    }
    rule = SamplingRule(temperature=1.8, top_p=top_p)
    engine = EagerEngine(target, drafters[kind](), rule, capacity=16)
    observed: Counter[tuple[int, ...]] = Counter()
    accepted = rejected = 0
    for seed in range(SAMPLES):
        engine.rule = SamplingRule(rule.temperature, rule.top_p, seed)
        record = SequenceRecord(len(PROMPT))
        for step in engine.decode(PROMPT, NEW, record):
            accepted += step.accepted
            rejected += step.accepted < step.drafted
        observed[tuple(record.tokens)] += 1
    if kind != "none":
        assert accepted > SAMPLES / 4
        assert rejected > SAMPLES / 4
    assert p_value(observed, exact(target, rule)) > 1e-3

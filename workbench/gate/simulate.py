"""The gate's error rates by simulation, with the rule of the gate itself. ``python -m workbench.gate.simulate``.

A launch is a mean of 40 windows of autocorrelated noise (sd 0.6 %, correlation 0.8), a noise of its own, and a random
walk of the machine; launches come in ABBA order. Drift per launch is 0.4 times the noise of a launch at 0.5 % and 1 %,
and 0.3 times above.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.gate.pairs import base_first
from workbench.gate.rule import DELTA, LEVEL, LOOKS, Family, Verdict, estimate, floor_log

Floats = npt.NDArray[np.float64]

WINDOWS, WINDOW_SD, WINDOW_CORRELATION = 40, 0.006, 0.8
RUNS = 1500


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of a launch and drift of the machine from launch to launch, both on the log scale."""

    launch: float
    drift: float


CASES = (
    (Noise(0.005, 0.002), 0.01),
    (Noise(0.01, 0.004), 0.02),
    (Noise(0.02, 0.006), 0.02),
    (Noise(0.05, 0.015), 0.02),
)
"""Noise and the floor it is gated with."""
CHANGES = (0.0, -0.02, -0.03, -0.05, -0.15)


@dataclass(frozen=True, slots=True)
class Rates:
    """Share of gates with each verdict, and the mean number of pairs used."""

    fail: float
    passed: float
    inconclusive: float
    pairs: float


def launches(count: int, noise: Noise, random: np.random.Generator) -> Floats:
    """Return ln(tok/s) of ``count`` launches of the same code, in the order they run."""
    shocks = random.normal(0, WINDOW_SD * np.sqrt(1 - WINDOW_CORRELATION**2), (count, WINDOWS))
    window = random.normal(0, WINDOW_SD, count)
    total = np.zeros(count)
    for index in range(WINDOWS):
        window = window if index == 0 else WINDOW_CORRELATION * window + shocks[:, index]
        total += window
    own = random.normal(0, noise.launch, count)
    walk = np.cumsum(random.normal(0, noise.drift, count))
    result: Floats = total / WINDOWS + own + walk
    return result


def log_ratios(pairs: int, change: float, noise: Noise, random: np.random.Generator) -> list[float]:
    """Return ln(head / base) of ``pairs`` pairs in ABBA order where the head is faster by ``change``, a share."""
    values = launches(2 * pairs, noise, random).reshape(pairs, 2)
    sign = np.array([1 if base_first(pair) else -1 for pair in range(pairs)])
    ratios: list[float] = ((values[:, 1] - values[:, 0]) * sign + np.log1p(change)).tolist()
    return ratios


def sequential(
    changes: Sequence[float], noise: Noise, random: np.random.Generator, *, delta: float = DELTA
) -> tuple[list[Verdict], int]:
    """Run one gate over variants with true ``changes``; return their verdicts and the pairs the last one took."""
    names = [str(index) for index in range(len(changes))]
    ratios = {name: log_ratios(LOOKS[-1], change, noise, random) for name, change in zip(names, changes, strict=True)}
    family = Family(names, delta=delta)
    used = 0
    for look in LOOKS:
        family.look({name: ratios[name][:look] for name in family.undecided})
        used = look
        if not family.undecided:
            break
    return list(family.verdicts.values()), used


def rates(change: float, noise: Noise, *, delta: float, runs: int, random: np.random.Generator) -> Rates:
    """Return the rates of one variant with a true ``change``."""
    found = [sequential([change], noise, random, delta=delta) for _ in range(runs)]
    verdicts = [verdict for (verdict,), _ in found]

    def share(wanted: Verdict) -> float:
        return verdicts.count(wanted) / runs

    pairs = sum(used for _, used in found) / runs
    return Rates(share(Verdict.FAIL), share(Verdict.PASS), share(Verdict.INCONCLUSIVE), pairs)


def false_red(variants: int, change: float, noise: Noise, *, runs: int, random: np.random.Generator) -> float:
    """Return the chance that at least one of ``variants`` fails, all with the same true ``change``."""
    found = (sequential([change] * variants, noise, random)[0] for _ in range(runs))
    return sum(Verdict.FAIL in verdicts for verdicts in found) / runs


def alone(variants: int, change: float, noise: Noise, *, runs: int, random: np.random.Generator) -> float:
    """Return the same chance were every variant judged without regard to the others."""
    found = ([sequential([change], noise, random)[0][0] for _ in range(variants)] for _ in range(runs))
    return sum(Verdict.FAIL in verdicts for verdicts in found) / runs


def blocked(change: float, noise: Noise, *, pairs: int, runs: int, random: np.random.Generator) -> float:
    """Return how often recorded bundles fail where all of the base ran before all of the head."""
    fails = 0
    for _ in range(runs):
        values = launches(2 * pairs, noise, random)
        ratios = (values[pairs:] - values[:pairs] + np.log1p(change)).tolist()
        fails += estimate(ratios).high < floor_log(DELTA)
    return fails / runs


def report(runs: int, seed: int) -> Iterator[str]:
    """Yield the lines of the tables, Markdown."""
    random = np.random.default_rng(seed)
    yield f"Looks after {', '.join(map(str, LOOKS))} pairs, one-sided level {LEVEL:g} a look."
    yield f"{runs} gates a cell, seed {seed}. Cells: fail / pass / inconclusive in % (mean pairs)."
    yield ""
    yield f"| noise of a launch | floor | {' | '.join(f'true {100 * change:+g} %' for change in CHANGES)} |"
    yield f"|---|---|{'---|' * len(CHANGES)}"
    for noise, delta in CASES:
        cells = [_cell(rates(change, noise, delta=delta, runs=runs, random=random)) for change in CHANGES]
        yield f"| {100 * noise.launch:g} % | {100 * delta:g} % | {' | '.join(cells)} |"
    noise, few = CASES[1][0], max(1, runs // 5)
    yield ""
    yield "Chance of at least one FAIL (noise 1 %, floor 2 %):"
    yield ""
    yield "| variants | true change | with Holm | without |"
    yield "|---|---|---|---|"
    for variants in (5, 20):
        for change in (0.0, -DELTA):
            together = false_red(variants, change, noise, runs=few, random=random)
            apart = alone(variants, change, noise, runs=few, random=random)
            yield f"| {variants} | {100 * change:+g} % | {_percent(together)} | {_percent(apart)} |"
    yield ""
    yield "Not interleaved, all of the base before all of the head (noise 1 %, floor 2 %): chance of FAIL"
    yield ""
    yield "| pairs | true +0 % | true -2 % |"
    yield "|---|---|---|"
    for pairs in (4, 8, 16):
        found = [blocked(change, noise, pairs=pairs, runs=runs, random=random) for change in (0.0, -DELTA)]
        yield f"| {pairs} | {' | '.join(map(_percent, found))} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Error rates of the gate's rule, by simulation.")
    parser.add_argument("--runs", type=int, default=RUNS, help="gates simulated per cell (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be 1 at least")
    for line in report(arguments.runs, arguments.seed):
        print(line, flush=True)


def _cell(found: Rates) -> str:
    shares = "/".join(
        f"{100 * share:.1f}".removesuffix(".0") for share in (found.fail, found.passed, found.inconclusive)
    )
    return f"{shares} ({found.pairs:.1f})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()

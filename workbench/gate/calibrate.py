"""How noisy launches of the same code are here: what a gate can see, known before it runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from workbench.errors import InputError
from workbench.gate.fingerprint import class_id, machine_of, settings_of
from workbench.gate.measurement import METRICS, Metric
from workbench.gate.noise import Noise
from workbench.gate.pairs import Pair, Plan, Progress, Rejected, run_pairs
from workbench.gate.rule import DELTA, Estimate, Family, estimate, floor_log
from workbench.gate.scenario_file import variant_toml
from workbench.gate.sides import TreeSide
from workbench.gate.tree import WORKING_TREE, open_tree
from workbench.scenario import Scenario
from workbench.trace.manifest import utc_now

MIN_LAUNCHES = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    """The noise of every variant and metric. ``drift``: the pairs judged as if their sides differed, per variant.

    ``stopped``: why a variant has no entry. ``rejected``: launches that could not be used.
    """

    noise: tuple[Noise, ...]
    drift: Mapping[str, Estimate]
    stopped: Mapping[str, str]
    rejected: tuple[Rejected, ...]

    def drifts(self, variant: str, delta: float = DELTA) -> bool:
        """Return whether the gate would have failed this variant on unchanged code."""
        return variant in self.drift and self.drift[variant].high < floor_log(delta)


def calibrate(
    scenario: Scenario,
    launches: int,
    out: Path,
    folder: Path,
    *,
    variants: Sequence[str] = (),
    redo: int = 2,
    launch_timeout: float = 1800.0,
    max_other_cpus: float = math.inf,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Launch every variant ``launches`` times with the code in ``folder``, in pairs as a gate does, into ``out``.

    Raises InputError for fewer than 8 launches or an unknown variant.
    """
    if launches < MIN_LAUNCHES or launches % 2:
        raise InputError(f"--launches {launches}: must be even and {MIN_LAUNCHES} at least", hint="pairs are measured")
    known = {variant.name: variant for variant in scenario.variants()}
    if unknown := [name for name in variants if name not in known]:
        raise InputError(f"--variants: no variant {unknown[0]!r}", hint=f"the scenario has {', '.join(known)}")
    names = list(variants) or list(known)
    out.mkdir(parents=True, exist_ok=True)
    files = {name: (out / f"{name}.toml").resolve() for name in names}
    for name, file in files.items():
        file.write_text(variant_toml(scenario, known[name]), encoding="utf-8")
    plan = Plan(metric="tok_s", looks=(launches // 2,), redo=redo, counters_only=True, max_other_cpus=max_other_cpus)
    with open_tree(WORKING_TREE, folder) as tree:
        base = TreeSide("base", tree, files, out.resolve(), launch_timeout)
        head = TreeSide("head", tree, files, out.resolve(), launch_timeout)
        runs = run_pairs({"base": base, "head": head}, names, Family(names), plan, progress)
    usable = {name: run.pairs for name, run in runs.items() if not run.stopped}
    noise = [noise_of(scenario.name, pairs, metric) for pairs in usable.values() for metric in METRICS]
    return Calibration(
        noise=tuple(noise),
        drift={name: estimate([pair.log_ratio("tok_s") for pair in pairs]) for name, pairs in usable.items()},
        stopped={name: run.stopped for name, run in runs.items() if run.stopped},
        rejected=tuple(one for run in runs.values() for one in run.rejected),
    )


def noise_of(scenario: str, pairs: Sequence[Pair], metric: Metric) -> Noise:
    """Return the noise of ``pairs`` of same-code launches, of which there must be two at least."""
    ratios = [pair.log_ratio(metric) for pair in pairs]
    speeds = [math.log(measured.speed(metric)) for pair in pairs for measured in (pair.base, pair.head)]
    facts = pairs[0].base.facts
    gpu, cpu = facts.get("machine.gpu.name"), facts.get("machine.cpu.model", "unknown processor")
    return Noise(
        scenario=scenario,
        variant=pairs[0].base.variant,
        metric=metric,
        sd_launch=stdev(speeds),
        # About zero: the same code has no effect, and a mean taken out would hide an order effect.
        sd_pair=math.sqrt(fmean([ratio**2 for ratio in ratios])),
        pairs=len(pairs),
        settings_id=class_id(settings_of(facts)),
        machine_id=class_id(machine_of(facts)),
        machine=str(gpu or cpu),
        created=utc_now(),
    )

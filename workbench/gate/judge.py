"""The gate, top to bottom: two sides → pairs of launches → counters, verdicts, reasons → one result."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from workbench.diagnose.wall_rate import SIGNIFICANT
from workbench.errors import InputError
from workbench.gate.attribution import attribute
from workbench.gate.counters import Comparison, compare_counters
from workbench.gate.findings import findings_of
from workbench.gate.fingerprint import Facts, differences, machine_of, one_sided
from workbench.gate.launch import SideName
from workbench.gate.measurement import Metric
from workbench.gate.noise import NoiseTable, find_noise
from workbench.gate.pairs import Plan, Progress, VariantRun, run_pairs
from workbench.gate.result import GateResult, VariantResult
from workbench.gate.rule import DELTA, LEVEL, LOOKS, Estimate, Family, Verdict, estimate, floor_log, looks_up_to
from workbench.gate.scenario_file import variant_toml
from workbench.gate.sides import RecordedSide, Side, TreeSide, find_bundles, recorded_side
from workbench.gate.tree import open_tree
from workbench.gate.wording import reason
from workbench.scenario import Scenario, Variant


@dataclass(frozen=True, slots=True)
class Request:
    """What to gate. ``base`` and ``head``: bundles, or one commit or "." each.

    ``scenario`` and ``out`` are needed where something is launched. ``pairs`` 0 compares the counters of one pair and
    judges no time. ``accept``: counters that may change. ``time_limit`` and ``launch_timeout`` are seconds.
    """

    base: tuple[str, ...]
    head: tuple[str, ...]
    scenario: Scenario | None = None
    out: Path | None = None
    variants: tuple[str, ...] = ()
    metric: Metric = "tok_s"
    pairs: int = LOOKS[-1]
    delta: float = DELTA
    redo: int = 2
    accept: tuple[str, ...] = ()
    allow_different: bool = False
    advisory: bool = False
    strict: bool = False
    fail_fast: bool = False
    noise: NoiseTable = field(default_factory=NoiseTable)
    time_limit: float = math.inf
    launch_timeout: float = 1800.0
    max_other_cpus: float = math.inf


def gate(request: Request, folder: Path, *, progress: Progress = lambda *_: None) -> GateResult:
    """Compare head with base and return what was found. ``folder``: where commits are looked up.

    Raises InputError where the sides cannot be used or compared, and UnfitError where this machine cannot run them.
    """
    deadline = time.monotonic() + request.time_limit
    with _open_sides(request, folder) as sides:
        variants = _variants(request, sides)
        recorded = _recorded(sides, variants)
        looks = _looks(request, sides, recorded)
        family = Family(variants, delta=request.delta)
        plan = Plan(
            metric=request.metric,
            looks=looks,
            redo=request.redo,
            deadline=deadline,
            counters_only=request.pairs == 0,
            allow_different=request.allow_different,
            max_other_cpus=request.max_other_cpus,
            recorded=recorded,
            keep_going=partial(_no_counter_fails, request.accept) if request.fail_fast else lambda _: True,
        )
        runs = run_pairs(sides, variants, family, plan, progress)
        progress("explain", 0, 1)
        root = head.tree.root if isinstance(head := sides["head"], TreeSide) else None
        results = tuple(_result(request, name, runs[name], family, root or folder) for name in variants)
        return GateResult(
            scenario=request.scenario.name if request.scenario else _scenario(results),
            metric=request.metric,
            delta=request.delta,
            level=LEVEL,
            max_pairs=looks[-1],
            base=sides["base"].describe(),
            head=sides["head"].describe(),
            machine=_machine(results),
            variants=results,
            notes=_notes(request, sides, results, runs),
            advisory=request.advisory,
            strict=request.strict,
        )


@contextmanager
def _open_sides(request: Request, folder: Path) -> Iterator[Mapping[SideName, Side]]:
    with ExitStack() as stack:
        sides: dict[SideName, Side] = {}
        values: tuple[tuple[SideName, tuple[str, ...]], ...] = (("base", request.base), ("head", request.head))
        for name, given in values:
            if bundles := find_bundles([value for value in given if value != "."]):
                if "." in given:
                    raise InputError(f"--{name}: bundles and the working tree", hint="give bundles, or one commit")
                sides[name] = recorded_side(name, bundles)
                continue
            if len(given) != 1:
                raise InputError(
                    f"--{name}: {len(given)} values that are not bundles", hint="give one commit or bundles"
                )
            if request.scenario is None or request.out is None:
                raise InputError(f"--{name} {given[0]!r}: not a bundle", hint="to launch a commit, name a --scenario")
            tree = stack.enter_context(open_tree(given[0], folder))
            request.out.mkdir(parents=True, exist_ok=True)
            files = _scenario_files(request.scenario, _chosen(request), request.out)
            sides[name] = TreeSide(name, tree, files, request.out.resolve(), request.launch_timeout)
        yield sides


def _chosen(request: Request) -> list[Variant]:
    """Return the scenario's variants that were asked for; all where none were named."""
    if request.scenario is None:
        return []
    variants = {variant.name: variant for variant in request.scenario.variants()}
    for name in request.variants:
        if name not in variants:
            raise InputError(f"--variants: no variant {name!r}", hint=f"the scenario has {', '.join(variants)}")
    return [variants[name] for name in request.variants or variants]


def _scenario_files(scenario: Scenario, variants: Sequence[Variant], out: Path) -> dict[str, Path]:
    files = {}
    for variant in variants:
        files[variant.name] = (out / f"{variant.name}.toml").resolve()
        files[variant.name].write_text(variant_toml(scenario, variant), encoding="utf-8")
    return files


def _variants(request: Request, sides: Mapping[SideName, Side]) -> tuple[str, ...]:
    """Return the variants both sides can give, in the scenario's order or the base's."""
    held = [list(side.by_variant) for side in sides.values() if isinstance(side, RecordedSide)]
    names = [variant.name for variant in _chosen(request)] or list(request.variants) or held[0]
    common = tuple(name for name in names if all(name in there for there in held))
    if missing := [name for name in request.variants if name not in common]:
        raise InputError(f"--variants: {missing[0]!r} is not in the bundles of both sides")
    if not common:
        raise InputError("base and head have no variant in common", hint="record the same scenario on both sides")
    return common


def _recorded(sides: Mapping[SideName, Side], variants: Sequence[str]) -> dict[str, int]:
    """Return how many pairs exist of each variant; nothing where both sides are launched."""
    held = [side for side in sides.values() if isinstance(side, RecordedSide)]
    counts = {variant: {side.name: len(side.by_variant[variant]) for side in held} for variant in variants}
    for variant, count in counts.items():
        if len(set(count.values())) > 1:
            told = ", ".join(f"{side} {number}" for side, number in count.items())
            raise InputError(f"launches of {variant!r} do not pair up: {told}", hint="give as many on both sides")
    return {variant: next(iter(count.values())) for variant, count in counts.items() if count}


def _looks(request: Request, sides: Mapping[SideName, Side], recorded: Mapping[str, int]) -> tuple[int, ...]:
    """Return when to look. Where both sides are recorded, once, at all there is; launched ones at each look."""
    if request.pairs == 0:
        return (1,)
    most = max(recorded.values(), default=request.pairs)
    return (most,) if all(side.recorded for side in sides.values()) else looks_up_to(min(most, request.pairs))


def _no_counter_fails(accept: Sequence[str], runs: Mapping[str, VariantRun]) -> bool:
    return not any(counter.fails for run in runs.values() for counter in _counters(run, accept))


def _counters(run: VariantRun, accept: Sequence[str]) -> tuple[Comparison, ...]:
    if not run.pairs:
        return ()
    base, head = ([getattr(pair, side).counters for pair in run.pairs] for side in ("base", "head"))
    return compare_counters(base, head, accept=accept)


def _result(request: Request, name: str, run: VariantRun, family: Family, root: Path) -> VariantResult:
    ratios = run.log_ratios(request.metric)
    found = estimate(ratios, delta=request.delta) if ratios else None
    adjusted = _clock_adjusted(run, ratios, request.delta)
    verdict: Verdict | None = family.verdicts[name]
    why = run.stopped
    if request.pairs == 0 and verdict is not Verdict.UNFIT:
        verdict, why = None, "counters only: the time was not judged"
    elif verdict is not None and adjusted and _disagree(verdict, adjusted, request.delta):
        verdict, why = Verdict.INCONCLUSIVE, "clocks: without the difference of the SM clocks the verdict would differ"
    counters = _counters(run, request.accept)
    attribution = attribute(run.pairs) if run.pairs else None
    why = why or reason(verdict, found, request.delta)
    return VariantResult(
        name=name,
        verdict=verdict,
        reason=why,
        estimate=found,
        adjusted=adjusted,
        pairs=tuple(run.pairs),
        rejected=tuple(run.rejected),
        counters=counters,
        attribution=attribution,
        noise=find_noise(request.noise, run.pairs[0].base.facts, request.metric) if run.pairs else None,
        findings=findings_of(name, verdict, why, counters, attribution, root),
    )


def _clock_adjusted(run: VariantRun, ratios: Sequence[float], delta: float) -> Estimate | None:
    clocks = [pair.clock_log_ratio() for pair in run.pairs]
    known = [clock for clock in clocks if clock is not None]
    if not ratios or len(known) != len(ratios):
        return None
    return estimate([ratio - clock for ratio, clock in zip(ratios, known, strict=True)], delta=delta)


def _disagree(verdict: Verdict, adjusted: Estimate, delta: float) -> bool:
    """Return whether taking out the clocks turns the verdict: a FAIL no longer shown, or a PASS that fails."""
    fails = adjusted.high < floor_log(delta)
    return (verdict is Verdict.FAIL and not fails) or (verdict is Verdict.PASS and fails)


def _scenario(results: Sequence[VariantResult]) -> str:
    """Return the scenario that the recorded launches name."""
    return next((pair.head.scenario for result in results for pair in result.pairs), "")


def _machine(results: Sequence[VariantResult]) -> Facts:
    first = next((pair.head.facts for result in results for pair in result.pairs), {})
    return {name.removeprefix("machine."): value for name, value in machine_of(first).items()}


def _notes(
    request: Request,
    sides: Mapping[SideName, Side],
    results: Sequence[VariantResult],
    runs: Mapping[str, VariantRun],
) -> tuple[str, ...]:
    """Return what a reader must know to trust the verdicts, each once."""
    notes: list[str] = []
    pairs = [pair for result in results for pair in result.pairs]
    for pair in pairs:
        notes += one_sided(pair.base.facts, pair.head.facts)
        if request.allow_different:
            notes += [f"different, as allowed: {found}" for found in differences(pair.base.facts, pair.head.facts)]
    recorded = {side.recorded for side in sides.values()}
    if len(recorded) == 2 or (recorded == {True} and _blocked(results)):
        notes.append("not interleaved: one side was recorded before the other, so drift of the machine reads as change")
    if request.pairs and not all(result.noise for result in results if result.pairs):
        notes.append("noise is not calibrated here for every variant (workbench gate calibrate)")
    if pairs and all(pair.clock_log_ratio() is None for pair in pairs):
        notes.append("no clock-adjusted ratio: clocks were not recorded")
    if any(pair.base.tag == "modelled" for pair in pairs):
        notes.append("acceptance is simulated: tok/s is modelled, its change is that of the engine alone")
    if request.metric != "wall_tok_s":
        notes += [line for result in results if (line := _pauses(result))]
    busy = [
        launch.other_cpus
        for pair in pairs
        for launch in (pair.base_launch, pair.head_launch)
        if launch.other_cpus is not None
    ]
    if busy and max(busy) >= 0.1:
        mean = math.fsum(busy) / len(busy)
        notes.append(
            f"other processes kept {mean:.1f} CPUs busy on average during the launches, {max(busy):.1f} at worst"
        )
    if rejected := sum(len(run.rejected) for run in runs.values()):
        notes.append(f"{rejected} launches were invalid and are not in the estimates")
    return tuple(dict.fromkeys(notes))


def _pauses(result: VariantResult) -> str:
    """Say that the pauses between steps, which no step's time holds, differ between the sides; empty if they do not."""
    if not result.pairs:
        return ""
    base, head = (math.fsum(getattr(pair, side).paused for pair in result.pairs) for side in ("base", "head"))
    base, head = base / len(result.pairs), head / len(result.pairs)
    if abs(head - base) < SIGNIFICANT:
        return ""
    return (
        f"{result.name}: {base:.1%} of the time lies between steps on base, {head:.1%} on head, which no step's time "
        "holds; --metric wall_tok_s judges it"
    )


def _blocked(results: Sequence[VariantResult]) -> bool:
    for result in results:
        base, head = ([getattr(pair, side).created for pair in result.pairs] for side in ("base", "head"))
        if len(base) > 1 and (max(base) < min(head) or max(head) < min(base)):
            return True
    return False

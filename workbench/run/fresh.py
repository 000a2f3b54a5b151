"""What instruments cost, measured in processes of their own that never profiled before.

Two processes a variant at most, before this one touches the device: two models would not fit. Each builds the model and
decodes once without counting. In one, passes without an instrument and under the counter sampler then take turns for
``instruments.fresh_rounds`` rounds (from the second on the sidecar is there, and idle, in clean passes too: starting
it takes seconds), before stamps have theirs; in the other the profiler is on for one pass. A pass is compared with the
clean ones beside it (``workbench.run.paired_cost``): one pass differs from the next, and one process from another, by
more than a sampler may cost.
"""

import json
import subprocess
import sys
from typing import Any

from workbench.decode.rungs.fit import resolve_device
from workbench.decode.rungs.plan import PLANS
from workbench.probes.protocol import Missing
from workbench.run.paired_cost import CLEAN, paired_cost
from workbench.run.state import Progress
from workbench.scenario import Variant
from workbench.trace.manifest import Perturbation

CHILD_SECONDS = 600.0

Costs = tuple[list[Perturbation], list[tuple[str, Missing]]]


def modes(variant: Variant) -> list[str]:
    """Return the modes that ``variant`` is measured in; ``none`` is first."""
    wanted = variant.instruments
    cuda = resolve_device(variant.engine.device, f"variant {variant.name!r}").type == "cuda"
    found = ["none"]
    if cuda and wanted.sampled_steps and (wanted.pm or wanted.nvml):
        found.append("sampled")
    if cuda and wanted.sampled_steps and wanted.lanes and PLANS[variant.engine.rung].persistent:
        found.append("laned")
    if variant.measure.traced_steps and (wanted.host or (cuda and wanted.kernels)):
        found.append("traced")
    return found


def processes(wanted: list[str], rounds: int) -> list[list[str]]:
    """Return the passes of each process in their order; the profiler shares with no other instrument.

    Passes of one token on an H200 differ by 1.6 %: the median of 16 ratios is known to about half a percent.
    """
    found = []
    sampled = [CLEAN, "sampled"] * rounds if "sampled" in wanted else []
    laned = [CLEAN, "laned"] if "laned" in wanted else []
    if sampled or laned:
        found.append([*sampled, *laned, CLEAN])
    if "traced" in wanted:
        found.append([CLEAN, "traced"])
    return found


def fresh_costs(variants: list[Variant], progress: Progress) -> Costs:
    """Return what each mode of each variant costs, and which could not be measured, by variant."""
    costs: list[Perturbation] = []
    missing: list[tuple[str, Missing]] = []
    for variant in variants:
        if not variant.instruments.fresh_process or variant.engine.kind != "workbench":
            continue
        wanted = processes(modes(variant), variant.instruments.fresh_rounds)
        for done, together in enumerate(wanted):
            progress(f"{variant.name}: cost of instruments, in processes of their own", done, len(wanted))
            passes = _child(variant, together)
            for mode in dict.fromkeys(mode for mode in together if mode != CLEAN):
                found = passes if isinstance(passes, str) else paired_cost(passes, mode)
                if isinstance(found, str):
                    what = f"cost of mode {mode!r} in a process of its own"
                    missing.append((variant.name, Missing("perturbation", what, found, "the cost within this process")))
                    continue
                costs.append(
                    Perturbation(
                        variant=variant.name,
                        instrument=found.instruments,
                        clean_step_ns=found.clean_ns,
                        traced_step_ns=found.with_ns,
                        fresh=True,
                        ratios=list(found.ratios),
                    )
                )
        progress(f"{variant.name}: cost of instruments, in processes of their own", len(wanted), len(wanted))
    return costs, missing


def _child(variant: Variant, together: list[str]) -> list[dict[str, Any]] | str:
    """Return the passes of a process in their order, or why there are none, in one line."""
    question = {"variant": variant.settings(), "folder": variant.folder, "modes": together}
    command = [sys.executable, "-m", "workbench.run.probe_child"]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its process took longer than {CHILD_SECONDS:g} s"
    found = _last_object(done.stdout)
    if found is None:
        line = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        return f"its process ended with {done.returncode}: {line[:200]}"
    if "error" in found:
        return str(found["error"])
    passes: list[dict[str, Any]] = found["passes"]
    return passes


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line; libraries may print before it."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

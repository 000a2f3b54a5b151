"""What instruments cost, measured in processes of their own that never profiled before.

Two processes a variant at most, before this one touches the device: two models would not fit. Each builds the model,
decodes once without counting, then the same steps without an instrument, and then under its own: the profiler in one,
stamps and the counter sampler (last, and a process of its own anyway) in the other. So nothing is compared across
processes, none of which profiled before, and a model is built twice, not once a mode.
"""

import json
import subprocess
import sys
from statistics import median
from typing import Any

from workbench.decode.rungs.fit import resolve_device
from workbench.decode.rungs.plan import PLANS
from workbench.probes.protocol import Missing
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


def processes(wanted: list[str]) -> list[list[str]]:
    """Return the modes that share a process, each begun by ``none``; the profiler shares with no other instrument."""
    sets = (("laned", "sampled"), ("traced",))
    return [["none", *on] for modes in sets if (on := [mode for mode in modes if mode in wanted])]


def fresh_costs(variants: list[Variant], progress: Progress) -> Costs:
    """Return what each mode of each variant costs, and which could not be measured, by variant."""
    costs: list[Perturbation] = []
    missing: list[tuple[str, Missing]] = []
    for variant in variants:
        if not variant.instruments.fresh_process or variant.engine.kind != "workbench":
            continue
        wanted = processes(modes(variant))
        for done, together in enumerate(wanted):
            progress(f"{variant.name}: cost of instruments, in processes of their own", done, len(wanted))
            answers = _child(variant, together)
            clean = answers["none"]
            for mode in together[1:]:
                answer = answers[mode]
                if isinstance(answer, str) or isinstance(clean, str):
                    why = answer if isinstance(answer, str) else str(clean)
                    what = f"cost of mode {mode!r} in a process of its own"
                    missing.append((variant.name, Missing("perturbation", what, why, "the cost within this process")))
                    continue
                costs.append(
                    Perturbation(
                        variant=variant.name,
                        instrument=answer[1],
                        clean_step_ns=clean[0],
                        traced_step_ns=answer[0],
                        fresh=True,
                    )
                )
        progress(f"{variant.name}: cost of instruments, in processes of their own", len(wanted), len(wanted))
    return costs, missing


def _child(variant: Variant, together: list[str]) -> dict[str, tuple[int, str] | str]:
    """Return for each mode the median step in ns and the instruments that were on; or why there is none, in one
    line."""
    question = {"variant": variant.settings(), "folder": variant.folder, "modes": together}
    command = [sys.executable, "-m", "workbench.run.probe_child"]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(together, f"its process took longer than {CHILD_SECONDS:g} s")
    found = _last_object(done.stdout)
    if found is None:
        line = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        return dict.fromkeys(together, f"its process ended with {done.returncode}: {line[:200]}")
    if "error" in found:
        return dict.fromkeys(together, str(found["error"]))
    return {mode: _median(found[mode]) for mode in together}


def _median(answer: dict[str, Any]) -> tuple[int, str] | str:
    if "error" in answer:
        return str(answer["error"])
    return round(median(answer["walls"])), ", ".join(answer["instruments"])


def _last_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line; libraries may print before it."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

"""What instruments cost, measured in processes of their own that never profiled before.

One process a variant and mode (none, sampled, laned, traced), before this one touches the device: two models would not
fit. Each decodes once without counting, then the same steps under its instruments.
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


def fresh_costs(variants: list[Variant], progress: Progress) -> Costs:
    """Return what each mode of each variant costs, and which could not be measured, by variant."""
    costs: list[Perturbation] = []
    missing: list[tuple[str, Missing]] = []
    for variant in variants:
        if not variant.instruments.fresh_process or variant.engine.kind != "workbench":
            continue
        wanted = modes(variant)
        clean: int | None = None
        for done, mode in enumerate(wanted):
            progress(f"{variant.name}: cost of instruments, in processes of their own", done, len(wanted))
            answer = _child(variant, mode)
            if isinstance(answer, str):
                what = f"cost of mode {mode!r} in a process of its own"
                missing.append((variant.name, Missing("perturbation", what, answer, "the cost within this process")))
            elif mode == "none":
                clean = answer[0]
            elif clean is not None:
                step_ns, names = answer
                costs.append(
                    Perturbation(
                        variant=variant.name, instrument=names, clean_step_ns=clean, traced_step_ns=step_ns, fresh=True
                    )
                )
        progress(f"{variant.name}: cost of instruments, in processes of their own", len(wanted), len(wanted))
    return costs, missing


def _child(variant: Variant, mode: str) -> tuple[int, str] | str:
    """Return the median step in ns and the instruments that were on; or why there is none, in one line."""
    question = {"variant": variant.settings(), "folder": variant.folder, "mode": mode}
    command = [sys.executable, "-m", "workbench.run.probe_child"]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=CHILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its process took longer than {CHILD_SECONDS:g} s"
    answer = _last_object(done.stdout)
    if answer is None:
        line = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        return f"its process ended with {done.returncode}: {line[:200]}"
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

"""Reading what ``device_split`` needs from a bundle."""

from dataclasses import replace

from workbench.diagnose.columns import Columns, load_columns
from workbench.diagnose.device_split import Split, split
from workbench.diagnose.floor import Floor
from workbench.diagnose.replays import without_replays
from workbench.diagnose.signals import MIN_SAMPLES, StepCounters, lane_time, step_counters
from workbench.diagnose.steps import RunPass, Steps, load_steps
from workbench.diagnose.timeline import build_timeline
from workbench.diagnose.traced_replays import apart, traced_replays
from workbench.hardware import Hardware, match_hardware
from workbench.trace.bundle import Bundle

PROFILED: tuple[RunPass, ...] = ("traced",)
"""The pass whose steps kernels were recorded in."""

SAMPLED: tuple[RunPass, ...] = ("sampled", "clean", "laned", "traced")
"""Passes in the order in which counters are looked for."""


def load_split(
    bundle: Bundle, variant: str, steps: Steps, floor: Floor | None, run_pass: RunPass, *, counted: bool = True
) -> Split | None:
    """Return the split of ``steps``; None where the trace holds no kernel within a traced step. ``counted``: whether
    hardware counters may be used."""
    if not len(steps) or not bundle.rows("kernels"):
        return None
    own = run_pass in PROFILED
    traced = steps if own else load_steps(bundle, variant, PROFILED[0])
    timeline = build_timeline(load_columns(bundle, "kernels", variant), traced)
    if timeline is None or (own and len(timeline.steps) < len(steps)):
        return None
    samples = without_replays(load_columns(bundle, "counters", variant))[0] if counted else None
    host = load_columns(bundle, "host", variant)
    found = split(
        timeline,
        host,
        load_columns(bundle, "syncs", variant),
        load_columns(bundle, "static", variant),
        steps,
        floor,
        hardware=find_hardware(bundle),
        counters=load_counters(bundle, variant, samples),
        lanes=lane_time(load_columns(bundle, "lanes", variant)),
        traced_only=own,
        host_in_verify=bundle.manifest.source != "run",
    )
    seen = traced_replays(timeline, found.gaps, host, clean_step(bundle, variant)) if own else None
    return replace(found, losses=apart(found.losses, seen, found.steps)) if seen else found


def clean_step(bundle: Bundle, variant: str) -> float | None:
    """Return how long a step of an ingested trace takes without the profiler, ns; None where nothing says it."""
    stated = (one for one in bundle.manifest.perturbation if one.variant == variant and one.clean_step_ns > 0)
    return next((float(one.clean_step_ns) for one in stated), None)


def load_counters(bundle: Bundle, variant: str, counters: Columns | None) -> StepCounters:
    """Return what the counters say of the pass that they were read in; nothing for None."""
    found = StepCounters(None, None, None, None, 0, 0)
    if counters is None or not len(counters):
        return found
    for run_pass in SAMPLED:
        found = step_counters(counters, load_steps(bundle, variant, run_pass))
        if found.samples >= MIN_SAMPLES or found.issue is not None or found.stalled:
            break
    return found


def find_hardware(bundle: Bundle) -> Hardware | None:
    """Return the description of the bundle's GPU, by the name in its device, environment or roofs."""
    manifest = bundle.manifest
    names = [str(manifest.device.get("name", ""))]
    gpus = manifest.environment.get("gpus")
    names += [str(gpu.get("name", "")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    if any(device in names[0].lower() for device in ("cpu",)):
        return None
    names += [str(row["note"]) for row in bundle.table("roofs").to_pylist()]
    return next((found for name in names if (found := match_hardware(name))), None)

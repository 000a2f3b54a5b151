"""Where the time of the steps went: named causes that add up to the wall time exactly.

Times come from the clean pass. What happened inside a phase is known from the traced pass only, and tracing stretches
a step; so the traced pass gives shares, and they are applied to clean times (tag ``estimated``). All in integer
nanoseconds: the last cause of a phase is what remains of it. Where the trace holds what a device ran, kernels and gaps
are split by evidence (``device_split``); else operators of the CPU stand in for them.
"""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.device_split import Split
from workbench.diagnose.floor import Floor
from workbench.diagnose.intervals import union_within
from workbench.diagnose.kernel_classes import short_name
from workbench.diagnose.kernel_losses import Loss
from workbench.diagnose.load_split import load_split
from workbench.diagnose.settings import UNKNOWN, variant_settings
from workbench.diagnose.steps import Ints, RunPass, Steps, load_steps
from workbench.quantity import Tag
from workbench.trace.bundle import Bundle

MEANING = {
    "floor": "bytes no step can avoid, at the roof",
    "compute": "kernels or operators of the verify forward beyond the floor, with no evidence why",
    "over-fetch": "bytes that the byte model does not hold: read twice, copied, or never used",
    "under-fill": "kernels on fewer SMs than the device has",
    "spill": "kernels whose registers spill into local memory",
    "instruction-bound": "kernels bound by instructions, such as decoding weights, while memory waits",
    "serialised": "activations quantised before a product begins, so that its loads wait",
    "tail": "last waves of CTAs that leave SMs empty",
    "barrier-wait": "CTAs of a persistent kernel that wait for each other",
    "small-kernels": "kernels too short to stream anything",
    "launch-gap": "device idle between kernels: launches, and nodes of a graph",
    "replay-boundary": "device idle before the first kernel of a graph replay, its launch under way",
    "cpu-sync": "device idle because the host had waited for it, or copied",
    "host-bound": "device idle because the host had not launched yet; on a CPU, forward time in which no operator ran",
    "draft": "drafting, beyond the floor of its own weights",
    "verify-and-sampling": "acceptance, sampling and commit",
    "collective": "communication between ranks",
    "profiler": "the profiler's own work",
    "unexplained": "time that nothing recorded accounts for",
}
"""Every cause, in the order in which they are listed."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One named part of the step time, summed over the steps. ``note`` says how it was obtained."""

    name: str
    total_ns: int
    tag: Tag
    note: str


@dataclass(frozen=True, slots=True)
class Accounting:
    """All causes of one variant. ``wall_ns`` is the steps' wall time and equals the sum of the causes."""

    steps: int
    wall_ns: int
    causes: tuple[Cause, ...]

    def __post_init__(self) -> None:
        total = sum(cause.total_ns for cause in self.causes)
        if total != self.wall_ns:
            raise AssertionError(f"causes add up to {total} ns, the steps to {self.wall_ns} ns")

    def share(self, cause: Cause) -> float:
        """Return the cause's part of the wall time, 0 to 1."""
        return cause.total_ns / self.wall_ns if self.wall_ns else 0.0


def account(
    bundle: Bundle,
    variant: str,
    steps: Steps,
    floor: Floor | None,
    run_pass: RunPass = "clean",  # noqa: S107
) -> Accounting:
    """Split ``steps`` of ``variant``, those of ``run_pass``, into causes."""
    found = load_split(bundle, variant, steps, floor, run_pass)
    return account_split(found) if found else _account_phases(bundle, variant, steps, floor)


def account_split(found: Split) -> Accounting:
    """Add up the losses of ``found`` by cause; notes name the largest."""
    causes = []
    for name in MEANING:
        losses = found.of(name)
        if losses:
            tag: Tag = "measured" if all(loss.tag == "measured" for loss in losses) else "estimated"
            causes.append(Cause(name, sum(loss.ns for loss in losses), tag, _note(losses)))
    return Accounting(found.steps, sum(loss.ns for loss in found.losses), tuple(causes))


def _note(losses: list[Loss]) -> str:
    first = losses[0]
    source = f"{short_name(first.source)}: " if first.source else ""
    more = f"; {len(losses) - 1} more" if len(losses) > 1 else ""
    return f"{source}{first.note}{more}"


def _account_phases(bundle: Bundle, variant: str, steps: Steps, floor: Floor | None) -> Accounting:
    """Split by phase marks, and the forward by how much of it operators covered."""
    draft = steps.draft_end - steps.start
    forward = steps.forward_end - steps.draft_end
    verify = steps.end - steps.forward_end
    zero = np.zeros_like(forward)
    draft_floor = np.minimum(floor.draft_ns(steps), draft) if floor else zero
    target_floor = np.minimum(floor.target_ns(steps), forward) if floor else zero
    rest = forward - target_floor
    busy = busy_share(bundle, variant)

    causes: list[Cause] = []
    if floor:
        total = int(draft_floor.sum() + target_floor.sum())
        causes.append(
            Cause("floor", total, floor.tag, f"{floor.bytes_note} over {floor.bytes_per_s / 1e9:.1f} GB/s measured")
        )
    if busy is None:
        note = "no trace of what ran: the verify forward cannot be split"
        note += "" if floor else "; no byte model or roof either"
        causes.append(Cause("unexplained", int(rest.sum()), "measured", note))
    else:
        # Operators hold the floor's bytes too, so they are compared with the whole forward, then reduced by it.
        compute = np.clip(np.rint(forward * busy).astype(np.int64) - target_floor, 0, rest)
        share = f"operators cover {busy:.1%} of the traced forward"
        causes.append(Cause("compute", int(compute.sum()), "estimated", share))
        causes.append(Cause("host-bound", int((rest - compute).sum()), "estimated", share))
    causes.append(Cause("draft", int((draft - draft_floor).sum()), "measured", "phase marks of the clean pass"))
    causes.append(Cause("verify-and-sampling", int(verify.sum()), "measured", "phase marks of the clean pass"))
    return Accounting(len(steps), int(steps.wall.sum()), tuple(causes))


def busy_share(bundle: Bundle, variant: str) -> float | None:
    """Return the share of the traced verify forwards during which at least one operator ran; None if not traced.

    None on a GPU as well: there an operator on the host only launches.
    """
    settings = variant_settings(bundle)[variant]
    device = settings["engine"]["device"]
    if "cpu" not in (str(bundle.manifest.device.get("name", "cpu")) if device in ("auto", UNKNOWN) else device):
        return None
    traced = load_steps(bundle, variant, "traced")
    operators = bundle.query("SELECT start_ns, end_ns FROM host WHERE variant = ? AND category = 'op'", [variant])
    if not len(traced) or not operators.num_rows:
        return None
    starts, ends = (operators.column(name).to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    window: Ints = traced.forward_end - traced.draft_end
    return float(union_within(starts, ends, traced.draft_end, traced.forward_end).sum() / window.sum())

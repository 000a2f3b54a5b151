"""Where the trusted steps' time went on the device: floor, kernels by evidence, gaps by who was late.

Structure (what ran, in which order, who launched it) comes from the traced steps, time and bytes from the trusted ones;
``clean_map`` brings the first onto the second. All losses add up to the wall time exactly, in integers.
"""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.clean_map import CleanMap, clean_map
from workbench.diagnose.columns import Columns, Flags
from workbench.diagnose.floor import Floor
from workbench.diagnose.gap_causes import GAP_CAUSES, GRAPH_LAUNCH, Gaps, gap_causes
from workbench.diagnose.kernel_classes import KernelClass, kernel_classes
from workbench.diagnose.kernel_losses import Evidence, Loss, kernel_losses
from workbench.diagnose.signals import LaneTime, StepCounters
from workbench.diagnose.steps import Steps
from workbench.diagnose.timeline import PHASES, Timeline
from workbench.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Split:
    """The split of one variant. ``steps``: how many trusted steps ``losses`` are over."""

    timeline: Timeline
    gaps: Gaps
    mapping: CleanMap
    classes: tuple[KernelClass, ...]
    losses: tuple[Loss, ...]
    steps: int
    notes: tuple[str, ...]

    def of(self, cause: str) -> list[Loss]:
        """Return the losses of one cause, the largest first."""
        return sorted((loss for loss in self.losses if loss.cause == cause), key=lambda loss: -loss.ns)


def split(
    timeline: Timeline,
    host: Columns,
    syncs: Columns,
    static: Columns,
    steps: Steps,
    floor: Floor | None,
    *,
    hardware: Hardware | None,
    counters: StepCounters,
    lanes: LaneTime | None,
    traced_only: bool,
    host_in_verify: bool,
) -> Split:
    """Split ``steps``. ``traced_only``: they are the traced ones. ``host_in_verify``: the host's share of the last
    phase gets causes of its own; else it belongs to acceptance and commit, which read tokens back."""
    gaps = gap_causes(timeline, host, syncs, within_steps=not host_in_verify)
    graph = _from_graph(timeline, host)
    mapping = clean_map(timeline, gaps, graph, steps, identity=traced_only)
    classes = kernel_classes(timeline, mapping.kernels, graph, static, hardware, len(steps))
    draft_floor, target_floor = _floors(floor, steps)
    losses: list[Loss] = []
    for phase, name in enumerate(PHASES):
        own = [one for one in classes if one.phase == name]
        first = len(losses)
        unnamed = int(mapping.kernels[phase].sum()) - sum(one.ns for one in own)
        losses += [Loss("unexplained", unnamed, "estimated", "kernels of no class")] if unnamed else []
        idle = dict(zip(GAP_CAUSES, mapping.gaps[phase].tolist(), strict=True))
        if name == "forward":
            evidence = Evidence(
                sms=hardware.sms if hardware else 0,
                counters=counters,
                lanes=lanes,
                floor_bytes=(floor.target_bytes + floor.draft_bytes) if floor else 0,
                expanded_bytes=floor.expanded_bytes if floor else 0,
                bytes_per_s=floor.bytes_per_s if floor else 0,
                steps=len(steps),
                packed_experts=floor.packed_experts if floor else False,
                step_ns=int(steps.wall.sum()),
            )
            forward = kernel_losses(own, target_floor, evidence)
            losses += forward
            # The floor is bytes over the roof, whatever ran: what the streaming kernels are too short for comes out of
            # the rest of the phase.
            missing = target_floor - sum(loss.ns for loss in forward if loss.cause == "floor")
        else:
            total = sum(one.ns for one in own)
            cause = "draft" if name == "draft" else "verify-and-sampling"
            kept = min(draft_floor, total) if name == "draft" else 0
            missing = draft_floor - kept if name == "draft" else 0
            note = "kernels of the phase" + (", beyond the floor of the drafter's weights" if kept else "")
            ids = tuple(one.ids[0] for one in sorted(own, key=lambda one: -one.ns)[:5])
            losses += [Loss("floor", kept, "estimated", "the drafter's weights")] if kept else []
            losses += [Loss(cause, total - kept, "estimated", note, ids=ids)]
            if name == "draft" or not host_in_verify:
                losses.append(Loss(cause, idle.pop("launch-gap"), "estimated", "between kernels of the phase"))
            if name == "verify" and not host_in_verify:
                rest = sum(idle.pop(one) for one in ("replay-boundary", "host-bound", "cpu-sync"))
                losses.append(Loss(cause, rest, "estimated", "the host reads tokens back and commits them"))
        for gap, ns in idle.items():
            losses.append(Loss(gap, ns, "estimated", f"in the {name} phase"))
        losses[first:] = _floor_from_rest(losses[first:], missing)
    return Split(timeline, gaps, mapping, classes, tuple(loss for loss in losses if loss.ns), len(steps), _notes(gaps))


def _floor_from_rest(losses: list[Loss], missing: int) -> list[Loss]:
    """Move ``missing`` ns to the floor: from kernels that nothing explains first, then from any loss."""
    if missing <= 0:
        return losses
    order = ("compute", "instruction-bound", "small-kernels", "unexplained", "launch-gap")
    rank = {cause: place for place, cause in enumerate(order)}
    result = list(losses)
    for index in sorted(range(len(result)), key=lambda at: (rank.get(result[at].cause, 99), -result[at].ns)):
        loss = result[index]
        if loss.cause == "floor" or missing <= 0:
            continue
        taken = min(missing, loss.ns)
        missing -= taken
        result[index] = Loss(loss.cause, loss.ns - taken, loss.tag, loss.note, loss.source, loss.ids)
        result.append(Loss("floor", taken, "estimated", "more than the streaming kernels take"))
    return result


def _floors(floor: Floor | None, steps: Steps) -> tuple[int, int]:
    if floor is None:
        return 0, 0
    draft = np.minimum(floor.draft_ns(steps), steps.draft_end - steps.start)
    target = np.minimum(floor.target_ns(steps), steps.forward_end - steps.draft_end)
    return int(draft.sum()), int(target.sum())


def _from_graph(timeline: Timeline, host: Columns) -> Flags:
    """Return which kernels a graph replay launched: by the id of the graph, or by the call that launched them."""
    kernels = timeline.kernels
    graph = kernels.ints("graph_id") >= 0
    numbers, texts = host.codes("name")
    replays = np.array([bool(GRAPH_LAUNCH.fullmatch(text)) for text in texts] + [False], bool)[numbers]
    calls = np.unique(host.ints("correlation")[replays])
    return graph | np.isin(kernels.ints("correlation"), calls[calls >= 0])


def _notes(gaps: Gaps) -> tuple[str, ...]:
    if gaps.order_known:
        return ()
    return ("kernels seem to begin before their launch: clocks disagree, so gaps between launches have no cause",)

"""What the scheduler gave the decoding thread in each step: computing, ready without a CPU, or off it by choice.

Only the second is the machine's doing: other work had the CPU, or the hypervisor had (then no switch is recorded at
all, and the thread has neither run nor waited). A step's own time is what is left without it.
"""

from dataclasses import dataclass

import numpy as np

from workbench.diagnose.steps import Ints, Steps
from workbench.trace.bundle import Bundle


@dataclass(frozen=True, slots=True)
class HostUse:
    """One entry a step, ns. ``cpu``: CPU time of the decoding thread, ``process``: of all threads of its process.
    ``taken``: time that other work or the hypervisor had the CPU; ``slept``: time that the thread gave up by itself,
    ``sleeps`` times; -1: not known how often."""

    cpu: Ints
    process: Ints
    taken: Ints
    slept: Ints
    sleeps: Ints


def own_ns(bundle: Bundle) -> str:
    """Return SQL for a step's own time in ns, from the columns of ``steps``.

    On a GPU it is the whole step: the device works on while the host waits for a CPU.
    """
    if bundle.manifest.device.get("name") != "cpu":
        return "(end_ns - start_ns)"
    return "(end_ns - start_ns - least(coalesce(ready_ns, 0), end_ns - start_ns))"


_SQL = """
SELECT step_id, coalesce(cpu_ns, -1) AS cpu, coalesce(process_cpu_ns, -1) AS process, coalesce(ready_ns, -1) AS ready,
       coalesce(sleeps, -1) AS sleeps
FROM steps WHERE variant = ? AND cpu_ns IS NOT NULL AND ready_ns IS NOT NULL ORDER BY step_id
"""


def load_host_use(bundle: Bundle, variant: str, steps: Steps, *, on_cpu: bool) -> HostUse | None:
    """Return what is recorded of ``steps``; None where it is not of every one. ``on_cpu``: the steps run on the thread
    itself; else it may have waited for the device without a switch, and only waits for a CPU count as taken."""
    rows = bundle.query(_SQL, [variant])
    ids, cpu, process, ready, sleeps = (column.to_numpy().astype(np.int64) for column in rows.columns)
    if not len(steps) or not len(ids):
        return None
    at = np.minimum(np.searchsorted(ids, steps.step_id), len(ids) - 1)
    if (ids[at] != steps.step_id).any():
        return None
    cpu, process, ready, sleeps = cpu[at], process[at], ready[at], sleeps[at]
    wall = steps.wall
    ready = np.minimum(ready, wall)
    off = np.maximum(wall - cpu - ready, 0)
    by_choice = sleeps != 0  # not known counts as a choice: nothing is blamed on the machine without evidence
    stolen = np.where(by_choice, 0, off) if on_cpu else np.zeros_like(off)
    return HostUse(cpu, process, ready + stolen, off - stolen, sleeps)

"""The kernels of one name in one phase: how long, how many CTAs, which resources."""

import math
import re
from dataclasses import dataclass

import numpy as np

from workbench.diagnose.columns import Columns, Flags
from workbench.diagnose.kernel_kinds import EXPERTS, FOUR_BIT, Kind, kind_of
from workbench.diagnose.mangled import outer_name
from workbench.diagnose.steps import Ints
from workbench.diagnose.timeline import PHASES, Timeline
from workbench.hardware import Hardware

SHARED_BYTES_PER_SM = 227 << 10
"""Shared memory that CTAs of one SM share, sm_90 and sm_100."""

ONCE_A_STEP = 3
"""Launches a step up to which a sort or scan is the sampler's; a router runs in every layer."""

SPILL_BYTES = 32
"""Local memory of a thread from which it counts as spilled: less is a few addressed variables."""


@dataclass(frozen=True, slots=True)
class KernelClass:
    """Kernels of one name in one phase.

    ``ns``: their time over the trusted steps. ``each_ns``: mean of one launch in the clean step. ``per_step``: launches
    a step. ``ctas``: median grid, 0 where not known. ``slots``: CTAs the device holds at once, 0 where not known.
    ``spill_bytes``: local memory of a thread, from the launch or the binary. ``ids``: kernel ids, the longest first.
    ``last``: it runs after the last product of the phase. ``feeds_product``: a product follows it.
    """

    phase: str
    name: str
    kind: Kind
    ns: int
    each_ns: float
    per_step: float
    ctas: int
    slots: int
    spill_bytes: int
    registers: int
    graph: bool
    last: bool
    feeds_product: bool
    ids: tuple[int, ...]

    @property
    def short_name(self) -> str:
        """The name without template arguments and return type, at most 60 characters."""
        return short_name(self.name)

    @property
    def four_bit(self) -> bool:
        """Whether its name says that it reads four-bit weights."""
        return bool(FOUR_BIT.search(self.name))

    @property
    def experts(self) -> bool:
        """Whether its name says that it multiplies by experts."""
        return bool(EXPERTS.search(self.name))

    @property
    def chooses_tokens(self) -> bool:
        """Whether it samples or accepts: it runs after the forward's last product, or is named so and not a layer's."""
        return self.last or (self.kind == "sampling" and self.per_step <= ONCE_A_STEP)

    def fill(self, sms: int) -> float | None:
        """Return the share of the SMs that get a CTA, at most 1; None where the grid is not known."""
        return min(1.0, self.ctas / sms) if self.ctas and sms else None

    def waves(self) -> float | None:
        """Return how many times the device is filled; None where it is not known."""
        return self.ctas / self.slots if self.ctas and self.slots else None

    def tail_share(self) -> float:
        """Return the share of its time in which the last, incomplete wave leaves slots empty; 0 below one wave."""
        waves = self.waves()
        if waves is None or waves <= 1:
            return 0.0
        return 1 - waves / math.ceil(waves)


_WRAPPERS = (
    "cutlass::device_kernel<",
    "cutlass::Kernel<",
    "cutlass::Kernel2<",
    "flash::enable_sm90_or_later<",
    "at::cuda::detail::enable_3x_kernel_for_sm9x<",
)
"""Kernels that only run the kernel that their template argument names."""

_GROUPED = re.compile(r"<(\w+::)*GroupProblemShape\b")
"""The first argument of a CUTLASS kernel that runs many products, such as those of experts, in one launch."""


def short_name(name: str) -> str:
    """Return a kernel's name without return type, template arguments and parameters, at most 60 characters."""
    plain = outer_name(name).replace("(anonymous namespace)::", "").removeprefix("void ")
    while wrapper := next((one for one in _WRAPPERS if plain.startswith(one)), ""):
        plain = plain.removeprefix(wrapper)
    grouped = " (grouped)" if _GROUPED.search(plain) else ""
    plain = plain.split("<")[0].split("(")[0].strip(" >")
    return (plain + grouped if plain and not plain.endswith("::") else name)[:60]


def kernel_classes(
    timeline: Timeline, mapped: Ints, graph: Flags, static: Columns, hardware: Hardware | None, steps: int
) -> tuple[KernelClass, ...]:
    """Return the classes of ``timeline``; ``mapped[phase, name]`` is their time over ``steps`` trusted steps."""
    kernels = timeline.kernels
    codes, names = kernels.codes("name")
    spilled = _StaticSpills(static)
    kinds = [kind_of(name, _activity(name)) for name in names]
    is_product = np.array([kind == "product" for kind in kinds] + [False], bool)
    runs = np.flatnonzero(timeline.row >= 0)
    # One entry a kernel and phase, in order of time.
    first = np.unique(timeline.row[runs] * 3 + timeline.phase[runs], return_index=True)[1]
    runs = runs[np.sort(first)]
    rows, phases, of_step = timeline.row[runs], timeline.phase[runs], timeline.step[runs]
    product = is_product[codes[rows]]
    window = of_step * 3 + phases
    last_product = np.full(3 * max(len(timeline.steps), 1), -1, np.int64)
    np.maximum.at(last_product, window[product], np.flatnonzero(product))
    after_last = (np.arange(len(runs)) > last_product[window]) & (last_product[window] >= 0)
    following = np.append(product[1:], False)
    grid = np.maximum(kernels.ints("grid_x"), 0) * np.prod([np.maximum(kernels.ints(f"grid_{y}"), 1) for y in "yz"], 0)
    sms = hardware.sms if hardware else 0
    found = []
    for phase, phase_name in enumerate(PHASES):
        here = np.flatnonzero(phases == phase)
        for code in np.unique(codes[rows[here]]).tolist():
            own = here[codes[rows[here]] == code]
            members = rows[own]
            ctas = int(np.median(grid[members]))
            ns = int(mapped[phase, code])
            per_step = len(own) / max(len(timeline.steps), 1)
            longest = members[np.argsort(-kernels.duration[members], kind="stable")[:8]]
            local = int(kernels.ints("local_bytes_per_thread")[members].max())
            registers = max(0, int(kernels.ints("registers")[members].max()))
            found.append(
                KernelClass(
                    phase=phase_name,
                    name=names[code],
                    kind=kinds[code],
                    ns=ns,
                    each_ns=ns / max(per_step * steps, 1e-9),
                    per_step=per_step,
                    ctas=ctas,
                    slots=_slots(kernels, int(members[0])) * sms,
                    spill_bytes=max(local, spilled.of(names[code], registers)),
                    registers=registers,
                    graph=bool(graph[members].all()),
                    last=bool(after_last[own].all()),
                    feeds_product=bool(following[own].mean() > 0.5),
                    ids=tuple(kernels.ints("kernel_id")[longest].tolist()),
                )
            )
    return tuple(found)


_COPY_KERNEL = re.compile(r"memcpy\d+_")
"""The driver's kernel for a copy node of a graph (memcpy32_post): it runs on the SMs and waits for no host."""


def _activity(name: str) -> str:
    if _COPY_KERNEL.match(name):
        return "kernel"
    if name.lower().startswith("memcpy") or name.startswith("CopyDevice") or name.startswith("CopyHost"):
        return "memcpy"
    return "memset" if name.lower().startswith(("memset", "fillbuffer")) else "kernel"


class _StaticSpills:
    """Spill bytes of a thread by kernel, the most over the targets. Builds of one name are told apart by registers,
    where a launch has as many as one of them."""

    def __init__(self, static: Columns) -> None:
        self._found: dict[str, dict[int, int]] = {}
        if not len(static):
            return
        counts = ("registers", "spill_store_bytes", "spill_load_bytes", "local_bytes")
        rows = zip(static.texts("kernel"), *(static.ints(name).tolist() for name in counts), strict=True)
        for name, registers, stores, loads, local in rows:
            spill = max(stores, loads) if max(stores, loads) >= 0 else local
            builds = self._found.setdefault(str(name), {})
            builds[registers] = max(builds.get(registers, 0), spill)

    def of(self, name: str, registers: int) -> int:
        """Return the bytes of the build with so many registers; of all builds the most where none has."""
        builds = self._found.get(name, {})
        return builds.get(registers, max(builds.values(), default=0))


def _slots(kernels: Columns, row: int) -> int:
    """Return CTAs of a launch that one SM holds; 0 where its resources are not known."""
    sizes = [int(kernels.ints(f"block_{axis}")[row]) for axis in "xyz"]
    threads = math.prod(max(size, 1) for size in sizes)
    registers = int(kernels.ints("registers")[row])
    if sizes[0] < 1 or registers < 1:
        return 0
    limit = kernels.floats("occupancy_limit")[row]
    warps = math.ceil(threads / 32)
    if limit > 0:  # not where it is NaN
        return max(1, round(float(limit) * 64 / warps))
    shared = [int(kernels.ints(name)[row]) for name in ("shared_static_bytes", "shared_dynamic_bytes", "shared_bytes")]
    used = max(sum(max(0, size) for size in shared[:2]), shared[2])
    by_registers = 65536 // (math.ceil(registers / 8) * 8 * warps * 32)
    by_shared = SHARED_BYTES_PER_SM // (used + 1024) if used > 0 else 32
    return max(1, min(by_registers, by_shared, 64 // warps, 32))

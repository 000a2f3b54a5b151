"""Registers, spills, shared memory and occupancy of the kernels this process compiled or launched: table ``static``.

From Triton's in-memory cache and the NVRTC cubins that are loaded; what libraries bring is known by its launches only.
"""

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from workbench.lint.occupancy import LIMITS, occupancy
from workbench.probes.marker import KERNELS
from workbench.probes.protocol import Capture, Missing

_LOADS = re.compile(r"(\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Launched:
    """Distinct launches of table ``kernels``: what ``library_rows`` and the NVRTC kernels' block sizes come from."""

    name: str
    registers: int
    shared_bytes: int
    threads: int


class StaticProbe:
    """Not a recorder: ``stop`` looks at what the process holds by then. ``see`` tells it of launches before.

    ``capability``: compute capability times ten of the device that ran them.
    """

    name = "static"

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._launched: dict[Launched, None] = {}

    def available(self) -> Missing | None:
        """Needs a device whose limits are known."""
        if self._capability not in LIMITS:
            why = f"the limits of compute capability {self._capability / 10:.1f} are not in the table"
            return Missing(self.name, "register spills and occupancy limits", why)
        return None

    def start(self) -> None:
        """Do nothing."""

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def see(self, kernels: pa.Table) -> None:
        """Note the launches in ``kernels``, rows of that table."""
        self._launched |= dict.fromkeys(launched(kernels))

    def stop(self) -> Capture:
        """Return one row a compiled kernel, and a row a library kernel and launch shape, by name."""
        target = f"sm_{self._capability}" + ("a" if self._capability >= 90 else "")
        shapes = {launch.name: launch for launch in self._launched}
        rows = [*triton_rows(self._capability), *nvrtc_rows(self._capability, shapes)]
        own = {row["kernel"] for row in rows}
        rows += library_rows([one for one in self._launched if one.name not in own], self._capability, target)
        missing = [
            Missing(
                self.name,
                "spills of library kernels",
                "their binaries are not inspected; registers and shared memory are those of the traced launches",
                fix="ncu, or cuobjdump --dump-resource-usage on the library",
            )
        ]
        unique = {tuple(sorted(row.items(), key=lambda item: item[0])): row for row in rows}
        return Capture({"static": sorted(unique.values(), key=lambda row: str(row["kernel"]))}, missing=missing)


def launched(kernels: pa.Table) -> Iterator[Launched]:
    """Yield the distinct launches of ``kernels`` whose resources are known."""
    names = ("kind", "name", "registers", "shared_bytes", "block_x", "block_y", "block_z")
    held = [kernels.column(name).to_pylist() for name in names]
    for kind, name, registers, shared, *block in dict.fromkeys(zip(*held, strict=True)):
        if kind == "kernel" and None not in (registers, shared, *block) and registers > 0:
            yield Launched(name, registers, shared, block[0] * block[1] * block[2])


def triton_rows(capability: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel that Triton compiled and loaded in this process."""
    if "triton.runtime.jit" not in sys.modules:
        return
    for kernel in _compiled():
        registers, local = kernel.n_regs, kernel.n_spills * 4  # Triton counts words, the driver bytes
        metadata = kernel.metadata
        stores, loads = _spills(kernel, registers, local)
        yield {
            "kernel": metadata.name,
            "target": f"sm_{metadata.target.arch}" + ("a" if metadata.target.arch >= 90 else ""),
            "registers": registers,
            "spill_store_bytes": stores,
            "spill_load_bytes": loads,
            "shared_bytes": metadata.shared,
            "local_bytes": local,
            "max_threads": kernel.n_max_threads or None,
            **_limit(capability, registers, metadata.shared, metadata.num_warps),
        }


def _compiled() -> list[Any]:
    """Return Triton's compiled kernels that are loaded, from the caches of its live functions."""
    from triton.runtime.jit import JITFunction

    found = {}
    for function in gc.get_objects():
        # type(), not isinstance(): the latter wakes lazy proxies among all objects.
        if not issubclass(type(function), JITFunction):
            continue
        for cache in getattr(function, "device_caches", {}).values():
            for kernel in cache[0].values():
                loaded = getattr(kernel, "n_regs", None)
                if type(loaded) is int and kernel.metadata.name not in KERNELS:
                    found[id(kernel)] = kernel
    return list(found.values())


def _spills(kernel: Any, registers: int, local: int) -> tuple[int | None, int | None]:
    """Return bytes of spill stores and loads: none where there is no local memory, else what the assembler says."""
    if local == 0:
        return 0, 0
    from workbench.lint.spills import spill_bytes

    return spill_bytes(kernel, registers, local) or (None, None)


def nvrtc_rows(capability: int, shapes: dict[str, Launched]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel that was compiled by NVRTC and loaded; ``shapes``: launches by kernel name."""
    module = sys.modules.get("workbench.kernels.nvrtc")
    if module is None:
        return
    for kernel in gc.get_objects():
        if type(kernel) is not module.Kernel:
            continue
        cubin = kernel.cubin
        loads = _LOADS.search(cubin.log)
        shape = shapes.get(cubin.kernel)
        shared = cubin.smem_bytes + kernel.smem_bytes
        warps = -(-shape.threads // 32) if shape else 0
        yield {
            "kernel": cubin.kernel,
            "target": cubin.arch,
            "registers": cubin.registers,
            "spill_store_bytes": cubin.spill_bytes,
            "spill_load_bytes": int(loads[1]) if loads else None,
            "shared_bytes": shared,
            "local_bytes": cubin.stack_bytes,
            "max_threads": None,
            **(_limit(capability, cubin.registers, shared, warps) if shape else {}),
        }


def library_rows(launches: list[Launched], capability: int, target: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel and launch shape whose binary is not known."""
    for launch in launches:
        yield {
            "kernel": launch.name,
            "target": target,
            "registers": launch.registers,
            "shared_bytes": launch.shared_bytes,
            **_limit(capability, launch.registers, launch.shared_bytes, -(-launch.threads // 32)),
        }


def _limit(capability: int, registers: int, shared_bytes: int, warps: int) -> dict[str, Any]:
    if capability not in LIMITS or not 1 <= warps <= 32 or shared_bytes < 0:
        return {}
    found = occupancy(capability, registers=registers, shared_bytes=shared_bytes, num_warps=warps)
    return {"occupancy_limit": found.share, "limiter": found.limiter} if found.programs else {}

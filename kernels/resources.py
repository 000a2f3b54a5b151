"""Registers, spills and shared memory of a kernel, compiled for any NVIDIA target on a machine without a GPU.

The numbers are ptxas's, read back from the cubin with the ``cuobjdump`` that ships in Triton's wheel: STACK is the
local memory a thread needs, which in these kernels (no arrays, no calls) is spilled registers. Values are facts of
the build (estimated where they stand for what happens on a device).

``python -m workbench.kernels.resources [--arch 90] [--only NAME] [--markdown]`` prints JSON or a table.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import InputError, UnfitError
from workbench.lint.occupancy import Occupancy, occupancy, sm_limits

if TYPE_CHECKING:
    from workbench.kernels.catalogue import Entry

#: Compute capability times ten: Hopper, Blackwell B200, Blackwell Ultra B300.
TARGETS = (90, 100, 103)

#: Target, kernel, then the fields of ``Resources`` and ``programs_per_sm``, ``shape``, ``spills``.
Report = dict[str, dict[str, dict[str, int | str]]]

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_RESERVED_SHARED = 1024  # the driver's, part of SHARED in the dump


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program (CTA) of a compiled kernel takes.

    ``registers`` a thread; ``stack_bytes`` of local memory a thread (spills); ``shared_bytes`` a program, static
    and dynamic.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int

    def occupancy(self, target: int) -> Occupancy:
        """Return the residency on compute capability ``target`` (90, 100 …), before any other limit."""
        return occupancy(target, registers=self.registers, shared_bytes=self.shared_bytes, num_warps=self.num_warps)

    @property
    def programs_per_sm(self) -> int:
        """Programs one SM of Hopper or of Blackwell's data-centre parts can hold at once."""
        return self.occupancy(TARGETS[0]).programs


def compile_resources(entry: "Entry", target: int, *, registers: int = 0) -> Resources:
    """Compile ``entry`` for compute capability ``target`` (90, 100, 103) and read the cubin back.

    ``registers`` caps a thread's registers, 0 for the launch's own cap or none: what a planted spill costs.
    Triton's on-disk cache makes a second call cheap. Raises InputError for an unknown target or under
    ``TRITON_INTERPRET``, UnfitError when the tool chain is missing or fails.
    """
    options = entry.options | ({"maxnreg": registers} if registers else {})
    compiled = compile_kernel(entry.kernel, entry.types, entry.constants, entry.divisible, target, options)
    return read_resources(compiled, entry.name)


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Sequence[str],
    target: int,
    options: Mapping[str, int],
) -> Any:
    """Return Triton's compiled kernel for ``types`` and ``constants``, as ``catalogue.Entry`` explains them.

    ``options`` are Triton's: num_warps, num_stages, num_ctas, maxnreg. Raises as ``compile_resources``, and whatever
    Triton raises for a kernel that does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from workbench.kernels.contract import INTERPRETED

    if INTERPRETED:
        raise InputError("resources: TRITON_INTERPRET is set, so kernels cannot be compiled", hint="unset it")
    sm_limits(target)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in divisible
    }
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=dict(options))


def read_resources(compiled: Any, name: str) -> Resources:
    """Return what the cubin of ``compiled``, Triton's compiled kernel, says. Raises UnfitError."""
    used, stack, static_shared, local = _usage(compiled.asm["cubin"], name)
    return Resources(
        registers=used,
        stack_bytes=stack + local,
        shared_bytes=max(0, static_shared - _RESERVED_SHARED) + int(compiled.metadata.shared),
        num_warps=int(compiled.metadata.num_warps),
    )


def _usage(cubin: bytes, name: str) -> tuple[int, int, int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise UnfitError("resources: this Triton wheel ships no cuobjdump", hint="install triton from a Linux wheel")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
        )
    found = _USAGE.search(done.stdout)
    if found is None:
        raise UnfitError(f"resources: cuobjdump found no usage line for {name}: {done.stderr.strip()[:200]}")
    registers, stack, shared, local = (int(number) for number in found.groups())
    return registers, stack, shared, local


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every catalogue entry's resources for every target, as JSON or a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append", choices=TARGETS)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/kernels.md instead")
    parser.add_argument("--only", action="append", default=[], help="names of catalogue entries")
    parser.add_argument("--registers", type=int, default=0, help="cap of a thread's registers; 0: none")
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    from workbench.kernels.catalogue import ENTRIES

    report: Report = {}
    for target in options.arch or TARGETS:
        rows = report.setdefault(str(target), {})
        for entry in ENTRIES:
            if options.only and entry.name not in options.only:
                continue
            found = compile_resources(entry, target, registers=options.registers)
            rows[entry.name] = {
                **asdict(found),
                "programs_per_sm": found.programs_per_sm,
                "shape": entry.shape,
                "spills": entry.spills,
            }
    sys.stdout.write(markdown(report) if options.markdown else json.dumps(report, indent=1) + "\n")
    return 0


def markdown(report: Report) -> str:
    """Return one row a kernel: registers / spilled bytes / shared bytes for every target, programs an SM."""
    targets = list(report)
    heads = ["entry", "shape", "warps", *(f"sm_{target}" for target in targets), f"programs / SM, sm_{targets[0]}"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, first in report[targets[0]].items():
        cells = (report[target][name] for target in targets)
        numbers = " | ".join(f"{row['registers']} / {row['stack_bytes']} / {row['shared_bytes']}" for row in cells)
        lines.append(f"| {name} | {first['shape']} | {first['num_warps']} | {numbers} | {first['programs_per_sm']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

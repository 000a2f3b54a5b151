"""Spill stores and loads of a kernel that uses local memory: ptxas says them, the cubin does not keep them.

STACK and LOCAL of a cubin also hold indexed arrays and the frames of calls, so they bound spilling from above
(triton-lang/triton#1756). ptxas counts the bytes of spill instructions themselves; it is asked once more with Triton's
PTX, and believed where it then makes the same registers and the same stack.
"""

import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ARCHITECTURE = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
_ASSEMBLERS = ("ptxas-blackwell", "ptxas")  # Triton picks one by version and target
_ALLOCATION = ("--regAllocOptLevel=2", "")  # newer Triton sets it


def spill_bytes(compiled: Any, registers: int, stack_bytes: int) -> tuple[int, int] | None:
    """Return bytes of spill stores and of spill loads in the code of ``compiled``, Triton's compiled kernel.

    None where no assembler of Triton's wheel makes the same ``registers`` and ``stack_bytes`` from its PTX.
    """
    import triton

    text = compiled.asm["ptx"]
    architecture = _ARCHITECTURE.search(text)
    if architecture is None:
        return None
    fusion = [] if getattr(compiled.metadata, "enable_fp_fusion", True) else ["--fmad=false"]
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(text)
        for assembler, allocation in product(_ASSEMBLERS, _ALLOCATION):
            command = [str(folder / assembler), "-v", "-lineinfo", *fusion, *filter(None, [allocation])]
            command += [f"--gpu-name={architecture[1]}", str(source), "-o", str(Path(scratch) / "kernel.cubin")]
            if not (folder / assembler).exists():
                continue
            said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            spills, used = _SPILLS.search(said), _REGISTERS.search(said)
            if spills and used and (int(used[1]), int(spills[1])) == (registers, stack_bytes):
                return int(spills[2]), int(spills[3])
    return None

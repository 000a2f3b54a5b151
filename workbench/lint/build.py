"""Compile one plan for one target and read what it takes. Runs in a process of its own, which may crash."""

import ast
from dataclasses import asdict, dataclass
from typing import Any

from workbench.errors import WorkbenchError
from workbench.lint.plan import Plan
from workbench.lint.subject import one_line


@dataclass(frozen=True, slots=True)
class Built:
    """What one kernel takes on one target, or ``error``, why it does not compile.

    ``spill_or_stack_bytes`` of local memory a thread: an upper bound on spilling. ``spill_store_bytes`` and
    ``spill_load_bytes``: bytes of spill instructions in the code, per thread; None where not known.
    ``occupancy_limit``: share of an SM's warps, set by ``limiter``.
    """

    error: str = ""
    num_warps: int | None = None
    registers: int | None = None
    spill_or_stack_bytes: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    shared_bytes: int | None = None
    programs_per_sm: int | None = None
    occupancy_limit: float | None = None
    limiter: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def build(plan: Plan, target: int) -> Built:
    """Compile ``plan`` for compute capability ``target`` and read the cubin; what fails is in ``error``."""
    from workbench.kernels.resources import compile_kernel, read_resources
    from workbench.lint.spills import spill_bytes

    try:
        compiled = compile_kernel(plan.function, plan.types, plan.constants, plan.divisible, target, plan.options)
        found = read_resources(compiled, plan.kernel)
    except WorkbenchError as error:
        return Built(str(error))
    except Exception as error:  # Triton raises what its passes raise; each becomes the line of one kernel
        return Built(_explained(error, plan))
    residency = found.occupancy(target)
    spilled = spill_bytes(compiled, found.registers, found.stack_bytes) if found.stack_bytes else (0, 0)
    return Built(
        num_warps=found.num_warps,
        registers=found.registers,
        spill_or_stack_bytes=found.stack_bytes,
        spill_store_bytes=spilled[0] if spilled else None,
        spill_load_bytes=spilled[1] if spilled else None,
        shared_bytes=found.shared_bytes,
        programs_per_sm=residency.programs,
        occupancy_limit=residency.share,
        limiter=residency.limiter,
    )


def _explained(error: Exception, plan: Plan) -> str:
    """Return the innermost cause on one line, with the line of the kernel's file where Triton names one."""
    line = 0
    inner: BaseException = error
    while True:
        node = getattr(inner, "node", None)
        if isinstance(node, ast.AST) and hasattr(node, "lineno") and not line:
            line = plan.line + node.lineno - 1
        if inner.__cause__ is None:
            break
        inner = inner.__cause__
    message = str(getattr(inner, "error_message", None) or "")
    text = f"{type(inner).__name__}: {' '.join(message.split())[:300]}" if message else one_line(inner)
    return f"{text} (line {line})" if line else text

"""A kernel that does nothing, compiled before the forks: Triton hashes itself once a process, which takes a while."""
# mypy: disable-error-code="untyped-decorator"

from collections.abc import Sequence

import triton


@triton.jit
def _nothing() -> None:
    pass


def warm(targets: Sequence[int]) -> None:
    """Fill Triton's in-process caches for ``targets``."""
    from workbench.kernels.resources import compile_kernel

    for target in targets:
        compile_kernel(_nothing, {}, {}, (), target, {"num_warps": 1})

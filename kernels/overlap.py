"""Programmatic dependent launch: a kernel's start under its predecessor's tail (sm_90 and later).

A launcher called with ``overlap=True`` may begin while the launch before it still runs; what does not depend on it
(the first weights) is requested at once, then the kernel waits for the predecessor to complete. Only after that wait
does it let its own successor begin, so everything older than the direct predecessor is complete whenever a kernel
runs: weights, routing of the launch before last, cache lengths may be read before the wait, and nothing is written.
Works inside CUDA graphs, where the edge becomes a programmatic one. PTX ISA, griddepcontrol.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators
# ruff: noqa: N803

import triton
import triton.language as tl

from workbench.kernels.contract import EMULATED


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait for the launch before this one to complete, then let the next one begin. Nothing unless OVERLAP."""
    if OVERLAP and not EMULATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

"""Runtime faults that a scenario can switch on, and where each of them can be planted.

A fault is a real engine's mistake in the smallest form that still costs what it costs. It changes the time or the
bytes of a step, or the drafter's luck; ``w4a8`` alone changes what the target says.
"""

from collections.abc import Mapping
from types import MappingProxyType

from workbench.decode.rungs.plan import PLANS
from workbench.errors import InputError
from workbench.scenario import Fault, Rung, Variant

REGISTER_CAP = 40
"""Registers a thread that ``register-cap`` leaves the product kernels; they use 48 to 126 and spill below."""

_KERNELS: frozenset[Rung] = frozenset(rung for rung, plan in PLANS.items() if plan.kernels and not plan.persistent)
_GRAPHS: frozenset[Rung] = frozenset(rung for rung, plan in PLANS.items() if plan.graph)
_LOOP: frozenset[Rung] = _GRAPHS | {"eager"}

RUNGS_OF_FAULT: Mapping[Fault, frozenset[Rung]] = MappingProxyType(
    {
        "item-per-step": _LOOP,  # a value is read back before every forward: the host waits for the device
        "pageable-copy": _LOOP,  # positions are built in pageable memory and copied over before every forward
        "unfused-sampling": _LOOP,  # a greedy choice by sort, softmax, mass, mask and scatter over the vocabulary
        "small-kernels": _KERNELS,  # norms and rotary embedding as chains of operators
        "low-split": _KERNELS,  # one program a KV head in attention, no Split-K in any product
        "register-cap": _KERNELS,  # the product kernels spill
        "kv-over-read": _KERNELS | {"eager"},  # every layer copies its whole cache slab first
        "graph-break": _GRAPHS,  # one graph a layer instead of one a step
        "tap-off-by-one": _LOOP,  # the drafter's features come from the layer before
        "unshared-head": _LOOP,  # the drafter reads a head that is not the target's
        "w4a8": _LOOP,  # the target's experts multiply MXFP8 activations
        "w4a4": frozenset({"eager", "graph"}),  # QKV, routers, experts, head read MXFP4 activations
        "busy-host": _LOOP,  # Python computes before every forward
        "sleep-per-step": _LOOP,  # the host sleeps before every forward
        "recompute-prefix": frozenset({"eager"}),  # every step runs the whole sequence again
        "wait-per-layer": frozenset({"eager"}),  # the host sleeps before every layer
        "pause-between-steps": _LOOP,  # Python computes after every step, before the next begins
        "collector-pauses": _LOOP,  # every 16th step pauses before its forward
        "accept-cap": frozenset({"eager"}),  # at most one draft token is accepted
        "vocabulary-offset": _LOOP,  # every third sequence is drafted with token ids that are off by one
        "block-positions": _LOOP,  # every mask of the drafter's block claims the first one's position
    }
)

_WHY_NOT: Mapping[Fault, str] = MappingProxyType(
    {
        "small-kernels": "it has no fused kernels to take apart",
        "low-split": "it runs no kernels that split",
        "register-cap": "it compiles no kernels of its own",
        "kv-over-read": "it reads its whole cache slab as it is",
        "graph-break": "it has no graph to break",
        "recompute-prefix": "its steps have fixed widths",
        "w4a4": "its kernels have no such product",
        "wait-per-layer": "its layers are not called one by one from the host",
        "accept-cap": "its acceptance runs on the device",
    }
)


def check_faults(variant: Variant) -> None:
    """Raise InputError, one line, where a fault of ``variant`` cannot be planted in its rung, drafter or precision."""
    rung = variant.engine.rung
    where = f"variant {variant.name!r}: engine.faults"
    for fault in variant.engine.faults:
        rungs = RUNGS_OF_FAULT[fault]
        if rung not in rungs:
            why = _WHY_NOT.get(fault, "its step is one launch that the host does not take part in")
            named = ", ".join(name for name in PLANS if name in rungs)
            raise InputError(f"{where}: {fault!r} does not apply to rung {rung!r}: {why}", hint=f"use {named}")
        if fault == "tap-off-by-one" and variant.drafter.kind != "dflash":
            raise InputError(f"{where}: {fault!r} needs drafter.kind 'dflash', which alone reads taps")
        if fault == "block-positions" and variant.drafter.kind != "dflash":
            raise InputError(f"{where}: {fault!r} needs drafter.kind 'dflash', which alone drafts a block")
        if fault in ("accept-cap", "vocabulary-offset") and variant.drafter.kind not in ("mtp", "dflash", "ngram"):
            raise InputError(f"{where}: {fault!r} needs a drafter", hint="drafter.kind mtp, dflash or ngram")
        if fault == "unshared-head" and variant.drafter.kind not in ("mtp", "dflash"):
            raise InputError(f"{where}: {fault!r} needs a drafter that reads a head", hint="drafter.kind mtp or dflash")
        if fault == "unfused-sampling" and variant.sampling.method != "greedy":
            raise InputError(f"{where}: {fault!r} needs sampling.method 'greedy': sampling is never fused")
    if len(set(variant.engine.faults)) < len(variant.engine.faults):
        raise InputError(f"{where}: {', '.join(variant.engine.faults)}: one is named twice")

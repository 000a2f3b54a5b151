"""Products of a few rows on tiles made for many: most of a tile is padding, and too few CTAs stream the weights."""

import re

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.kernel_classes import KernelClass

FEW_ROWS = 16
"""Rows of a product, batch times verify width, up to which it is skinny."""

WASTE = 4
"""How many times the rows both sides of a tile must be before the tile counts as generic."""

_TILE = re.compile(
    r"(?:tilesize|MT|tile|_)(\d{1,3})x(\d{1,3})(?=[x_]|$)|(?:gemm|impl)\w*<.*?(\d{2,3})u?, *(\d{2,3})u?, *\d{2,3}u?",
    re.IGNORECASE,
)


def tile_of(name: str) -> tuple[int, int] | None:
    """Return the tile that a kernel's name states (rows and columns, in the library's own order); None for none.

    cuBLAS and CUTLASS write ``128x256_32x3`` or ``tilesize128x128x64``, rocBLAS ``MT128x128x64``.
    """
    found = _TILE.search(name)
    if found is None:
        return None
    one, other = (int(text) for text in found.groups() if text is not None)
    return one, other


def skinny_gemm(facts: Facts) -> list[Finding]:
    """Products whose smaller tile side is far more than the rows there are, on fewer CTAs than the device has SMs."""
    found, hardware = facts.split, facts.hardware
    rows = _rows(facts)
    if found is None or hardware is None or rows is None or rows > FEW_ROWS:
        return []
    generic = [
        (one, tile, fill)
        for one in found.classes
        if one.kind == "product"
        and (tile := tile_of(one.name)) is not None
        and min(tile) >= max(WASTE * rows, 64)
        and (fill := one.fill(hardware.sms)) is not None
        and fill < 1
    ]
    ns = sum(one.ns * (1 - fill) for one, _, fill in generic)
    if not stands_out(facts, ns):
        return []
    generic.sort(key=lambda entry: -entry[0].ns)
    worst, tile, _ = generic[0]
    recoverable = gain(facts, ns, "estimated", 0.5 * ns)
    return [
        Finding(
            id="skinny-gemm",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="Few rows on tiles for many",
            sentence=(
                f"Products of {rows} row{'s' if rows > 1 else ''} run on tiles of {tile[0]}x{tile[1]} and few CTAs "
                f"({worst.short_name}: {worst.ctas} on {hardware.sms} SMs, {worst.each_ns / 1e3:.3g} us each): "
                f"{of_step(facts, ns)} go to SMs that stream nothing."
            ),
            remedy="use a GEMV or a skinny kernel for these shapes: weights on the tile's long side (swap A and B), "
            "split K, tuned for this device",
            confidence="medium",
            evidence=tuple(_evidence(facts, one, size, fill) for one, size, fill in generic[:5]),
            cause="under-fill",
            recoverable=recoverable,
            location=worst.short_name,
            explains=("under-fill",),
        )
    ]


def _evidence(facts: Facts, one: KernelClass, tile: tuple[int, int], fill: float) -> Evidence:
    what = f"{one.short_name}: tile {tile[0]}x{tile[1]}, {one.ctas} CTAs, {one.per_step:.3g} a step"
    return Evidence(what, per_step(facts, one.ns * (1 - fill), "estimated"), "kernels", one.ids)


def _rows(facts: Facts) -> int | None:
    """Return rows of a step's products, the median of batch times verify width; None where no step says."""
    sql = (
        "SELECT median(width * coalesce(batch, 1))::DOUBLE AS rows FROM steps "
        "WHERE variant = ? AND run_pass = ? AND NOT warmup AND width IS NOT NULL"
    )
    rows = facts.bundle.query(sql, [facts.variant, facts.time_pass]).to_pylist()[0]["rows"]
    return None if rows is None else max(1, round(rows))

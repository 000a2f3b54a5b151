"""A cache that is copied or converted whole in each layer: bytes go with the pool's size, not with the sequences."""

import re

import numpy as np

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Evidence, Finding
from workbench.diagnose.findings.gain import gain, of_step, per_step, severity, stands_out
from workbench.diagnose.kernel_classes import KernelClass
from workbench.diagnose.numbers import byte_text
from workbench.quantity import Quantity

CONVERTS = re.compile(
    r"direct_copy|copy_kernel|dequant|memcpy.*(DtoD|Device -> Device)|convert|_to_copy|float8_copy|upcast|CatArray|"
    r"clone",
    re.IGNORECASE,
)
"""Not gathers: they read what their indices say, pages of a sequence or experts of a token."""

LAYERS = 6
"""Times a step such a kernel must come: once a layer, of few layers at least."""

MOST_PER_TOKEN = 16_384
"""Elements of one token's cache in one layer that no model exceeds (2 · 32 heads · 256)."""


def kv_over_read(facts: Facts) -> list[Finding]:
    """Kernels that copy or convert come once a layer and have far more elements than the sequences' caches."""
    found = facts.split
    context = _context(facts)
    if found is None or not context:
        return []
    large = [
        (one, elements)
        for one in found.classes
        if CONVERTS.search(one.name)
        and one.per_step >= LAYERS
        and (elements := _elements(facts, one)) >= MOST_PER_TOKEN * context
    ]
    ns = float(sum(one.ns for one, _ in large))
    if not large or not stands_out(facts, ns):
        return []
    large.sort(key=lambda entry: -entry[0].ns)
    worst, elements = large[0]
    recoverable = gain(facts, ns, "estimated", 0.8 * ns)
    return [
        Finding(
            id="kv-over-read",
            severity=severity(facts, recoverable),
            variant=facts.variant,
            title="The whole cache is read, not the sequences'",
            sentence=(
                f"{worst.short_name} runs {worst.per_step:.3g} times a step over {elements:,.0f} elements or more, "
                f"{elements / context:,.0f} for each of {context:,} tokens in the cache, which is more than any "
                f"layer's: it goes with the pool's size (or it converts weights in every step). {of_step(facts, ns)}."
            ),
            remedy="convert only the pages that the sequences use, or use a kernel that reads the stored format; a "
            "smaller pool (--mem-fraction-static, --max-total-tokens) shows the effect at once",
            confidence="medium",
            evidence=(
                *(
                    Evidence(
                        f"{one.short_name}: {byte_text(count)} at one byte an element, {one.per_step:.3g} a step",
                        per_step(facts, one.ns, "estimated"),
                        "kernels",
                        one.ids,
                    )
                    for one, count in large[:5]
                ),
                Evidence("tokens in the cache", Quantity(float(context), "tokens", "measured"), "steps"),
            ),
            cause="over-fetch",
            recoverable=recoverable,
            location=worst.short_name,
            explains=("over-fetch",),
        )
    ]


def _elements(facts: Facts, one: KernelClass) -> float:
    """Return the elements a launch touches at least: one a thread, or one a byte that a copy moves two bytes of."""
    kernels = facts.kernels
    row = int(np.flatnonzero(kernels.ints("kernel_id") == one.ids[0])[0])
    copied = int(kernels.ints("copied_bytes")[row])
    if copied > 0:
        return copied / 2
    threads = int(np.prod([max(int(kernels.ints(f"block_{axis}")[row]), 1) for axis in "xyz"]))
    return float(one.ctas * threads)


def _context(facts: Facts) -> int:
    """Return the tokens that all sequences of a step have in the cache, the median; 0 where no step says."""
    sql = (
        "SELECT median(context * coalesce(batch, 1))::DOUBLE AS tokens FROM steps "
        "WHERE variant = ? AND run_pass = ? AND NOT warmup AND context IS NOT NULL"
    )
    tokens = facts.bundle.query(sql, [facts.variant, facts.time_pass]).to_pylist()[0]["tokens"]
    return 0 if tokens is None else round(tokens)

"""How an attached server's figures look in the terminal."""

from collections.abc import Iterator

from workbench.diagnose.attached import Attached
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity

_ROWS = (
    ("speed", "tok_s"),
    ("step", "step"),
    ("accept length", "accept_length"),
    ("device memory traffic", "traffic"),
    ("of the roof", "roof_share"),
    ("nothing moves", "idle"),
    ("SM active", "sm_active"),
    ("CTAs resident", "ctas_per_sm"),
    ("warps resident", "warps_active"),
    ("decoding", "decoding"),
    ("bytes read a step", "bytes_per_step"),
    ("byte model", "model_bytes"),
    ("forwards without graph", "eager_share"),
    ("SM clock", "clock"),
    ("power", "power"),
)


def attached_lines(found: Attached) -> Iterator[str]:
    """Yield the answer, a table, the findings and what could not be measured."""
    yield found.headline()
    yield ""
    for label, name in _ROWS:
        value = getattr(found, name)
        if value is not None:
            note = f"  {value.note}" if value.note else ""
            yield f"  {label:<24}{_amount(value):>12}  {value.tag:<10}{note}".rstrip()
    for finding in found.findings:
        worth = finding.recoverable
        gain = f" (+{significant(worth.value, 2)} tok/s, {worth.tag})" if worth else ""
        yield ""
        yield f"{finding.severity}: {finding.sentence}{gain}"
        yield f"  try: {finding.remedy}"
    if found.limits:
        yield ""
        yield "not measured:"
        for row in found.limits:
            fix = f"; {row['fix']}" if row["fix"] else ""
            yield f"  {row['what']}: {row['why']}{fix}"


def _amount(value: Quantity) -> str:
    if value.unit == "share":
        return percent(value.value, 3)
    if value.unit == "B":
        return f"{significant(value.value / 1e9, 4)} GB"
    return f"{significant(value.value, 4)} {value.unit}"

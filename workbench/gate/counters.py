"""Counters that carry no noise: the same code on the same input gives the same number, so any rise is a finding.

Read from a bundle as exact fractions. A counter that differs between launches of one side is not exact there; it is
shown and never fails.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from workbench.diagnose.steps import load_steps
from workbench.trace.bundle import Bundle

Worse = Literal["rise", "fall", "change"]
Status = Literal["equal", "worse", "better", "varies", "new", "gone"]

SCALAR_READ = "aten::_local_scalar_dense"
"""The operator behind ``.item()``: on a GPU it waits for the device, so its count is known from a CPU run too."""


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter of one launch. ``worse`` names the direction that is a regression.

    ``parts``: what the value is made of, by name. ``kernel``: the kernel it belongs to, where it is one kernel's.
    """

    value: Fraction | str
    unit: str
    worse: Worse = "rise"
    parts: Mapping[str, Fraction] = field(default_factory=dict)
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One counter of both sides. ``base`` or ``head`` is None where that side does not have it, or it varies there.

    ``moved``: the parts that changed, by how much, largest first. ``accepted``: the user said that it may change.
    """

    name: str
    unit: str
    base: Fraction | str | None
    head: Fraction | str | None
    status: Status
    moved: tuple[tuple[str, Fraction], ...] = ()
    kernel: str = ""
    accepted: bool = False

    @property
    def fails(self) -> bool:
        """Whether this alone fails the gate."""
        return self.status == "worse" and not self.accepted


def read_counters(bundle: Bundle, variant: str, settings: Mapping[str, Any]) -> dict[str, Counter]:
    """Return the counters of ``variant`` by name; those whose table the bundle lacks are left out.

    Counters that follow from acceptance are exact only where acceptance is pinned: greedy or simulated.
    """
    counters = _traced(bundle, variant) | _static(bundle, variant)
    if is_pinned(settings):
        counters |= _clean(bundle, variant)
    if settings.get("sampling", {}).get("method") == "greedy" and (output := _output(bundle, variant)):
        counters["output"] = Counter(output, "sha256", "change")
    return counters


def is_pinned(settings: Mapping[str, Any]) -> bool:
    """Return whether the same code commits the same number of tokens in every launch."""
    simulated = settings.get("drafter", {}).get("kind") == "simulated"
    return bool(simulated or settings.get("sampling", {}).get("method") == "greedy")


_CALLS = """
WITH traced AS (
    SELECT step_id FROM steps WHERE variant = ? AND run_pass = 'traced' AND NOT warmup
), calls AS (
    SELECT step_id, name, 'operator' AS kind FROM host WHERE category = 'op'
    UNION ALL SELECT step_id, name, CASE kind WHEN 'kernel' THEN 'kernel' ELSE 'copy' END FROM kernels
    UNION ALL SELECT step_id, name, 'sync' FROM syncs
)
SELECT kind, name, count(*) AS calls FROM calls JOIN traced USING (step_id) GROUP BY ALL
UNION ALL SELECT 'step', '', count(*) FROM traced
"""


def _traced(bundle: Bundle, variant: str) -> dict[str, Counter]:
    """Return counts per traced step. Device counters are left out, not 0, where the run saw no device at all."""
    rows = bundle.query(_CALLS, [variant]).to_pylist()
    steps = next(row["calls"] for row in rows if row["kind"] == "step")

    def count(kind: str, unit: str) -> Counter:
        parts = {row["name"]: Fraction(row["calls"], steps) for row in rows if row["kind"] == kind}
        return Counter(sum(parts.values(), Fraction()), unit, parts=parts)

    kinds = {row["kind"] for row in rows}
    counters = {}
    if "operator" in kinds:
        counters["host operators"] = operators = count("operator", "calls/step")
        counters["scalar reads"] = Counter(operators.parts.get(SCALAR_READ, Fraction()), "calls/step")
    if "kernel" in kinds:
        counters["kernels"] = count("kernel", "launches/step")
        counters["copies and fills"] = count("copy", "calls/step")
        counters["syncs"] = count("sync", "waits/step")
    return counters


def _clean(bundle: Bundle, variant: str) -> dict[str, Counter]:
    steps = load_steps(bundle, variant)
    if not len(steps):
        return {}
    number, tokens = len(steps), int(steps.committed.sum())
    counters = {
        "verify width": Counter(Fraction(int(steps.width.sum()), number), "tokens/step"),
        "accept length": Counter(Fraction(tokens, number), "tokens/step", "fall"),
    }
    if (steps.experts >= 0).all() and steps.experts.any():
        counters["distinct experts"] = Counter(Fraction(int(steps.experts.sum()), number), "experts/step")
    classes = bundle.query(
        "SELECT role || ' ' || tensor_class AS name, sum(read_bytes)::BIGINT AS bytes FROM tensors WHERE variant = ? "
        "GROUP BY ALL",
        [variant],
    ).to_pylist()
    if classes and tokens:
        parts = {row["name"]: Fraction(int(row["bytes"]) * number, tokens) for row in classes}
        counters["bytes"] = Counter(sum(parts.values(), Fraction()), "B/token", parts=parts)
    return counters


_STATIC = """
SELECT kernel, target, max(registers) AS registers, max(spill_store_bytes) AS stores, max(spill_load_bytes) AS loads
FROM static WHERE variant = ? OR variant IS NULL GROUP BY kernel, target
"""


def _static(bundle: Bundle, variant: str) -> dict[str, Counter]:
    counters = {}
    for row in bundle.query(_STATIC, [variant]).to_pylist():
        where = f"{row['kernel']} ({row['target']})"
        for key, name, unit in (
            ("registers", "registers", "registers/thread"),
            ("stores", "spill stores", "B/thread"),
            ("loads", "spill loads", "B/thread"),
        ):
            if row[key] is not None:
                counters[f"{name} of {where}"] = Counter(Fraction(row[key]), unit, kernel=row["kernel"])
    return counters


_OUTPUT = """
SELECT DISTINCT prompt_id, output_sha256 FROM sequences
WHERE variant = ? AND run_pass = 'clean' AND finish <> 'aborted' ORDER BY prompt_id, output_sha256
"""


def _output(bundle: Bundle, variant: str) -> str:
    """Return one SHA-256 over the clean outputs by prompt; empty where there are none."""
    rows = bundle.query(_OUTPUT, [variant]).to_pylist()
    text = "\n".join(f"{row['prompt_id']} {row['output_sha256']}" for row in rows)
    return hashlib.sha256(text.encode()).hexdigest() if rows else ""


def compare_counters(
    base: Sequence[Mapping[str, Counter]], head: Sequence[Mapping[str, Counter]], *, accept: Sequence[str] = ()
) -> tuple[Comparison, ...]:
    """Compare the counters of all launches of both sides, at least one each, in the order the base has them.

    ``accept``: names of counters whose change is wanted; a kernel's counters also by their first words ("registers").
    """
    names = list(dict.fromkeys(name for launch in (*base, *head) for name in launch))
    return tuple(_compare(name, _values(base, name), _values(head, name), accept) for name in names)


def _values(launches: Sequence[Mapping[str, Counter]], name: str) -> list[Counter]:
    return [launch[name] for launch in launches if name in launch]


def _compare(name: str, base: list[Counter], head: list[Counter], accept: Sequence[str]) -> Comparison:
    some = (base or head)[0]
    old, new = (launches[0].value if launches else None for launches in (base, head))
    varies = [len({launch.value for launch in launches}) > 1 for launches in (base, head)]
    if any(varies):
        old, new = (None if varying else value for value, varying in zip((old, new), varies, strict=True))
        return Comparison(name, some.unit, old, new, "varies", kernel=some.kernel)
    if old is None or new is None:
        return Comparison(name, some.unit, old, new, "new" if old is None else "gone", kernel=some.kernel)
    accepted = name in accept or name.split(" of ")[0] in accept
    status = _status(old, new, some.worse)
    moved = () if status == "equal" else _moved(base[0].parts, head[0].parts)
    return Comparison(name, some.unit, old, new, status, moved, some.kernel, accepted and status == "worse")


def _status(old: Fraction | str, new: Fraction | str, worse: Worse) -> Status:
    if old == new:
        return "equal"
    if isinstance(old, str) or isinstance(new, str) or worse == "change":
        return "worse"
    return "worse" if (new > old) == (worse == "rise") else "better"


def _moved(old: Mapping[str, Fraction], new: Mapping[str, Fraction]) -> tuple[tuple[str, Fraction], ...]:
    changes = {name: new.get(name, Fraction()) - old.get(name, Fraction()) for name in {*old, *new}}
    found = [(name, change) for name, change in changes.items() if change]
    return tuple(sorted(found, key=lambda item: (-abs(item[1]), item[0])))

"""The byte model of a bundle's variant again, with another precision, verify width or tensor parallelism."""

from dataclasses import dataclass, replace
from typing import Any

from workbench.decode.bytes import step_bytes
from workbench.decode.precision import AS_SHIPPED, load_policy
from workbench.decode.presets import load_preset
from workbench.diagnose.facts import Facts
from workbench.errors import UnfitError


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides the bytes of a step: model, policy, ranks, verify width, context, sequences."""

    model: str
    policy: str
    tp: int
    width: int
    context: int
    batch: int


def setup(facts: Facts) -> Setup:
    """Return the setup of a variant. Raises UnfitError where the bundle does not say which model it ran."""
    model = _section(facts.settings, "model")
    name = (
        model.get("preset") or model.get("name") or ("nano" if model.get("weights") and not model.get("shape") else "")
    )
    if not name:
        raise UnfitError(
            f"variant {facts.variant!r}: which model it ran is not known",
            hint="ingest it with --model, or name a preset",
        )
    policy = model.get("policy") or _section(facts.settings, "precision").get("policy") or AS_SHIPPED
    sql = (
        "SELECT median(width) AS width, median(context) AS context, median(batch) AS batch FROM steps "
        "WHERE variant = ? AND run_pass = ? AND NOT warmup"
    )
    row = facts.bundle.query(sql, [facts.variant, facts.time_pass]).to_pylist()[0]
    width, context, batch = (round(row[key] or least) for key, least in (("width", 1), ("context", 0), ("batch", 1)))
    return Setup(str(name), str(policy), int(model.get("tp") or 1), max(1, width), context, max(1, batch))


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    values = settings.get(name)
    return values if isinstance(values, dict) else {}


def changed(now: Setup, **changes: Any) -> Setup:
    """Return ``now`` with some of it changed."""
    return replace(now, **changes)


def bytes_of(one: Setup) -> float:
    """Return the bytes that one rank's verify forward reads, uniform routing. Raises InputError where a name is not
    known or a size does not fit."""
    spec = load_preset(one.model)
    policy = load_policy(one.policy, shipped=spec.shipped)
    load = step_bytes(spec, policy, tp=one.tp, width=one.width, context=one.context, batch=one.batch)
    return float(sum(row.read_bytes for row in load.rows))

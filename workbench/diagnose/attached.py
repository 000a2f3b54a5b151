"""What can be said of a server that was watched from outside: how much moves, how often nothing does, bytes a step.

Only sums over the window are known, so every figure is a mean: no step has boundaries here. Steps are counted by the
engine; where it does not say, their period is read off the traffic (tag estimated).
"""

from dataclasses import dataclass, replace
from typing import Any

from workbench.diagnose.attached_counters import AttachedCounters
from workbench.diagnose.attached_model import step_model
from workbench.diagnose.attached_step import decoded_step, eager_share, mean_step
from workbench.diagnose.finding import Finding
from workbench.diagnose.numbers import percent, significant
from workbench.quantity import Quantity
from workbench.trace.bundle import Bundle
from workbench.trace.bursts import IDLE_SHARE_OF_ROOF, SAMPLER, TRAFFIC
from workbench.trace.validity import Verdict, verdict

SCHEMA = "workbench.attached/1"


@dataclass(frozen=True, slots=True)
class Attached:
    """One server, watched for ``seconds``. None: not known; table ``limits`` says why.

    ``traffic``: device memory bytes a second, reads and writes. ``idle``: share of the time in which less than 1 % of
    the roof moved. ``sm_active``: share of cycles in which an average SM held a warp. ``ctas_per_sm``: while it moved.
    ``step``: mean step; ``accept_length``: tokens a step and sequence, the bonus token included. ``decoding``: share of
    the time in which traffic is that of decoding; the rest is prefill and pauses. ``bytes_per_step`` are measured while
    decoding, ``model_bytes`` those of the byte model, with the interval that routing leaves open; ``experts``: how many
    of a layer the measured ones correspond to. ``roof_share``: traffic over the roof, over all the time. ``sampled``:
    the time in which counters were read. ``period``: between two steps while decoding, where one was seen.
    """

    device: str
    engine: str
    verdict: Verdict
    seconds: Quantity
    sampled: Quantity | None
    roof: Quantity | None
    traffic: Quantity | None
    roof_share: Quantity | None
    idle: Quantity | None
    sm_active: Quantity | None
    ctas_per_sm: Quantity | None
    warps_active: Quantity | None
    tok_s: Quantity | None
    step: Quantity | None
    period: Quantity | None
    accept_length: Quantity | None
    decoding: Quantity | None
    bytes_per_step: Quantity | None
    model_bytes: Quantity | None
    experts: Quantity | None
    eager_share: Quantity | None
    power: Quantity | None
    clock: Quantity | None
    limits: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...] = ()

    def headline(self) -> str:
        """The answer in one sentence."""
        parts = []
        if self.tok_s:
            parts.append(f"{significant(self.tok_s.value, 3)} tok/s ({self.tok_s.tag})")
        if self.roof_share and self.roof:
            parts.append(f"{percent(self.roof_share.value, 2)} of the roof ({self.roof.note.split(':')[0]})")
        if self.idle:
            parts.append(f"in {percent(self.idle.value, 2)} of the time nothing moves")
        if not parts:
            return f"{self.device}: nothing could be measured; the limits say why."
        who = f"{self.engine} on {self.device}" if self.engine else self.device
        return f"{who}: {', '.join(parts)}."

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; absent where nothing is known."""
        numbers = {
            name: value.to_json()
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Quantity)
        }
        return {
            "schema": SCHEMA,
            "device": self.device,
            "engine": self.engine,
            "headline": self.headline(),
            "verdict": self.verdict.to_json(),
            **numbers,
            "findings": [finding.to_json() for finding in self.findings],
            "limits": list(self.limits),
        }


def attached(bundle: Bundle) -> Attached:
    """Return what ``bundle``, written by ``workbench attach``, says."""
    from workbench.diagnose.attached_findings import find

    settings = bundle.manifest.variants[0].settings.get("attach", {})
    counters = AttachedCounters(bundle)
    roof, model = _roof(bundle), step_model(bundle)
    engine = counters.engine_window()
    traffic = counters.rate((TRAFFIC, "dram_write_bytes"))
    mean = mean_step(engine, counters, settings.get("given", {}))
    decoded = decoded_step(counters, mean)
    found = Attached(
        device=str(bundle.manifest.device.get("name", "")),
        engine=str(settings.get("engine", "")),
        verdict=verdict(bundle),
        seconds=Quantity((int(settings.get("end_ns", 0)) - int(settings.get("start_ns", 0))) / 1e9, "s", "measured"),
        sampled=_sampled(counters),
        roof=roof,
        traffic=traffic,
        roof_share=Quantity(traffic.value / roof.value, "share", "measured", note=roof.note)
        if traffic and roof
        else None,
        idle=counters.idle(roof.value * 1e9 * IDLE_SHARE_OF_ROOF) if roof else None,
        sm_active=counters.mean("sm_active", "share"),
        ctas_per_sm=counters.mean("ctas_per_sm", "CTAs/SM", busy=True),
        warps_active=counters.mean("warps_active", "share", busy=True),
        tok_s=mean.tok_s,
        step=mean.step,
        period=decoded.period,
        accept_length=mean.accept_length,
        decoding=decoded.share,
        bytes_per_step=decoded.read,
        model_bytes=model.bytes if model else None,
        experts=model.distinct(decoded.read) if model and decoded.read else None,
        eager_share=eager_share(engine),
        power=counters.mean("power", "W"),
        clock=_mhz(counters.mean("sm_clock", "Hz")),
        limits=tuple(bundle.table("limits").to_pylist()),
    )
    return replace(found, findings=find(found))


def _sampled(counters: AttachedCounters) -> Quantity | None:
    samples = counters.sampled(TRAFFIC)
    if samples is None:
        return None
    return Quantity(float(samples.length.sum()) / 1e9, "s", "measured", note=f"by {SAMPLER}, in bursts")


def _mhz(clock: Quantity | None) -> Quantity | None:
    return Quantity(clock.value / 1e6, "MHz", clock.tag, note=clock.note) if clock else None


def _roof(bundle: Bundle) -> Quantity | None:
    """Return the roof: measured if there is one, else the datasheet's."""
    rows = {row["name"]: row for row in bundle.table("roofs").to_pylist()}
    for name in ("read", "datasheet"):
        if name in rows:
            row = rows[name]
            return Quantity(row["bytes_per_s"] / 1e9, "GB/s", row["tag"], note=f"{name}: {row['note']}")
    return None

"""What can be said of a server that was watched from outside: how much moves, how often nothing does, bytes a step.

Only sums over the window are known, so every figure is a mean: no step has boundaries here. Steps are counted by the
engine; where it does not say, their period is read off the traffic (tag estimated).
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.diagnose.decoding import WINDOW_STEPS, decoding
from workbench.diagnose.finding import Finding
from workbench.diagnose.numbers import percent, significant
from workbench.diagnose.waveform import step_period
from workbench.quantity import Quantity, Tag
from workbench.trace.bundle import Bundle

SCHEMA = "workbench.attached/1"
IDLE_SHARE_OF_ROOF = 0.01
"""A sample that moves less than this share of the roof counts as idle: some polling always shows."""

MOST_SAMPLES = 400_000
"""The first seconds are enough for a period, and a change of load later on would blur it."""

SAME_PERIOD = 0.05
"""How far the traffic's period may be from the mean step and still be the step."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Attached:
    """One server, watched for ``seconds``. None: not known; table ``limits`` says why.

    ``traffic``: device memory bytes a second, reads and writes. ``idle``: share of the time in which less than 1 % of
    the roof moved. ``sm_active``: share of cycles in which an average SM held a warp. ``ctas_per_sm``: while it moved.
    ``step``: mean step; ``accept_length``: tokens a step and sequence, the bonus token included. ``decoding``: share of
    the time in which traffic is that of decoding; the rest is prefill and pauses. ``bytes_per_step`` are measured while
    decoding, ``model_bytes`` those of the byte model. ``roof_share``: traffic over the roof, over all the time.
    """

    device: str
    engine: str
    seconds: Quantity
    roof: Quantity | None
    traffic: Quantity | None
    roof_share: Quantity | None
    idle: Quantity | None
    sm_active: Quantity | None
    ctas_per_sm: Quantity | None
    warps_active: Quantity | None
    tok_s: Quantity | None
    step: Quantity | None
    accept_length: Quantity | None
    decoding: Quantity | None
    bytes_per_step: Quantity | None
    model_bytes: Quantity | None
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
            **numbers,
            "findings": [finding.to_json() for finding in self.findings],
            "limits": list(self.limits),
        }


def attached(bundle: Bundle) -> Attached:
    """Return what ``bundle``, written by ``workbench attach``, says."""
    from workbench.diagnose.attached_findings import find

    variant = bundle.manifest.variants[0]
    settings = variant.settings.get("attach", {})
    begin, end = int(settings.get("start_ns", 0)), int(settings.get("end_ns", 0))
    seconds = (end - begin) / 1e9
    counters = _Counters(bundle)
    roof = _roof(bundle)
    engine = counters.engine_window()
    traffic = counters.rate(("dram_read_bytes", "dram_write_bytes"))
    idle = counters.idle(roof.value * 1e9 * IDLE_SHARE_OF_ROOF) if roof else None
    step, tok_s, accept = _step(engine, counters, settings.get("given", {}))
    part, per_step = counters.decoding(step) if step else (None, None)
    found = Attached(
        device=str(bundle.manifest.device.get("name", "")),
        engine=str(settings.get("engine", "")),
        seconds=Quantity(seconds, "s", "measured"),
        roof=roof,
        traffic=traffic,
        roof_share=Quantity(traffic.value / roof.value, "share", "measured", note=roof.note)
        if traffic and roof
        else None,
        idle=idle,
        sm_active=counters.mean("sm_active", "share"),
        ctas_per_sm=counters.mean("ctas_per_sm", "CTAs/SM", busy=True),
        warps_active=counters.mean("warps_active", "share", busy=True),
        tok_s=tok_s,
        step=step,
        accept_length=accept,
        decoding=part,
        bytes_per_step=per_step,
        model_bytes=_model_bytes(bundle),
        eager_share=engine.get("eager_share"),
        power=counters.mean("power", "W"),
        clock=_mhz(counters.mean("sm_clock", "Hz")),
        limits=tuple(bundle.table("limits").to_pylist()),
    )
    return replace(found, findings=find(found))


class _Counters:
    """The bundle's counters, by name."""

    def __init__(self, bundle: Bundle) -> None:
        table = bundle.query(
            "SELECT source, name, start_ns, end_ns, value, unit FROM counters ORDER BY source, name, start_ns"
        )
        sources, names = (table.column(key).to_numpy(zero_copy_only=False) for key in ("source", "name"))
        columns = {key: table.column(key).to_numpy().astype(np.int64) for key in ("start_ns", "end_ns")}
        values = table.column("value").to_numpy().astype(np.float64)
        self._by: dict[tuple[str, str], tuple[Any, Any, Floats]] = {}
        for key in sorted(set(zip(sources, names, strict=True))):
            rows = (sources == key[0]) & (names == key[1])
            self._by[key] = columns["start_ns"][rows], columns["end_ns"][rows], values[rows]

    def rate(self, names: tuple[str, ...]) -> Quantity | None:
        """Return the sum of ``names`` over the time their samples cover, GB/s."""
        found = [self._by[key] for name in names if (key := ("pm_sampler", name)) in self._by]
        if not found:
            return None
        total = sum(float(values.sum()) for _, _, values in found)
        covered = int((found[0][1] - found[0][0]).sum())
        samples = len(found[0][0])
        return Quantity(total / covered, "GB/s", "measured", note=f"mean of {samples} samples") if covered else None

    def idle(self, least_bytes_per_s: float) -> Quantity | None:
        """Return the share of sampled time in which reads and writes stay below ``least_bytes_per_s``."""
        moved = self._traffic()
        if moved is None:
            return None
        start, end, value = moved
        length = (end - start).astype(np.float64)
        quiet = value * 1e9 < least_bytes_per_s * length
        note = f"samples of {np.median(length) / 1e3:.0f} us below {least_bytes_per_s / 1e9:.0f} GB/s"
        return Quantity(float(length[quiet].sum() / length.sum()), "share", "measured", note=note)

    def mean(self, name: str, unit: str, *, busy: bool = False) -> Quantity | None:
        """Return the mean of ``name``, over time; ``busy``: where it is not zero."""
        for (_, found), (start, end, value) in self._by.items():
            if found != name:
                continue
            weight = np.maximum(end - start, 1).astype(np.float64)
            if busy:
                weight = np.where(value > 0, weight, 0.0)
            if weight.sum() <= 0:
                return None
            note = "while any was resident" if busy else ""
            return Quantity(float(value @ weight / weight.sum()), unit, "measured", note=note)
        return None

    def period_ns(self) -> tuple[float, float] | None:
        """Return the period of the traffic and its likeness."""
        moved = self._traffic()
        if moved is None:
            return None
        found = step_period(moved[0][:MOST_SAMPLES], moved[2][:MOST_SAMPLES])
        return (found.period_ns, found.likeness) if found else None

    def decoding(self, step: Quantity) -> tuple[Quantity | None, Quantity | None]:
        """Return the share of the time in which the server decoded, and the bytes that a step then read.

        The step's length is the period of the traffic where one is near ``step``: a client's mean has pauses in it.
        """
        reads = self._by.get(("pm_sampler", "dram_read_bytes"))
        if reads is None or not len(reads[0]):
            return None, None
        start, end, value = reads
        tag: Tag = "measured" if step.tag == "measured" else "estimated"
        counted = step.note != GIVEN_NOTE
        period_ns, whose = step.value * 1e6, "the step"
        # A step that the engine counted is a mean over pauses too: the period is shorter then, but no small part of it.
        shortest_ns = round((0.55 if counted else 1 - SAME_PERIOD) * period_ns)
        near = step_period(start[:MOST_SAMPLES], value[:MOST_SAMPLES], shortest_ns=shortest_ns)
        if near and near.period_ns <= (1 + SAME_PERIOD) * period_ns:
            period_ns, whose, counted = near.period_ns, "the period of the traffic", False
        found = decoding(start, end, value, period_ns)
        if found is None:
            rate = self.rate(("dram_read_bytes",))
            note = "mean of the whole window, prefill and pauses included, times the step: no steady decoding was seen"
            return None, Quantity(rate.value * period_ns, "B", "estimated", note=note) if rate else None
        if counted:
            period_ns, whose = period_ns * found.share, "the mean step without prefill and pauses"
        note = f"of {found.windows} windows of {WINDOW_STEPS} steps, those within 10 % of the median traffic"
        share = Quantity(found.share, "share", "measured", note=note)
        note = f"bytes read while decoding, over {significant(period_ns / 1e6, 4)} ms, {whose}"
        return share, Quantity(found.bytes_per_s * period_ns / 1e9, "B", tag, note=note)

    def _traffic(self) -> tuple[Any, Any, Floats] | None:
        reads = self._by.get(("pm_sampler", "dram_read_bytes"))
        if reads is None or not len(reads[0]):
            return None
        writes = self._by.get(("pm_sampler", "dram_write_bytes"))
        value = reads[2] + writes[2] if writes is not None and len(writes[2]) == len(reads[2]) else reads[2]
        return reads[0], reads[1], value

    def engine_window(self) -> dict[str, Any]:
        """Return what the engine counted between its first and its last reading, and its means."""
        found: dict[str, Any] = {}
        for (source, name), (at, _, value) in self._by.items():
            if source != "engine" or not len(at):
                continue
            found[name] = float(value[-1] - value[0])
            found[f"{name}.mean"] = float(value.mean())
            found[f"{name}.span_s"] = float(at[-1] - at[0]) / 1e9
        passes = found.get("graph_passes", 0.0) + found.get("eager_passes", 0.0)
        if passes > 0 and "eager_passes" in found:
            share = found["eager_passes"] / passes
            found["eager_share"] = Quantity(share, "share", "measured", note="decode forwards without a CUDA graph")
        return found


def _step(
    engine: dict[str, Any], counters: _Counters, given: dict[str, Any]
) -> tuple[Quantity | None, Quantity | None, Quantity | None]:
    """Return mean step (ms), tok/s and accept length. ``given``: what the user said of a server without metrics."""
    if given.get("tok_s") and not engine.get("tokens"):
        return _given_step(
            float(given["tok_s"]), float(given.get("accept_length") or 1.0), int(given.get("batch") or 1)
        )
    tokens, span = engine.get("tokens", 0.0), engine.get("tokens.span_s", 0.0)
    tok_s = (
        Quantity(tokens / span, "tok/s", "measured", note="the engine's counter") if tokens > 0 and span > 0 else None
    )
    batch = max(1.0, engine.get("running.mean", 1.0))
    accept = None
    if (own := engine.get("accept_length.mean", 0.0)) >= 1:
        accept = Quantity(own, "tokens", "measured", note="the engine's own average, the bonus token included")
    elif engine.get("verifies", 0.0) > 0 and "accepted" in engine:
        value = 1 + engine["accepted"] / engine["verifies"]
        accept = Quantity(value, "tokens", "measured", note="1 + accepted drafts / verify forwards")
    passes = engine.get("graph_passes", 0.0) + engine.get("eager_passes", 0.0)
    if passes > 0:
        span_s = engine.get("graph_passes.span_s") or engine["eager_passes.span_s"]
        return (
            Quantity(span_s / passes * 1e3, "ms", "measured", note="decode forwards the engine counted"),
            tok_s,
            accept,
        )
    if engine.get("verifies", 0.0) > 0:
        note = "verify forwards the engine counted"
        return (
            Quantity(engine["verifies.span_s"] / engine["verifies"] * 1e3, "ms", "measured", note=note),
            tok_s,
            accept,
        )
    if tok_s:
        value = (accept.value if accept else 1.0) * batch / tok_s.value * 1e3
        note = "accept length times running sequences over tok/s"
        return Quantity(value, "ms", "estimated", note=note), tok_s, accept
    if period := counters.period_ns():
        note = f"period of the memory traffic, likeness {period[1]:.2f}"
        return Quantity(period[0] / 1e6, "ms", "estimated", note=note), None, accept
    return None, None, accept


GIVEN_NOTE = "accept length times sequences over tok/s, as given"


def _given_step(tok_s: float, length: float, batch: int) -> tuple[Quantity, Quantity, Quantity]:
    by_client = "by the server's client, as given"
    milliseconds = length * max(1, batch) / tok_s * 1e3
    return (
        Quantity(milliseconds, "ms", "measured", note=GIVEN_NOTE),
        Quantity(tok_s, "tok/s", "measured", note=by_client),
        Quantity(length, "tokens", "measured", note=by_client),
    )


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


def _model_bytes(bundle: Bundle) -> Quantity | None:
    row = bundle.query("SELECT sum(read_bytes)::BIGINT AS total, max(width) AS width FROM tensors").to_pylist()[0]
    if not row["total"]:
        return None
    return Quantity(float(row["total"]), "B", "modelled", note=f"byte model, one rank, verify width {row['width']}")

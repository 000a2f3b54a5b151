"""What ``workbench model show`` says: the byte model of one model, its totals, and the floor it sets on a device.

Everything here is modelled. The JSON of :meth:`ModelReport.to_json` is documented in docs/reference/byte-model.md; its
keys are stable within ``SCHEMA``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.decode.byte_rows import ByteRow, StepBytes
from workbench.decode.bytes import Drafter, draft_bytes, step_bytes
from workbench.decode.precision import AS_SHIPPED, Policy, load_policy
from workbench.decode.presets import load_preset
from workbench.decode.spec import ModelSpec
from workbench.hardware import Hardware, load_hardware
from workbench.quantity import Quantity

SCHEMA = "workbench.model/1"
COLUMNS = ("tensors", "format", "placement", "parameters", "stored GB", "read GB", "share")


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model's step on ``tp`` ranks: ``target`` scores the tokens, ``draft`` (if any) proposed them."""

    spec: ModelSpec
    policy: Policy
    hardware: Hardware
    target: StepBytes
    draft: StepBytes | None = None

    @property
    def read_bytes(self) -> float:
        """Bytes one rank reads in one step, drafting included."""
        return self.target.read_bytes + (self.draft.read_bytes if self.draft else 0)

    @property
    def all_rows(self) -> tuple[ByteRow, ...]:
        """Rows of the target, then those of the drafter."""
        return self.target.rows + (self.draft.rows if self.draft else ())

    def totals(self) -> dict[str, Quantity]:
        """Return the totals by their JSON key. Bytes and operations are of one rank unless the key says otherwise."""
        step, tag = self.target, self.target.tag
        totals = {
            "params": Quantity(step.params, "parameters", tag, note="main stack, embedding and head included"),
            "active_params": Quantity(
                step.active_params, "parameters", tag, note="per token, embedding table excluded"
            ),
            "stored_bytes": Quantity(step.stored_bytes, "B", tag, note="all ranks, each weight once, scales included"),
            "resident_bytes_per_rank": Quantity(step.resident_bytes, "B", tag, note="weights and cache content"),
            "read_bytes_per_rank": Quantity(step.read_bytes, "B", tag, note=f"one step of {step.tokens} token(s)"),
            "read_bytes_per_rank_per_token": Quantity(
                step.read_bytes / step.tokens, "B", tag, note="read_bytes_per_rank over the tokens scored"
            ),
            "weight_read_bytes_per_rank": Quantity(step.weight_read_bytes, "B", tag),
            "cache_read_bytes_per_rank": Quantity(step.cache_read_bytes, "B", tag, note=f"context {step.context}"),
            "replicated_read_bytes_per_rank": Quantity(step.replicated_read_bytes, "B", tag),
            "replicated_weight_tax": Quantity(
                step.replicated_weight_tax, "fraction", tag, note="weight bytes beyond an even split, over that split"
            ),
            "flops_per_rank": Quantity(step.flops, "flop", tag, note="one step"),
        }
        if step.distinct and self.spec.moe is not None:
            source = "uniform independent routing, an upper bound" if tag == "modelled" else "measured counts"
            totals["distinct_experts_per_layer"] = Quantity(
                sum(step.distinct) / len(step.distinct), "experts", tag, note=f"of {self.spec.moe.experts}; {source}"
            )
        if self.draft is not None:
            totals["draft_params"] = Quantity(self.draft.params, "parameters", tag)
            totals["draft_read_bytes_per_rank"] = Quantity(
                self.draft.read_bytes, "B", tag, note=f"proposing {self.draft.width} token(s) a sequence"
            )
        return totals | self._floors()

    def _floors(self) -> dict[str, Quantity]:
        device, tag = self.hardware, self.target.tag
        flops = self.target.flops + (self.draft.flops if self.draft else 0)
        resident = self.target.resident_bytes + (self.draft.resident_bytes if self.draft else 0)
        practical = device.practical_bandwidth
        return {
            "floor_ms_datasheet": Quantity(
                self.read_bytes / device.hbm_bytes_per_s * 1e3,
                "ms",
                tag,
                note=f"at {device.datasheet_bandwidth.value:g} GB/s: {device.hbm_source}",
            ),
            "floor_ms_practical": Quantity(
                self.read_bytes / (practical.value * 1e9) * 1e3,
                "ms",
                tag,
                note=f"at {practical.value:g} GB/s: {practical.note}",
            ),
            "compute_ms_bf16": Quantity(
                flops / (device.bf16_tflops * 1e12) * 1e3, "ms", tag, note=f"at {device.bf16_tflops:g} TFLOP/s dense"
            ),
            "resident_share": Quantity(
                resident / device.capacity_bytes,
                "fraction",
                tag,
                note=f"of {device.capacity_bytes / 1e9:.1f} GB a rank",
            ),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's cells, one tuple of COLUMNS a row, largest reader first; the last row is the sum.

        GB are 1e9 bytes; ``read GB`` is one rank and one step. Groups that read nothing (caches of an empty context)
        are left out.
        """
        total = self.read_bytes
        shown = sorted((row for row in self.all_rows if row.read_bytes > 0), key=lambda row: -row.read_bytes)
        table: list[tuple[str, ...]] = [
            (
                row.name if row.part == "target" else f"{row.part}: {row.name}",
                row.format,
                row.placement if row.placement != "partial" else f"{row.parts} parts",
                f"{row.params:,}" if row.params else "",
                f"{row.stored_bytes / 1e9:.3f}" if row.stored_bytes else "",
                f"{row.read_bytes / 1e9:.4f}",
                f"{row.read_bytes / total:.1%}",
            )
            for row in shown
        ]
        params = sum(row.params for row in shown)
        stored = sum(row.stored_bytes for row in shown)
        table.append(("total", "", "", f"{params:,}", f"{stored / 1e9:.3f}", f"{total / 1e9:.4f}", "100.0%"))
        return table

    def summary(self) -> list[tuple[str, str]]:
        """Return label and text of the lines printed above the table; every text ends in its tag."""
        totals = self.totals()
        step = self.target

        def line(key: str, text: str) -> str:
            return f"{text} ({totals[key].tag})"

        params, active = totals["params"].value, totals["active_params"].value
        lines = [
            ("model", f"{self.spec.name}, {self.policy.name}: {self.policy.note}"),
            ("parameters", line("params", f"{params / 1e9:.2f} B, {active / 1e9:.2f} B active")),
            (
                "read per rank",
                line(
                    "read_bytes_per_rank",
                    f"{step.read_bytes / 1e9:.3f} GB a step at tp={step.tp}, width={step.width}, batch={step.batch}, "
                    f"context={step.context}",
                ),
            ),
            ("replicated-weight tax", line("replicated_weight_tax", f"{step.replicated_weight_tax:.1%}")),
        ]
        if (distinct := totals.get("distinct_experts_per_layer")) is not None:
            lines.append(("distinct experts", f"{distinct.value:.1f} a layer {distinct.note} ({distinct.tag})"))
        if self.draft is not None:
            text = f"{self.draft.read_bytes / 1e9:.3f} GB for {self.draft.width} token(s)"
            lines.append(("draft per rank", line("draft_read_bytes_per_rank", text)))
        for label, key in (("floor, datasheet", "floor_ms_datasheet"), ("floor, practical", "floor_ms_practical")):
            floor = totals[key]
            lines.append((label, f"{floor.value:.3f} ms on {self.hardware.name} {floor.note} ({floor.tag})"))
        share = totals["resident_share"]
        lines.append(("memory", f"{share.value:.0%} {share.note} ({share.tag})"))
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; keys are stable within the schema it names."""
        step = self.target
        return {
            "schema": SCHEMA,
            "model": self.spec.name,
            "source": self.spec.source,
            "policy": self.policy.name,
            "tp": step.tp,
            "width": step.width,
            "batch": step.batch,
            "context": step.context,
            "drafter": self.draft.rows[0].part if self.draft else "none",
            "hardware": {
                "name": self.hardware.name,
                "title": self.hardware.title,
                "datasheet_bandwidth": self.hardware.datasheet_bandwidth.to_json(),
                "practical_bandwidth": self.hardware.practical_bandwidth.to_json(),
                "capacity_bytes": self.hardware.capacity_bytes,
            },
            "totals": {key: quantity.to_json() for key, quantity in self.totals().items()},
            "rows": [_row_json(row, self.read_bytes) for row in self.all_rows],
        }


def model_report(
    name: str,
    *,
    tp: int = 1,
    width: int = 1,
    policy: str = AS_SHIPPED,
    context: int = 0,
    batch: int = 1,
    hardware: str = "h200",
    drafter: Literal["none"] | Drafter = "none",
    distinct_experts: Sequence[float] | None = None,
) -> ModelReport:
    """Return the report of the model called ``name`` (or described by a .toml file).

    ``drafter`` adds the drafting that proposes ``width - 1`` tokens (at width 1: the drafter's own depth). Raises
    InputError where a name is not known or a size does not fit the model.
    """
    spec = load_preset(name)
    chosen = load_policy(policy, shipped=spec.shipped)
    device = load_hardware(hardware)
    target = step_bytes(
        spec, chosen, tp=tp, width=width, context=context, batch=batch, distinct_experts=distinct_experts
    )
    draft = None
    if drafter != "none":
        drafts = width - 1 if width > 1 else None
        draft = draft_bytes(spec, chosen, drafter=drafter, drafts=drafts, tp=tp, context=context, batch=batch)
    return ModelReport(spec, chosen, device, target, draft)


def _row_json(row: ByteRow, total: float) -> dict[str, Any]:
    return {
        "name": row.name,
        "tensor_class": row.cls.value,
        "part": row.part,
        "format": row.format,
        "placement": row.placement,
        "parts": row.parts,
        "params": row.params,
        "active_params": row.active_params,
        "stored_bytes": row.stored_bytes,
        "resident_bytes_per_rank": row.resident_bytes,
        "read_bytes_per_rank": row.read_bytes,
        "read_share": row.read_bytes / total,
        "written_bytes_per_rank": row.written_bytes,
        "flops_per_rank": row.flops,
    }

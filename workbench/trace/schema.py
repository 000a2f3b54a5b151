"""Every table of a bundle, declared once: name, Arrow type, unit, whether it may be empty, meaning.

The Parquet schema, the validation (``workbench.trace.rows``) and the page docs/reference/tables.md all come from
here. Times are int64 nanoseconds on one clock, the one the manifest describes; a span is half open,
``[start_ns, end_ns)``. ``python -m workbench.trace.schema`` prints the page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

from workbench.errors import InputError

SCHEMA_VERSION = 1
"""Goes up with every change of a table that an older reader would misread."""

ArrowType = Literal["bool", "int32", "int64", "double", "string", "list<int32>"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. ``choices``: the only values allowed, where there are few of them."""

    name: str
    type: ArrowType
    unit: str
    meaning: str
    nullable: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """One table. ``key`` columns identify a row; ``order`` columns never decrease within a row."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    order: tuple[str, ...] = ()

    def column(self, name: str) -> Column:
        """Return the column called ``name``; InputError where there is none."""
        for column in self.columns:
            if column.name == name:
                return column
        names = [column.name for column in self.columns]
        raise InputError(f"table {self.name!r} has no column {name!r}", hint=_closest(name, names))


def _closest(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(names)}"


def _text(name: str, meaning: str, *choices: str, nullable: bool = False) -> Column:
    return Column(name, "string", "", meaning, nullable, choices)


def _id(name: str, meaning: str, *, nullable: bool = False) -> Column:
    return Column(name, "int64", "", meaning, nullable)


def _ns(name: str, meaning: str, *, nullable: bool = False) -> Column:
    return Column(name, "int64", "ns", meaning, nullable)


def _i32(name: str, unit: str, meaning: str, *, nullable: bool = False) -> Column:
    return Column(name, "int32", unit, meaning, nullable)


def _bytes(name: str, meaning: str, *, nullable: bool = False) -> Column:
    return Column(name, "int64", "B", meaning, nullable)


PASSES = ("clean", "sampled", "laned", "traced")
PHASES = ("draft", "forward", "verify")
TAGS = ("measured", "estimated", "modelled")

_VARIANT = _text("variant", "variant of the scenario, as named in the manifest")
_SOME_VARIANT = _text("variant", "variant of the scenario; null: the whole run", nullable=True)
_PASS = _text(
    "run_pass",
    "clean: no instrument was on; sampled: counters read by another process; laned: in-kernel stamps compiled in; "
    "traced: the profiler was on",
    *PASSES,
)
_STEP = _id("step_id", "step this belongs to; null: outside every step", nullable=True)
_PHASE = _text("phase", "part of the step; null: outside every step, or not known", *PHASES, nullable=True)
_RANK = _i32("rank", "", "tensor-parallel rank; null: a single process", nullable=True)
_CORRELATION = _id("correlation", "joins a launch on the host and its kernel", nullable=True)
_TAG = _text("tag", "how the number came to be known", *TAGS)

STEPS = Table(
    "steps",
    "One decode step: drafting [start_ns, draft_end_ns), the verify forward of the target [draft_end_ns, "
    "forward_end_ns), then acceptance, sampling and commit [forward_end_ns, end_ns).",
    (
        _VARIANT,
        _PASS,
        _id("step_id", "unique in the bundle"),
        _id("sequence_id", "sequence the step extends; null: not known", nullable=True),
        _i32("index", "", "position of the step in its sequence, or in the trace, from 0"),
        Column("warmup", "bool", "", "left out of every statistic"),
        _ns("start_ns", "the step begins; drafting begins"),
        _ns("draft_end_ns", "drafting ends; equal to start_ns without a drafter"),
        _ns("forward_end_ns", "the verify forward ends"),
        _ns("end_ns", "the step's tokens are committed"),
        _i32("context", "tokens", "tokens in the KV cache before the step; null: not known", nullable=True),
        _i32("width", "tokens", "verify width T: tokens the target scores; null: not known", nullable=True),
        _i32("drafted", "tokens", "draft tokens proposed; null: not known", nullable=True),
        _i32("accepted", "tokens", "draft tokens accepted; null: not known", nullable=True),
        _i32(
            "committed",
            "tokens",
            "accept length: tokens committed per sequence, the bonus token included; null: not known",
            nullable=True,
        ),
        Column("experts", "list<int32>", "experts", "distinct routed experts touched, one entry per MoE layer", True),
        _i32("batch", "sequences", "sequences decoded together; null: one, or not known", nullable=True),
        _text("mark", "the engine's own mark of the step, from an ingested trace", nullable=True),
        _ns("cpu_ns", "CPU time of the thread that decodes; null: not recorded", nullable=True),
        _ns("process_cpu_ns", "CPU time of all threads of its process; null: not recorded", nullable=True),
        _ns("ready_ns", "time in which that thread was ready to run and had no CPU; null: not recorded", nullable=True),
        _i32("sleeps", "", "how often that thread gave up the CPU by itself; null: not recorded", nullable=True),
    ),
    key=("step_id",),
    order=("start_ns", "draft_end_ns", "forward_end_ns", "end_ns"),
)

SEQUENCES = Table(
    "sequences",
    "One generated sequence: its prompt, its prefill and how it ended.",
    (
        _VARIANT,
        _PASS,
        _id("sequence_id", "unique in the bundle"),
        _text("prompt_id", "id of the prompt in the prompts file"),
        _i32("prompt_tokens", "tokens", "length of the prompt"),
        _i32("new_tokens", "tokens", "tokens generated after the prompt"),
        _ns("prefill_start_ns", "prefill begins"),
        _ns("prefill_end_ns", "prefill ends: the first new token is known"),
        _text("finish", "why generation ended", "length", "eos", "aborted"),
        _text("output_sha256", "SHA-256, hex, of the new tokens as little-endian int32"),
        Column("output_tokens", "list<int32>", "", "the new tokens; null: not kept", True),
    ),
    key=("sequence_id",),
    order=("prefill_start_ns", "prefill_end_ns"),
)

HOST = Table(
    "host",
    "What host threads did: framework operators, Python frames, CUDA runtime calls, annotations.",
    (
        _VARIANT,
        _id("host_id", "unique in the bundle"),
        _id("parent_id", "host_id of the enclosing row on the same thread", nullable=True),
        _RANK,
        _id("thread", "thread id, as the instrument gives it"),
        _text("name", "operator, function or API call"),
        _text(
            "category",
            "what kind of row this is; overhead: the instrument's own work",
            "op",
            "python",
            "runtime",
            "annotation",
            "overhead",
        ),
        _ns("start_ns", "begins"),
        _ns("end_ns", "ends"),
        _CORRELATION,
        _STEP,
        _PHASE,
    ),
    key=("host_id",),
    order=("start_ns", "end_ns"),
)

KERNELS = Table(
    "kernels",
    "One execution of a kernel, copy or fill on a device.",
    (
        _VARIANT,
        _id("kernel_id", "unique in the bundle"),
        _text("name", "demangled kernel name"),
        _text("kind", "what the device ran", "kernel", "memcpy", "memset"),
        _RANK,
        _i32("device", "", "device ordinal"),
        _id("stream", "stream id"),
        _ns("start_ns", "begins on the device"),
        _ns("end_ns", "ends on the device"),
        _CORRELATION,
        _id("graph_id", "CUDA graph that launched it", nullable=True),
        _id("graph_node", "node of that graph", nullable=True),
        _i32("grid_x", "CTAs", "grid size, x", nullable=True),
        _i32("grid_y", "CTAs", "grid size, y", nullable=True),
        _i32("grid_z", "CTAs", "grid size, z", nullable=True),
        _i32("block_x", "threads", "block size, x", nullable=True),
        _i32("block_y", "threads", "block size, y", nullable=True),
        _i32("block_z", "threads", "block size, z", nullable=True),
        _i32("cluster_x", "CTAs", "cluster size, x", nullable=True),
        _i32("cluster_y", "CTAs", "cluster size, y", nullable=True),
        _i32("cluster_z", "CTAs", "cluster size, z", nullable=True),
        _i32("registers", "", "registers per thread", nullable=True),
        _bytes("shared_static_bytes", "static shared memory per CTA", nullable=True),
        _bytes("shared_dynamic_bytes", "dynamic shared memory per CTA", nullable=True),
        _bytes("local_bytes_per_thread", "local memory per thread: stack and spills", nullable=True),
        Column("occupancy_limit", "double", "share", "resident warps the launch allows, of the SM's maximum", True),
        _bytes("copied_bytes", "bytes moved by a memcpy or memset", nullable=True),
        _STEP,
        _PHASE,
        _bytes("shared_bytes", "shared memory per CTA where only the sum is known", nullable=True),
    ),
    key=("kernel_id",),
    order=("start_ns", "end_ns"),
)

SYNCS = Table(
    "syncs",
    "The host, or a stream, waits for a device.",
    (
        _VARIANT,
        _text("kind", "what is waited for", "event", "stream_wait", "stream", "context"),
        _text("name", "API call"),
        _RANK,
        _id("thread", "waiting thread; null: a stream waits", nullable=True),
        _i32("device", "", "device ordinal", nullable=True),
        _id("stream", "stream waited for, or that waits", nullable=True),
        _ns("start_ns", "the wait begins"),
        _ns("end_ns", "the wait ends"),
        _CORRELATION,
        _id("host_id", "host row of the call", nullable=True),
        _STEP,
        _PHASE,
    ),
    order=("start_ns", "end_ns"),
)

COUNTERS = Table(
    "counters",
    "One sample of a counter: its value over [start_ns, end_ns).",
    (
        _SOME_VARIANT,
        _text("source", "instrument that read it"),
        _text("name", "counter"),
        _RANK,
        _i32("device", "", "device ordinal; null: the host", nullable=True),
        _ns("start_ns", "the sample's interval begins"),
        _ns("end_ns", "the sample's interval ends; equal to start_ns for an instant reading"),
        Column("value", "double", "see unit", "the counter over the interval"),
        _text("unit", "unit of value"),
    ),
    order=("start_ns", "end_ns"),
)

LANES = Table(
    "lanes",
    "What one CTA (or one of its warps) did inside a persistent kernel.",
    (
        _VARIANT,
        _id("kernel_id", "kernel it happened in"),
        _i32("sm", "", "streaming multiprocessor"),
        _i32("cta", "", "CTA, linear index in the grid"),
        _i32("warp", "", "warp in the CTA; null: the whole CTA", nullable=True),
        _text("task", "task of the kernel's schedule"),
        _text("kind", "what the span covers", "task", "wait", "compute", "signal"),
        _ns("start_ns", "begins"),
        _ns("end_ns", "ends"),
    ),
    order=("start_ns", "end_ns"),
)

STATIC = Table(
    "static",
    "Resources of one compiled kernel for one target, read from the binary; no device is needed.",
    (
        _SOME_VARIANT,
        _text("kernel", "kernel name"),
        _text("target", "compilation target, such as sm_90a"),
        _i32("registers", "", "registers per thread", nullable=True),
        _bytes("spill_store_bytes", "spill stores in the code, per thread", nullable=True),
        _bytes("spill_load_bytes", "spill loads in the code, per thread", nullable=True),
        _bytes("shared_bytes", "static shared memory per CTA", nullable=True),
        _bytes("local_bytes", "local memory per thread", nullable=True),
        _i32("max_threads", "threads", "largest block the code can be launched with", nullable=True),
        Column("occupancy_limit", "double", "share", "resident warps these resources allow, of the SM's maximum", True),
        _text("limiter", "resource that sets occupancy_limit", nullable=True),
    ),
)

TENSORS = Table(
    "tensors",
    "The byte model: one row per class of tensors a step reads, one device's share.",
    (
        _VARIANT,
        _text("role", "whose tensors", "target", "draft", "kv"),
        _text("tensor_class", "class, such as experts or attention"),
        _text("format", "number format as stored, such as bf16 or mxfp4"),
        Column("parameters", "int64", "", "elements"),
        _bytes("stored_bytes", "bytes as stored, scales included"),
        _bytes("resident_bytes", "bytes held in device memory"),
        _bytes("read_bytes", "bytes one step reads at this width"),
        _i32("width", "tokens", "verify width T that read_bytes is for"),
        Column("replicated", "bool", "", "held in full by every tensor-parallel rank, not sharded"),
        _TAG,
    ),
)

ROOFS = Table(
    "roofs",
    "Read bandwidth a device can reach: what a step's bytes are divided by.",
    (
        _text("device", "device name as in the manifest"),
        _text("name", "which roof, such as read-stream or datasheet"),
        Column("bytes_per_s", "int64", "B/s", "read bandwidth"),
        _TAG,
        _text("note", "how it was obtained"),
    ),
)

ENV = Table(
    "env",
    "The environment, one fact a row.",
    (_text("key", "what"), _text("value", "its value")),
)

LIMITS = Table(
    "limits",
    "What could not be measured, and what was done instead.",
    (
        _SOME_VARIANT,
        _text("instrument", "instrument that was wanted"),
        _text("what", "quantity that is missing"),
        _text("why", "reason"),
        _text("fallback", "what stands in for it; empty: nothing"),
        _text("fix", "how to get it; empty: not on this machine"),
    ),
)

LOSSES = Table(
    "losses",
    "Records an instrument lost, and gaps in what it saw.",
    (
        _SOME_VARIANT,
        _text("probe", "instrument that lost them"),
        _text("kind", "what was lost, such as dropped-records, gap or truncated"),
        Column("count", "int64", "", "how many"),
        _ns("first_ns", "first known loss", nullable=True),
        _ns("last_ns", "last known loss", nullable=True),
        _text(
            "severity",
            "data_loss: findings on the interval are doubtful; error: the table is",
            "info",
            "data_loss",
            "error",
        ),
        _text("detail", "in words"),
    ),
    order=("first_ns", "last_ns"),
)

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        table.name: table
        for table in (
            STEPS,
            SEQUENCES,
            HOST,
            KERNELS,
            SYNCS,
            COUNTERS,
            LANES,
            STATIC,
            TENSORS,
            ROOFS,
            ENV,
            LIMITS,
            LOSSES,
        )
    }
)
"""All tables by name."""


def table(name: str) -> Table:
    """Return the declaration of ``name``; InputError where there is no such table."""
    if name not in TABLES:
        close = get_close_matches(name, TABLES, n=1)
        raise InputError(
            f"no table {name!r}", hint=f"did you mean {close[0]!r}?" if close else f"tables: {', '.join(TABLES)}"
        )
    return TABLES[name]


def arrow_schema(name: str) -> Any:
    """Return the ``pyarrow.Schema`` of table ``name``; each field carries its unit and meaning as metadata."""
    import pyarrow as pa

    types = {
        "bool": pa.bool_(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "string": pa.string(),
        "list<int32>": pa.list_(pa.int32()),
    }
    return pa.schema(
        [
            pa.field(
                column.name,
                types[column.type],
                nullable=column.nullable,
                metadata={"unit": column.unit, "meaning": column.meaning},
            )
            for column in table(name).columns
        ],
        metadata={"workbench.table": name, "workbench.schema_version": str(SCHEMA_VERSION)},
    )


def markdown() -> str:
    """Return the reference page of all tables."""
    lines = [
        "# Tables of a bundle",
        "",
        f"Schema version {SCHEMA_VERSION}. Written by `python -m workbench.trace.schema`; do not edit.",
        "",
        "Times are int64 nanoseconds on the one clock that the manifest describes. A span is half open: it holds its",
        "start and not its end. A table that a run did not fill is absent and reads as empty.",
    ]
    for entry in TABLES.values():
        lines += ["", f"## {entry.name}", "", entry.meaning]
        if entry.key:
            lines += ["", f"Key: `{'`, `'.join(entry.key)}`."]
        if entry.order:
            lines += ["", f"In each row: `{' ≤ '.join(entry.order)}`."]
        lines += ["", "| column | type | unit | null | meaning |", "|---|---|---|---|---|"]
        for column in entry.columns:
            meaning = column.meaning
            if column.choices:
                meaning += f" (`{'`, `'.join(column.choices)}`)"
            null = "yes" if column.nullable else ""
            lines.append(f"| `{column.name}` | {column.type} | {column.unit} | {null} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")

"""What an export of Nsight Systems says of its session: devices, versions, when it began, what it lost."""

import re
from typing import Any

from workbench.ingest.losses import Losses
from workbench.ingest.sqlite_file import SqliteFile

DIAGNOSTIC = "DIAGNOSTIC_EVENT"

_NOT_KEPT = {
    "OSRT_API": "calls of the operating system's library",
    "COMPOSITE_EVENTS": "samples of call stacks",
    "SAMPLING_CALLCHAINS": "samples of call stacks",
    "SCHED_EVENTS": "switches between threads",
    "CUDA_GRAPH_NODE_EVENTS": "creation of graph nodes",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "allocations",
}
_TROUBLE = re.compile(r"\b(?:dropp?(?:ed|ing)?|exceed\w*|overflow\w*|out of memory|lost|not enough)\b", re.IGNORECASE)


def session_header(file: SqliteFile, strings: dict[int, str]) -> dict[str, Any]:
    """Return devices and versions, laid out as torch.profiler's header is."""
    fields = ("id", "name", "smCount", "memoryBandwidth", "totalMemory", "chipName", "computeMajor", "computeMinor")
    rows = file.values("TARGET_INFO_GPU", fields)
    devices = [
        {
            "id": row["id"],
            "name": strings.get(row["name"], "") if type(row["name"]) is int else row["name"],
            "numSms": row["smCount"],
            "memoryBandwidth": row["memoryBandwidth"],
            "totalGlobalMem": row["totalMemory"],
            "chipName": row["chipName"],
            "computeMajor": row["computeMajor"],
            "computeMinor": row["computeMinor"],
        }
        for row in rows
    ]
    header: dict[str, Any] = {"deviceProperties": devices} if devices else {}
    for row in file.values("META_DATA_EXPORT", ("name", "value"))[:100]:
        if str(row["name"]).startswith("EXPORT_"):  # others may name the machine
            header[f"nsys.{str(row['name'])[:80]}"] = row["value"]
    return header


def start_time(file: SqliteFile) -> int | None:
    """Return the UTC nanoseconds at which the session began; None where the file does not say."""
    rows = file.values("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))
    found = rows[0]["utcEpochNs"] if rows else None
    return found if type(found) is int and 0 <= found < 1 << 62 else None


def note_rest(file: SqliteFile, losses: Losses) -> None:
    """Count what the profiler says it lost, and what of the file is not kept."""
    for row in file.values(DIAGNOSTIC, ("text",)):
        text = str(row["text"] or "")
        if _TROUBLE.search(text):
            losses.add("profiler-log", "data_loss", text[:300])
    for name, what in _NOT_KEPT.items():
        if name in file.tables:
            losses.add(f"not-kept-{name.lower()}", "info", f"{what}: not kept")

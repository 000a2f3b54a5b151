"""Facts about the machine and the profiler from a trace's header: rows of table ``env``."""

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from workbench.ingest.losses import Losses

MAX_FACTS = 2000
MAX_TEXT = 400

_TROUBLE = re.compile(r"\b(?:dropp?(?:ed|ing)?|exceed\w*|overflow\w*|out of memory|lost)\b", re.IGNORECASE)
_LOGS = ("INFO", "WARNING", "ERROR", "VERBOSE", "STAGE")


def facts(header: dict[str, Any], threads: dict[int, str], losses: Losses) -> list[dict[str, str]]:
    """Return the rows of ``env``. The profiler's log lines are not kept; those that speak of losses become losses."""
    rows: list[dict[str, str]] = []
    for key, value in header.items():
        if key in _LOGS and isinstance(value, list):
            lines = [str(line) for line in value]
            for line in lines:
                if _TROUBLE.search(line):
                    losses.add("profiler-log", "data_loss", line[:300])
            losses.add("not-kept-log", "info", f"log lines of the profiler: {key}", count=len(lines))
        else:
            rows += _flat(key, value)
    rows += [{"key": f"thread {number}", "value": text} for number, text in threads.items()]
    if len(rows) > MAX_FACTS:
        losses.add("env-cut", "info", f"facts of the header beyond {MAX_FACTS}", count=len(rows) - MAX_FACTS)
    return [{"key": row["key"][:MAX_TEXT], "value": row["value"][:MAX_TEXT]} for row in rows[:MAX_FACTS]]


def devices(header: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the properties of each device by its ordinal."""
    listed = header.get("deviceProperties")
    known = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return {entry["id"]: entry for entry in known if type(entry.get("id")) is int}


def device_name(header: dict[str, Any]) -> str:
    """Return the name of the first device that has one; empty where none has."""
    names = (entry.get("name") for entry in devices(header).values())
    return next((name[:MAX_TEXT] for name in names if isinstance(name, str) and name), "")


def rank(header: dict[str, Any]) -> int | None:
    """Return the rank that wrote the trace; None for a single process."""
    info = header.get("distributedInfo")
    if not isinstance(info, dict):
        return None
    rank_, world = info.get("rank"), info.get("world_size")
    several = type(world) is int and world > 1
    return rank_ if several and type(rank_) is int and 0 <= rank_ < 1 << 31 else None


def base_ns(header: dict[str, Any]) -> int | None:
    """Return the UTC nanoseconds that the trace's times count from; None where they count from 1970 themselves."""
    base = header.get("baseTimeNanoseconds")
    return base if type(base) is int and 0 <= base < 1 << 62 else None


def _flat(key: str, value: Any, depth: int = 0) -> Iterator[dict[str, str]]:
    if isinstance(value, dict) and depth < 4:
        for inner, item in value.items():
            yield from _flat(f"{key}.{inner}", item, depth + 1)
    elif isinstance(value, list) and depth < 4 and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            name = item.get("id", index) if isinstance(item, dict) else index
            yield from _flat(f"{key}.{name}", item, depth + 1)
    else:
        # A path on the machine that was profiled is nobody's business; the file's name is.
        text = PurePath(value).name if key == "traceName" and isinstance(value, str) else str(value)
        yield {"key": key, "value": text}

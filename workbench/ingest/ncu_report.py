"""A report of Nsight Compute through NVIDIA's own package, where it is installed."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import InputError
from workbench.ingest.losses import Losses
from workbench.ingest.ncu import KEPT, PROBE, Launch, in_base_unit, launches_part, number
from workbench.ingest.part import Part

PACKAGE = "ncu_report"
_SIZES = ("launch__grid_dim_x", "launch__grid_dim_y", "launch__grid_dim_z")
_BLOCKS = ("launch__block_dim_x", "launch__block_dim_y", "launch__block_dim_z")
_MAJOR, _MINOR = (f"device__attribute_compute_capability_{part}" for part in ("major", "minor"))
_DEVICE_NAME = "device__attribute_display_name"


def read_ncu_report(path: Path) -> Part:
    """Read the report in ``path``. Raises InputError where the package is missing or the report holds no kernel."""
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError:
        fix = "pip install ncu-report, or: ncu --import FILE --csv --page raw > FILE.csv"
        raise InputError(f"{path}: reports of Nsight Compute need the package ncu-report", hint=fix) from None
    try:
        context = package.load_report(str(path))
        actions = list(_actions(context))
    except Exception as error:  # the package raises what its C++ does, of no common class
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{path}: the package ncu-report cannot read it ({line})", hint="profile again") from None
    losses = Losses(PROBE)
    launches = [_launch(action, losses) for action in actions]
    device = next((name for action in actions if (name := _text(action, _DEVICE_NAME))), "")
    return launches_part(path, launches, losses, device=device)


def _actions(context: Any) -> Iterator[Any]:
    for at in range(context.num_ranges()):
        measured = context.range_by_idx(at)
        for place in range(measured.num_actions()):
            yield measured.action_by_idx(place)


def _launch(action: Any, losses: Losses) -> Launch:
    major, minor = _value(action, _MAJOR), _value(action, _MINOR)
    launch = Launch(
        name=str(action.name()) or "(unnamed)",
        grid=_dimensions(action, _SIZES),
        block=_dimensions(action, _BLOCKS),
        capability=f"{major:.0f}.{minor:.0f}" if major is not None and minor is not None else "",
    )
    for name in action.metric_names():
        if not str(name).startswith((*KEPT, "launch__")):
            continue
        metric = action.metric_by_name(name)
        value = number(metric.value()) if metric is not None else None
        if value is None:
            losses.add("unusable-metric", "info", f"metrics that are no numbers, such as {str(name)[:60]}")
            continue
        launch.metrics[str(name)] = in_base_unit(value, str(metric.unit() or ""))
    return launch


def _value(action: Any, name: str) -> float | None:
    metric = action.metric_by_name(name)
    return number(metric.value()) if metric is not None else None


def _text(action: Any, name: str) -> str:
    metric = action.metric_by_name(name)
    return str(metric.value())[:200] if metric is not None else ""


def _dimensions(action: Any, names: tuple[str, ...]) -> tuple[int, int, int] | None:
    found = [_value(action, name) for name in names]
    if any(value is None or not 0 < value < 1 << 31 for value in found):
        return None
    x, y, z = (round(value) for value in found if value is not None)
    return x, y, z

"""The result as JSON: everything, under a versioned schema name."""

from workbench.gate.result import GateResult
from workbench.terminal import json_text


def render(result: GateResult) -> str:
    """Return the result as JSON text; numbers that are not finite are null."""
    return json_text(result.to_json())

"""The settings of a bundle's variants, as far as they survived."""

from typing import Any

from workbench.trace.bundle import Bundle

UNKNOWN = "unknown"

_NEEDED = (("drafter", "kind"), ("engine", "device"), ("sampling", "method"))


def variant_settings(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """Return every variant's settings by name. What the diagnosis asks for is there: ``unknown`` where it is not.

    A bundle that lost its manifest, or one written by another tool, has variants without settings.
    """
    return {record.name: _complete(record.settings) for record in bundle.manifest.variants}


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    result = dict(settings)
    for section, key in _NEEDED:
        values = result.get(section)
        values = dict(values) if isinstance(values, dict) else {}
        if not isinstance(values.get(key), str):
            values[key] = UNKNOWN
        result[section] = values
    return result

"""The report as JSON: what ``workbench show --json`` and ``workbench report --format json`` give."""

from dataclasses import asdict
from typing import Any

from workbench.diagnose.headline import headline
from workbench.diagnose.quality import limits
from workbench.diagnose.summary import Diagnosis
from workbench.trace.bundle import Bundle

SCHEMA = "workbench.summary/1"


def summary_json(bundle: Bundle, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis with what a reader needs beside it: state, device, losses and limits."""
    manifest = bundle.manifest
    return {
        "schema": SCHEMA,
        "bundle": str(bundle.path),
        "state": manifest.state,
        "failure": manifest.failure,
        "created": manifest.created,
        "device": manifest.device,
        "notes": manifest.notes,
        "headline": headline(diagnosis),
        "losses": bundle.table("losses").to_pylist(),
        "limits": [asdict(limit) for limit in limits(bundle)],
        "diagnosis": diagnosis.to_json(),
    }

"""The report as JSON: what ``workbench show --json`` and ``workbench report --format json`` give."""

from dataclasses import asdict
from typing import Any

from workbench.diagnose.headline import headline
from workbench.diagnose.kernels_by_name import kernels_by_name
from workbench.diagnose.overview import overview
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


def trace_json(bundle: Bundle) -> dict[str, Any]:
    """Return the overview of an ingested trace with its kernels by name, as far as its verdict allows."""
    found = overview(bundle)
    variant = bundle.manifest.variants[0].name
    timed = found.verdict.allows("device-time")
    kernels = kernels_by_name(bundle, variant, found.busy) if timed else ()
    return {"bundle": str(bundle.path), **found.to_json(), "kernels": [one.to_json() for one in kernels]}

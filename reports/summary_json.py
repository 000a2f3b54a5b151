"""The report as JSON: what ``workbench show --json`` and ``workbench report --format json`` give."""

from dataclasses import asdict
from typing import Any

from workbench.diagnose.facts import Facts
from workbench.diagnose.headline import headline
from workbench.diagnose.kernels_by_name import kernels_by_name
from workbench.diagnose.overview import overview
from workbench.diagnose.quality import limits
from workbench.diagnose.speculation import break_even
from workbench.diagnose.speculation_view import SpeculationView, speculation_view
from workbench.diagnose.summary import Diagnosis
from workbench.trace.bundle import Bundle
from workbench.trace.validity import verdict

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
        "break_even": {variant.name: _break_even(bundle, variant.name) for variant in diagnosis.variants},
        "speculation": {name: view.to_json() for name, view in _views(bundle, diagnosis).items()},
        "verdict": verdict(bundle).to_json(),
    }


def _break_even(bundle: Bundle, variant: str) -> dict[str, Any] | None:
    """Return what speculation must reach to pay, and whether it does; None without a plain twin."""
    found = break_even(bundle, variant)
    if found is None:
        return None
    return {
        "baseline": found.baseline,
        "prompts": found.prompts,
        "needed": found.needed.to_json(),
        "accept_length": found.accept_length,
        "speedup": found.speedup.to_json(),
        "verdict": found.verdict,
    }


def _views(bundle: Bundle, diagnosis: Diagnosis) -> dict[str, SpeculationView]:
    views = {one.name: speculation_view(Facts(bundle, one.name)) for one in diagnosis.variants}
    return {name: view for name, view in views.items() if view is not None}


def trace_json(bundle: Bundle) -> dict[str, Any]:
    """Return the overview of an ingested trace with its kernels by name, as far as its verdict allows."""
    found = overview(bundle)
    variant = bundle.manifest.variants[0].name
    timed = found.verdict.allows("device-time")
    kernels = kernels_by_name(bundle, variant, found.busy) if timed else ()
    return {"bundle": str(bundle.path), **found.to_json(), "kernels": [one.to_json() for one in kernels]}

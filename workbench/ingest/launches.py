"""Which host call launched which device row."""

import re

import numpy as np

from workbench.ingest.columns import Ints
from workbench.ingest.kineto import HOST_CATEGORIES, KinetoTrace

GRAPH_LAUNCH = re.compile(r"(?:cuda|cu|hip)GraphLaunch\w*")


def match_launches(trace: KinetoTrace) -> Ints:
    """Return, for each device row, the index of the host row that launched it, or -1.

    They share a correlation. Where a runtime call and the driver call within it carry the same one, the outer counts.
    """
    host = trace.host
    calls = np.flatnonzero((host["category"] == HOST_CATEGORIES.index("runtime")) & (host["correlation"] > 0))
    calls = calls[np.lexsort((-host["end"][calls], host["start"][calls], host["correlation"][calls]))]
    correlations, first = np.unique(host["correlation"][calls], return_index=True)
    wanted = trace.device["correlation"]
    at = np.searchsorted(correlations, wanted)
    found = np.full(len(wanted), -1, np.int64)
    if len(correlations):
        at = np.minimum(at, len(correlations) - 1)
        hit = correlations[at] == wanted
        found[hit] = calls[first[at[hit]]]
    return found


def named(trace: KinetoTrace, pattern: re.Pattern[str]) -> Ints:
    """Return the host rows whose whole name matches ``pattern``, by start."""
    codes = [code for code, name in enumerate(trace.names) if pattern.fullmatch(name)]
    rows = np.flatnonzero(np.isin(trace.host["name"], codes))
    return rows[np.argsort(trace.host["start"][rows], kind="stable")]

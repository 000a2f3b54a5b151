"""Detectors: each module looks for one kind of loss or doubt in a bundle and returns findings.

A detector is a function ``(Facts) -> list[Finding]``; ``DETECTORS`` lists them in no particular order.
"""

from collections.abc import Callable

from workbench.diagnose.facts import Facts
from workbench.diagnose.finding import Finding, ranked
from workbench.diagnose.findings.between_graphs import kernels_between_graphs
from workbench.diagnose.findings.between_steps import between_steps
from workbench.diagnose.findings.byte_losses import beyond_roof, expanded_weights, over_fetch, replicated_weights
from workbench.diagnose.findings.conditions import clock_throttled, data_quality, foreign_process
from workbench.diagnose.findings.cpu_host import context_cost, host_stall
from workbench.diagnose.findings.data_movement import data_movement
from workbench.diagnose.findings.device_losses import device_losses
from workbench.diagnose.findings.engine_claims import engine_bandwidth, expanded_by_bytes, graph_off
from workbench.diagnose.findings.graphs import graph_break
from workbench.diagnose.findings.host_waits import cpu_sync, host_bound
from workbench.diagnose.findings.kv_over_read import kv_over_read
from workbench.diagnose.findings.log_acceptance import log_acceptance
from workbench.diagnose.findings.sampling import unfused_sampling, verify_time
from workbench.diagnose.findings.skinny_gemm import skinny_gemm
from workbench.diagnose.findings.speculation import DETECTORS as SPECULATION
from workbench.diagnose.findings.traced_graphs import trace_inflation
from workbench.diagnose.findings.twin import slower_than_twin
from workbench.diagnose.findings.uneven_steps import cpu_contention, noisy_run, step_outliers
from workbench.trace.bundle import Bundle
from workbench.trace.validity import Verdict

Detector = Callable[[Facts], list[Finding]]

DETECTORS: tuple[Detector, ...] = (
    data_quality,
    foreign_process,
    clock_throttled,
    noisy_run,
    step_outliers,
    cpu_contention,
    device_losses,
    graph_break,
    cpu_sync,
    host_bound,
    host_stall,
    context_cost,
    data_movement,
    between_steps,
    beyond_roof,
    expanded_weights,
    over_fetch,
    replicated_weights,
    unfused_sampling,
    verify_time,
    trace_inflation,
    kernels_between_graphs,
    skinny_gemm,
    kv_over_read,
    engine_bandwidth,
    graph_off,
    expanded_by_bytes,
    log_acceptance,
    *SPECULATION,
)


def find(bundle: Bundle, variant: str, judged: Verdict | None = None) -> tuple[Finding, ...]:
    """Return all findings about ``variant``, ranked. Raises InputError where there is no such variant."""
    return find_in(Facts(bundle, variant, judged))


def find_in(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings about the variant of ``facts``, ranked."""
    found = [finding for detector in DETECTORS for finding in detector(facts)]
    return ranked([*found, *slower_than_twin(facts, found)])

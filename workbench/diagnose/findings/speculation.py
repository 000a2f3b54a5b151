"""All detectors of speculation."""

from workbench.diagnose.findings.speculation_change import acceptance_change
from workbench.diagnose.findings.speculation_part import acceptance_part
from workbench.diagnose.findings.speculation_pay import draft_depth, speculation_not_paying
from workbench.diagnose.findings.speculation_precision import quantisation_costs_acceptance
from workbench.diagnose.findings.speculation_shape import acceptance_shape

DETECTORS = (
    acceptance_shape,
    acceptance_part,
    acceptance_change,
    quantisation_costs_acceptance,
    speculation_not_paying,
    draft_depth,
)

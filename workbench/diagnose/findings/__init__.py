"""Detectors: each module looks for one kind of loss or doubt in a bundle and returns findings.

A detector is a function ``(Facts) -> list[Finding]``; ``DETECTORS`` lists them in no particular order.
"""

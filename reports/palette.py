"""Colours that mean the same thing everywhere. Chosen to read on white and on near-black alike."""

CAUSES: dict[str, str] = {
    "floor": "#2a9080",
    "over-fetch": "#1f7a9c",
    "under-fill": "#7f8c2b",
    "spill": "#b5443c",
    "instruction-bound": "#4a8fd0",
    "serialised": "#5a63b8",
    "tail": "#5b9a52",
    "compute": "#3a6fc4",
    "small-kernels": "#a3617c",
    "barrier-wait": "#5d7f96",
    "replay-boundary": "#a06a2c",
    "launch-gap": "#b98a14",
    "cpu-sync": "#c0392b",
    "host-bound": "#d0702e",
    "draft": "#8a55cc",
    "verify-and-sampling": "#c4467f",
    "collective": "#8a5f4a",
    "profiler": "#6f7a3a",
    "unexplained": "#7d828c",
}
"""Colour of each cause of step time."""

VARIANTS: tuple[str, ...] = ("#3a76c8", "#d0702e", "#2a9080", "#8a55cc", "#c4467f", "#a88414", "#5b9a52", "#7d828c")
"""Colours of variants in the order of the scenario, repeated where there are more."""


def cause_colour(name: str) -> str:
    """Return the colour of cause ``name``; that of "unexplained" for a name that is not known."""
    return CAUSES.get(name, CAUSES["unexplained"])


def variant_colour(index: int) -> str:
    """Return the colour of the variant at ``index`` in the scenario."""
    return VARIANTS[index % len(VARIANTS)]

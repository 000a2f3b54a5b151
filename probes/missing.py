"""What a run on this kind of device does not measure by choice or by nature: shown in every report.

What was wanted and failed is said by the instrument itself.
"""

from typing import Protocol

from workbench.probes.protocol import Missing

_NO_GPU = "the run is on the CPU"
_ON_GPU = "run on an NVIDIA GPU"
_MODELLED = "bytes of the byte model over step time, tagged modelled"


class Switches(Protocol):
    """Which instruments were asked for (``workbench.scenario.Instruments``)."""

    @property
    def pm(self) -> bool:
        """The counter sampler."""

    @property
    def nvml(self) -> bool:
        """NVML."""

    @property
    def static(self) -> bool:
        """Resources of compiled kernels."""


def unmeasured(device: str, *, engine: str, instruments: Switches) -> list[Missing]:
    """Return the signals that are not read on ``device`` ("cpu" or "cuda") for ``engine``, and why."""
    if device == "cpu":
        no_kernels, gaps = "no kernels are launched", "host time between operators"
        return [
            Missing("pm_sampler", "HBM throughput", _NO_GPU, fallback=_MODELLED, fix=_ON_GPU),
            Missing("pm_sampler", "CTA occupancy", _NO_GPU, fix=_ON_GPU),
            Missing("static", "register spills", f"the {engine} rung runs no compiled GPU kernel here", fix=_ON_GPU),
            Missing("kernels", "launch gaps", no_kernels, fallback=gaps, fix=_ON_GPU),
            Missing("kernels", "CPU-GPU synchronisation", _NO_GPU, fix=_ON_GPU),
        ]
    means = "NVML's means over a capture" if instruments.nvml else _MODELLED
    rows = [
        ("pm_sampler", "pm", "HBM throughput and CTA occupancy", means),
        ("nvml", "nvml", "clocks, power and throttling", ""),
        ("static", "static", "register spills and occupancy limits", "registers of the traced launches"),
    ]
    return [
        Missing(probe, what, f"instruments.{switch} is false", fallback=fallback, fix=f"set instruments.{switch}")
        for probe, switch, what, fallback in rows
        if not getattr(instruments, switch)
    ]

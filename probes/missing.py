"""What a run on this kind of device cannot measure, instrument by instrument: shown in every report."""

from workbench.probes.protocol import Missing

_NO_GPU = "the run is on the CPU"
_ON_GPU = "run on an NVIDIA GPU"
_NO_SAMPLER = "this version has no counter sampler"
_MODELLED = "bytes of the byte model over step time, tagged modelled"


def unmeasured(device: str, *, engine: str) -> list[Missing]:
    """Return the signals that no instrument of this version reads on ``device`` ("cpu" or "cuda") for ``engine``."""
    if device == "cpu":
        no_kernels, gaps = "no kernels are launched", "host time between operators"
        return [
            Missing("pm_sampler", "HBM throughput", _NO_GPU, fallback=_MODELLED, fix=_ON_GPU),
            Missing("pm_sampler", "CTA occupancy", _NO_GPU, fix=_ON_GPU),
            Missing("static", "register spills", f"the {engine} rung runs no compiled GPU kernel here", fix=_ON_GPU),
            Missing("kernels", "launch gaps", no_kernels, fallback=gaps, fix=_ON_GPU),
            Missing("kernels", "CPU-GPU synchronisation", _NO_GPU, fix=_ON_GPU),
        ]
    libraries = f"the {engine} rung runs library kernels whose binaries are not inspected"
    return [
        Missing("pm_sampler", "HBM throughput", _NO_SAMPLER, fallback=_MODELLED),
        Missing("pm_sampler", "CTA occupancy", _NO_SAMPLER),
        Missing("kernels", "kernel times and launch gaps", "this version records host operators only"),
        Missing("static", "register spills", libraries),
    ]
